"""The command line: the only place where errors become exit codes. It does not import torch."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from pipeline import __version__
from pipeline.cli.help import DATA, DEBUG, RESULTS, RUN, SHORTCUTS, START, Later, LaterVerbs, Verbs, option
from pipeline.command_line import Command
from pipeline.config.masking import without_secrets
from pipeline.errors import PipelineError, SubmissionRefused

if TYPE_CHECKING:
    from types import FrameType, TracebackType

EPILOG = "Exit codes: 0 ok, 1 a bug, 2 configuration, 3 data, 4 damage, 5 infeasible, 6 refused, 7 a job failed."
ASKED = "__complete"  # the word by which a completion script asks
UNREAD = 141  # exit code of shells for SIGPIPE

VERBS = {
    START: {
        "init": ("setup_verbs:init_command", "Write a commented pipeline.yaml and a cluster profile."),
        "doctor": ("setup_verbs:doctor_command", "Check settings, data, disk, torch and cluster; suggest fixes."),
        "demo": ("setup_verbs:demo_command", "Create a small project here; plan, train, survive faults, report."),
        "completion": ("setup_verbs:completion_command", "Print a script that makes your shell complete commands."),
        "config": ("setup_verbs:config_app", "Show, check and describe the configuration."),
    },
    RUN: {
        "plan": ("plan_verbs:plan", "Estimate the memory, time and disk of stages before you submit."),
        "submit": ("run_verbs:submit_command", "Run a stage and everything it needs; finished work is kept."),
        "status": ("control_verbs:status_command", "Show the progress of a run, or how it ended."),
        "logs": ("log_verbs:logs_command", "Show logs of failed tasks, else the newest logs."),
        "resume": ("control_verbs:resume_command", "Resume a stopped, failed or orphaned run."),
        "cancel": ("control_verbs:cancel_command", "Cancel a run or points of its sweep; finished work is kept."),
        "runs": ("control_verbs:runs_app", "List runs and remove the folders of old ones."),
    },
    RESULTS: {
        "report": ("report_verbs:report_command", "Show requested and used resources of a run, and better requests."),
        "compare": ("report_verbs:compare_command", "Compare trainings: settings, metrics over seeds, memory, hours."),
        "model": ("model_verbs:models_app", "List, show and export trained models."),
        "embeddings": ("file_verbs:embeddings_app", "Write cached embeddings to files for other programs."),
    },
    DATA: {
        "data": ("split_verb:data_app", "List the items of the data set and split it."),
        "weights": ("model_verbs:weights_app", "Download, import, check and create encoder checkpoints."),
        "cache": ("cache_verbs:app", "Inspect, check, repair, clean or move the cache."),
    },
    SHORTCUTS: {
        "embed": ("file_verbs:embed_command", "Embed the sequences of a FASTA file without a project."),
        "dock": ("file_verbs:dock_command", "Dock two proteins: sample poses, rank them, write the best."),
        "find-batch": ("plan_verbs:find_batch_command", "Find the largest micro-batch that fits your training script."),
    },
    DEBUG: {
        "explain": ("explain_verb:explain_command", "Explain why an item or a stage is missing, rebuilt or waiting."),
        "replay": ("report_verbs:replay_command", "Replay a failed training step and show what fails."),
    },
}
OLD_NAMES = {
    "export": "file_verbs:old_export_app",
    "items": "report_verbs:items_command",
    "split": "split_verb:split_command",
    "tune": "plan_verbs:find_batch_command",
}
MEANT = {stage: f"submit {stage}" for stage in ("scan", "graph", "train", "evaluate", "predict")}
MEANT |= {"run": "submit", "start": "submit", "stop": "cancel", "why": "explain"}  # words of other tools


class _Pipeline(LaterVerbs):
    later: ClassVar = {
        **{name: Later(*row, panel) for panel, rows in VERBS.items() for name, row in rows.items()},
        **{name: Later(place) for name, place in OLD_NAMES.items()},
    }

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Find the command; name ours for a stage or a word of another tool."""
        if args[0] in MEANT:
            ctx.fail(f"No such command {args[0]!r}. Did you mean: pipeline {MEANT[args[0]]}?")
        return super().resolve_command(ctx, args)


app = Verbs(
    "Train protein-structure models on a shared Slurm cluster, with memory planned before you submit.",
    name="pipeline",
    epilog=EPILOG,
    cls=_Pipeline,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


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
    from pipeline.cli.options import show_log

    show_log(debug=debug)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error with its secrets masked; used as `sys.excepthook`."""
    typer.echo(without_secrets("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)


def _print_completions() -> None:
    """Print completions for the typed line; hide errors from the shell."""
    with suppress(Exception):
        from pipeline.cli.options import answer

        for line in answer(typer.main.get_command(app), " ".join(sys.argv[2:])):
            typer.echo(line)


def _is_printed() -> bool:
    """End the line on stdout; tell whether stdout still works."""
    if sys.__stdout__ is None:  # closed: descriptor 1 may belong to another file
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
    """Turn SIGTERM into an exception, so that cleanup runs, such as showing the cursor again."""
    raise _Terminated


def main() -> None:
    """Run a command line and leave with its exit code."""
    for stream in ("stdout", "stderr"):  # closed, as by `>&-`
        if getattr(sys, stream) is None:
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115 - it stays open to the end
    sys.excepthook = _print_traceback
    atexit.register(gc.freeze)  # saves half a second of garbage collection over torch at exit
    if sys.argv[1:2] == [ASKED]:
        _print_completions()
        return
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
        if isinstance(end.__context__, BrokenPipeError):  # the reader of our output is gone: not a bug
            sys.exit(UNREAD)
        raise
    except OSError as error:
        if _is_printed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not flush it again at exit and complain
        if isinstance(error, BrokenPipeError):
            sys.exit(UNREAD)
        typer.echo(f"error: cannot write the output: {error.strerror}", err=True)
        sys.exit(SubmissionRefused.exit_code)
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # so that the parent sees that a signal ended this process


if __name__ == "__main__":
    main()
