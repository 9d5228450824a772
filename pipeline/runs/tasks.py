"""The user's task, loaded by name: `package.module:Name`."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, PipelineError
from pipeline.runs.frozen import PACKAGE, digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.protocol import Task

NEEDED = ("model", "cost", "collate", "loss")
WHERE = "train.task"


def load_task(name: str | None, options: Mapping[str, Any] | None = None, *, beside: Path | None = None) -> Task:
    """Return a task; modules are looked for in a folder first, mostly that of the configuration."""
    if not name:
        remedy = "--set train.task=package.module:Name   (what it must have: pipeline/protocol.py)"
        raise ConfigError("no task is named: there is nothing to plan or to train", where=WHERE, remedy=remedy)
    module_name, _, class_name = name.partition(":")
    if beside is not None and str(beside) not in sys.path:
        sys.path.insert(0, str(beside))  # a frozen copy counts more than what it was made of
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise failed(f"importing {module_name}", error) from error
        remedy = f"PYTHONPATH=FOLDER where FOLDER holds {error.name}, or install it into this environment"
        raise ConfigError(f"there is no module {error.name!r}", where=f"{WHERE}: {name}", remedy=remedy) from None
    except (Exception, SystemExit) as error:
        raise failed(f"importing {module_name}", error) from error
    found = getattr(module, class_name, None)
    if found is None:
        known = ", ".join(sorted(_tasks_in(module))) or "no class with model, cost, collate and loss"
        what = f"{module_name} has no {class_name!r}; it has {known}"
        raise ConfigError(what, where=f"{WHERE}: {name}", remedy="pipeline config check")
    try:
        task = found(**(options or {})) if callable(found) else found
    except (Exception, SystemExit) as error:
        raise failed(f"{name}()", error) from error
    if missing := [method for method in NEEDED if not callable(getattr(task, method, None))]:
        what = f"the task has no {', '.join(f'{method}()' for method in missing)}"
        raise ConfigError(what, where=f"{WHERE}: {name}", remedy="what a task must have: pipeline/protocol.py")
    return task  # type: ignore[no-any-return]


def sources(task: Task) -> list[tuple[str, Path]]:
    """Return the user's own files that a task is made of, by their names below the folder that imports begin at.

    They are its module, or all of its package, and what these import from beside them.
    """
    module = sys.modules[type(task).__module__]
    file = Path(inspect.getfile(module)).resolve()
    if PACKAGE in file.parents or "site-packages" in file.parts:
        return []  # ours is frozen anyway; what is installed has a version
    root = file.parents[module.__name__.count(".")]
    found: dict[str, Path] = {}
    waiting = [module.__name__]
    while waiting:
        for path in _files_of(root, waiting.pop()):
            name = str(path.relative_to(root))
            if name not in found:
                found[name] = path
                waiting += _imported(path)
    return sorted(found.items())


def _files_of(root: Path, module: str) -> list[Path]:
    """Return the files of a module, or of the package that it is in; none where it is from elsewhere."""
    top = root / module.partition(".")[0]
    if (top / "__init__.py").is_file() or (top.is_dir() and "." in module):
        return sorted(path for path in top.rglob("*.py") if "__pycache__" not in path.parts)
    single = top.with_suffix(".py")
    return [single] if single.is_file() else []


def _imported(path: Path) -> list[str]:
    """Return the names of the modules that a file imports by their full names."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] != "pipeline"]


def source_digest(task: Task) -> str:
    """Return the digest of the user's own code; empty where the task is ours."""
    files = sources(task)
    return digest_of(files) if files else ""


@contextmanager
def blamed(task: Task) -> Iterator[None]:
    """Let what a task's own code raises be told as such; what is raised elsewhere is a bug of ours."""
    try:
        yield
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        own = inspect.getfile(type(task))
        if any(frame.filename == own for frame in traceback.extract_tb(error.__traceback__)):
            raise failed("running the task", error) from error
        raise


def failed(doing: str, error: BaseException) -> ConfigError:
    """Return an error that says where in the user's code theirs was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    own = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), None)
    if own is not None and own is not frames[-1]:
        place += f", called from {own.filename}:{own.lineno}"
    what = f"{doing} failed with {type(error).__name__}: {_first_line(error)}{place}"
    return ConfigError(what, where=WHERE, remedy="correct the task; --debug shows where it came from")


def _is_ours(file: str) -> bool:
    return Path(__file__).parents[1] in Path(file).parents or "importlib" in file


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or "no message"


def _tasks_in(module: Any) -> Iterator[str]:
    """Yield the names of what could be a task."""
    for name, value in vars(module).items():
        if isinstance(value, type) and all(hasattr(value, method) for method in NEEDED):
            yield name
