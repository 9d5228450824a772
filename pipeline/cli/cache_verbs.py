"""`pipeline cache`: what the cache holds, what is wrong with it, what of it can go, and where else it goes."""

from __future__ import annotations

import typer

from pipeline.cli import cache_check, cache_moves

app = typer.Typer(help="Look at the cache, mend it, clean it, move it.", no_args_is_help=True)
app.command()(cache_moves.stat)
app.command()(cache_check.validate)
app.command()(cache_check.repair)
app.command()(cache_moves.regenerate)
app.command()(cache_moves.clean)
app.command()(cache_check.compact)
app.command("export")(cache_moves.export)
app.command("import")(cache_moves.import_)


@app.callback()
def options() -> None:
    """Look at the cache, mend it, clean it, move it."""
