"""The command line: the only place where errors become exit codes. Nothing here imports torch."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline import __version__
from pipeline.cli import (
    cache_verbs,
    completion,
    control_verbs,
    demo_verb,
    explain_verb,
    file_verbs,
    log_verbs,
    model_verbs,
    plan_verbs,
    report_verbs,
    run_verbs,
    setup_verbs,
    split_verb,
)
from pipeline.cli.help import DATA, DEBUG, RESULTS, RUN, SHORTCUTS, START, Verbs, option
from pipeline.command_line import Command
from pipeline.config.masking import without_secrets
from pipeline.errors import PipelineError, SubmissionRefused

if TYPE_CHECKING:
    from types import FrameType, TracebackType

EPILOG = "Exit codes: 0 ok, 1 a bug, 2 configuration, 3 data, 4 damage, 5 infeasible, 6 refused, 7 a job failed."
UNREAD = 141  # as shells call an end by SIGPIPE
READING = (
    "plan", "explain", "status", "items", "logs", "report", "compare", "cache", "config", "doctor", "weights", "model",
    "split", "data", "runs",
)  # fmt: skip

app = Verbs(
    "Train protein-structure models on a shared Slurm cluster, with memory planned before you submit.",
    name="pipeline",
    epilog=EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("init", rich_help_panel=START)(setup_verbs.init_command)
app.command("doctor", rich_help_panel=START)(setup_verbs.doctor_command)
app.command("demo", rich_help_panel=START)(demo_verb.demo_command)
app.add_typer(setup_verbs.config_app, name="config", rich_help_panel=START)
app.command("completion", rich_help_panel=START)(setup_verbs.completion_command)
app.command("plan", cls=explain_verb.WithGraph, rich_help_panel=RUN)(plan_verbs.plan_command)
app.command("submit", rich_help_panel=RUN)(run_verbs.submit_command)
app.command("status", rich_help_panel=RUN)(control_verbs.status_command)
app.command("logs", rich_help_panel=RUN)(log_verbs.logs_command)
app.command("resume", rich_help_panel=RUN)(control_verbs.resume_command)
app.command("cancel", rich_help_panel=RUN)(control_verbs.cancel_command)
app.add_typer(control_verbs.runs_app, name="runs", rich_help_panel=RUN)
app.command("report", rich_help_panel=RESULTS)(report_verbs.report_command)
app.command("compare", rich_help_panel=RESULTS)(report_verbs.compare_command)
app.add_typer(model_verbs.models_app, name="model", rich_help_panel=RESULTS)
app.add_typer(file_verbs.embeddings_app, name="embeddings", rich_help_panel=RESULTS)
app.add_typer(split_verb.data_app, name="data", rich_help_panel=DATA)
app.add_typer(model_verbs.weights_app, name="weights", rich_help_panel=DATA)
app.add_typer(cache_verbs.app, name="cache", rich_help_panel=DATA)
app.command("embed", rich_help_panel=SHORTCUTS)(file_verbs.embed_command)
app.command("dock", rich_help_panel=SHORTCUTS)(file_verbs.dock_command)
app.command("find-batch", rich_help_panel=SHORTCUTS)(plan_verbs.find_batch_command)
app.command("explain", rich_help_panel=DEBUG)(explain_verb.explain_command)
app.command("replay", rich_help_panel=DEBUG)(report_verbs.replay_command)
old = Verbs("Old name of `pipeline embeddings`.", hidden=True)
old.command("embeddings")(file_verbs.export_embeddings_command)
app.add_typer(old, name="export")  # these names are of version 0.1
app.command("items", hidden=True)(report_verbs.items_command)
app.command("split", hidden=True)(split_verb.split_command)
app.command("tune", hidden=True)(plan_verbs.find_batch_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipeline {__version__}")
        raise typer.Exit


@app.callback()
def pipeline_options(
    _version: Annotated[
        bool, option("--version", "Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, option("--debug", "Show a traceback with each error, and debug logs.")] = False,
) -> None:
    """Set up logging."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Hiding("%(levelname)s: %(message)s"))


class _Hiding(logging.Formatter):
    """Masks secrets in log lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a log record."""
        return without_secrets(super().format(record))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error with its secrets masked; used as `sys.excepthook`."""
    typer.echo(without_secrets("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)


def _print_completions() -> None:
    """Print what can follow on the line that is being typed; an error must not disturb the shell."""
    with suppress(Exception):
        for line in completion.answer(typer.main.get_command(app), " ".join(sys.argv[2:])):
            typer.echo(line)


def _is_printed() -> bool:
    """Tell whether more can be printed, which ends the line."""
    if sys.__stdout__ is None:  # closed: 1 may be another file's number by now
        return True
    try:
        typer.echo(nl=False)  # which flushes
        os.write(1, b"\n")
    except OSError:
        return False
    return True


class _Terminated(BaseException):
    """The process got SIGTERM."""


def _raise_terminated(_signal: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that everything is cleaned up: a terminal gets back its cursor."""
    raise _Terminated


def main() -> None:
    """Run a command line and leave with its exit code."""
    for stream in ("stdout", "stderr"):  # closed, as by `>&-`
        if getattr(sys, stream) is None:
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115 - it stays open to the end
    sys.excepthook = _print_traceback
    atexit.register(gc.freeze)  # else a last collection walks through torch for half a second
    if sys.argv[1:2] == [completion.ASKED]:
        _print_completions()
        return
    if sys.argv[1:2] and sys.argv[1] in READING and hasattr(signal, "SIGPIPE"):  # `… | head` is no failure
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        try:
            app()
        finally:
            typer.echo(nl=False)  # which flushes
    except PipelineError as error:
        error.in_project(Command.typed(sys.argv[1:]))
        if "--debug" in sys.argv:
            typer.echo(without_secrets(traceback.format_exc()), err=True, nl=False)
        typer.echo(f"error: {without_secrets(str(error))}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # nobody reads what is printed: no bug
            sys.exit(UNREAD)
        raise
    except OSError as error:
        if _is_printed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again as it ends, and complains
        if isinstance(error, BrokenPipeError):
            sys.exit(UNREAD)
        typer.echo(f"error: cannot write the output: {error.strerror}", err=True)
        sys.exit(SubmissionRefused.exit_code)
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # so that the parent sees that a signal ended this process


if __name__ == "__main__":
    main()
