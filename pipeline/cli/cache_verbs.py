"""`pipeline cache`: what the cache holds, what is wrong with it, what of it can go, and where else it goes."""

from __future__ import annotations

import typer

from pipeline.cli import cache_check, cache_moves

app = typer.Typer(help="Look at the cache, mend it, clean it, move it.", no_args_is_help=True)
app.command("stat")(cache_moves.stat_command)
app.command("validate")(cache_check.validate_command)
app.command("repair")(cache_check.repair_command)
app.command("regenerate")(cache_moves.regenerate_command)
app.command("clean")(cache_moves.clean_command)
app.command("compact")(cache_check.compact_command)
app.command("export")(cache_moves.export_command)
app.command("import")(cache_moves.import_cache_command)


@app.callback()
def cache_options() -> None:
    """Look at the cache, mend it, clean it, move it."""
