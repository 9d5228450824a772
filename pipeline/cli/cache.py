"""`pipeline cache`: what the cache holds."""

from __future__ import annotations

from dataclasses import asdict

import typer

from pipeline.cli.options import ConfigFile, Json, Sets, load_config, print_json

app = typer.Typer(help="Look at the cache.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Look at the cache."""


@app.command()
def stat(config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Print what the cache holds, from its index alone."""
    from pipeline.report import tables
    from pipeline.store.cache import Cache

    cache = Cache(load_config(config, sets).config.cache.root)
    stats = [cache.kind(kind).stat() for kind in cache.kinds()]
    recipes = {one.kind: cache.recipes(one.kind) for one in stats}
    if as_json:
        kinds = [asdict(one) | {"recipes": [asdict(recipe) for recipe in recipes[one.kind]]} for one in stats]
        print_json({"root": cache.root, "kinds": kinds})
        return
    tables.show(f"cache {cache.root}", "", tables.store_table(stats), "", tables.recipe_table(recipes))
