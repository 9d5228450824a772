"""What `pipeline.api` offers to notebooks and other programs: the commands as functions.

They call what the command line calls, return what it prints with `--json`, and print nothing themselves.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from pipeline.command_line import Command
from pipeline.config.load import find_config, read_config
from pipeline.engine.lifecycle import cancel as end
from pipeline.engine.lifecycle import cancellation_of, opened_run
from pipeline.engine.submission import Wanted, checked, create, followed, read_submission, refuse_failed, start
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.budget import spending_of_run
from pipeline.journal.run_folder import by_path, find_run
from pipeline.journal.run_view import view
from pipeline.project.run_code import imported_afresh
from pipeline.stage_names import StageName
from pipeline.training.evaluating.results import DESCRIPTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from pipeline.journal.run_folder import RunFolder

    Place: TypeAlias = str | os.PathLike[str]
    Sets: TypeAlias = Sequence[str] | Mapping[str, Any]

LINES = "predictions.jsonl"  # of a folder of predictions, with all items
ONE_AT_A_TIME = RLock()  # what is imported belongs to the whole process


def submit(
    config: Place,
    stage: str | None = None,
    *,
    executor: str | None = None,
    set: Sets = (),  # noqa: A002 - as --set
    model: Place | None = None,
    only: bool = False,
    dry_run: bool = False,
    wait: bool = False,
) -> dict[str, Any]:
    """Run a stage and everything it needs, as `pipeline submit` does; finished work is kept.

    `config` is the folder of a project or its configuration file, and `set` overrides settings, such as
    `{"train.epochs": 3}` or `["train.epochs=3"]`. The other arguments are the options of the command. With `wait`, the
    call returns when the run has ended, and raises the error of a failed run.

    The result has these keys:

    - `run`, `folder`: its name and folder; None where nothing was submitted
    - `new`: False if an active run already does the same
    - `stages`: the names of its stages
    - `plan`: what `pipeline submit --dry-run --json` prints
    - `notes`: what needs your attention
    - `status`: with `wait`, the same as `status()`
    """
    notes, typed = list[str](), _typed(set)
    name = None if model is None else os.fspath(model)
    wanted = Wanted(stage=stage or "all", executor=executor, only=only, model=name, dry=dry_run)
    result: dict[str, Any] = {"run": None, "folder": None, "new": False, "stages": [], "plan": {}, "notes": notes}
    with _as_guest(config, typed, notes):
        submission = read_submission(Path(config), typed, wanted)
        result["stages"] = submission.stages
        with checked(submission, lambda *_: None, notes.append) as submission:
            result["plan"] = _plain(submission.to_json())
            if dry_run:
                return result
            folder, result["new"] = create(submission)
            if result["new"] and (pid := start(folder, submission.executor, submission.project.config)):
                Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()  # else a zombie stays
    result |= {"run": folder.name, "folder": str(folder.path)}
    return result | ({"status": _at_its_end(folder)} if wait else {})


def status(config: Place, run: str | None = None) -> dict[str, Any]:
    """Return what `pipeline status --json` prints: the progress of a run, or how it ended.

    `run` is its name, a prefix of it, or its folder. Default: the newest run.
    """
    return _status_of(_run(config, run))


def wait(config: Place, run: str | None = None) -> dict[str, Any]:
    """Wait until a run has ended, and return its status; raise the error of a failed run."""
    return _at_its_end(_run(config, run))


def cancel(config: Place, run: str | None = None) -> dict[str, Any]:
    """Cancel a run, as `pipeline cancel --yes` does, and return its status; finished work is kept."""
    folder, _, executor, seen = opened_run(_run(config, run), "cancel")
    with executor:
        end(folder, seen, executor, cancellation_of(seen, executor, None), None)
    return _status_of(folder)


def predict(
    config: Place,
    model: Place,
    data: Place | None = None,
    *,
    executor: str | None = None,
    set: Sets = (),  # noqa: A002 - as --set
    wait: bool = True,
) -> dict[str, Any]:
    """Predict items with a trained model, as `pipeline submit predict --model` does.

    `data` is another data set: a folder of structures, or a table. Default: `data.path` of the configuration.

    The result is that of `submit()`. Its key `predictions` is the folder of the predictions, which `predictions()`
    reads; None without `wait`.
    """
    settings = _typed(set)
    if data is not None:
        source = "glob" if Path(data).is_dir() else "manifest"
        settings = [f"data.source={source}", f"data.path={os.fspath(data)}", *settings]
    result = submit(config, StageName.PREDICT, executor=executor, set=settings, model=model, wait=wait)
    census = result["status"]["stages"][-1]["census"] if wait else {}
    return result | {"predictions": census.get("folder") or None}


def predictions(folder: Place) -> Iterator[dict[str, Any]]:
    """Yield the predictions of a folder item by item: its `id`, and each output as number, list or numpy array.

    An output that an item lacks is None. Memory does not grow with the number of items.
    """
    if not (Path(folder) / DESCRIPTION).is_file():
        remedy = Command.submit(StageName.PREDICT)
        raise ConfigError("there are no complete predictions here", where=str(folder), remedy=remedy)
    names, opened = dict[str, str](), dict[str, Any]()  # of each output with arrays: the file that was read last
    with (Path(folder) / LINES).open(encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            for name in [key.removesuffix(".file") for key in item if key.endswith(".file")]:
                file, _ = item.pop(f"{name}.file"), item.pop(f"{name}.shape")
                if file and names.get(name) != file:
                    names[name], opened[name] = file, safe_open(Path(folder) / file, "np")
                item[name] = opened[name].get_tensor(item["id"]) if file else None
            yield item


class _Notes(logging.Handler):
    """Takes warnings of this package, which Python prints where a program does not log."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())


@contextmanager
def _as_guest(config: Place, sets: Sequence[str], notes: list[str]) -> Iterator[None]:
    """Leave the process as it was, and let the remedy of an error name the project."""
    log, handler = logging.getLogger("pipeline"), _Notes(notes)
    with ONE_AT_A_TIME, imported_afresh(find_config(Path(config)).absolute().parent):
        log.addHandler(handler)
        try:
            yield
        except PipelineError as error:
            error.in_project(Command.about(config, sets))
            raise
        finally:
            log.removeHandler(handler)


def _run(config: Place, run: str | None) -> RunFolder:
    loaded = read_config(find_config(Path(config)))
    return (by_path(run) if run else None) or find_run(loaded.config.cluster.runs, run)


def _at_its_end(folder: RunFolder) -> dict[str, Any]:
    refuse_failed(folder, followed(folder, lambda _reader: None))
    return _status_of(folder)


def _status_of(folder: RunFolder) -> dict[str, Any]:
    return _plain(replace(view(folder), account=spending_of_run(folder).account()).to_json())


def _typed(sets: Sets) -> list[str]:
    """Return settings as --set takes them."""
    if not isinstance(sets, Mapping):
        return list(sets)
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in sets.items()}
    return [f"{key}={text}" for key, text in texts.items()]


def _plain(document: Any) -> dict[str, Any]:
    """Return a document as `--json` prints it."""
    plain: dict[str, Any] = json.loads(json.dumps(document, default=str))
    return plain
