"""The code of a run: freezes this package and the user's task or reader, and loads them."""

from __future__ import annotations

import ast
import errno
import importlib
import inspect
import os
import secrets
import shutil
import stat
import sys
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

import pipeline
from pipeline.command_line import Command
from pipeline.errors import ConfigError, PipelineError
from pipeline.files import shipped, user_on
from pipeline.journal.run_folder import PRIVATE, RunFolder, writing_run

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
    from types import ModuleType

    from pipeline.protocol import Encoder, Reader, Task

PACKAGE = Path(pipeline.__file__).parent
BESIDE = ("sbatch", "configs")  # data next to the package in a checkout, in pipeline/data in a wheel
COPIES = ".code"
WORKER, SUPERVISOR = "pipeline.engine.worker", "pipeline.engine.supervisor"  # modules that jobs start
TASK_SERVER = "pipeline.engine.task_server"


def freeze(runs: Path) -> Path:
    """Return the folder of a frozen copy of this package; make it if it does not exist."""
    return freeze_files(sorted(_files()), runs)


def freeze_files(files: list[tuple[str, Path]], runs: Path) -> Path:
    """Return the folder of a frozen copy of these files (name → source); make it if it does not exist."""
    copy = _own_folder(runs) / digest_of(files)
    if not copy.exists():
        _publish(files, copy)
    return copy


def _own_folder(runs: Path) -> Path:
    """Return the folder of copies. Only this user can enter it, because its content is executed."""
    with writing_run(runs):
        runs.mkdir(parents=True, exist_ok=True)
        mine = user_on(runs)
        for name in (COPIES, f"{COPIES}-{os.geteuid()}"):
            folder = runs / name
            with suppress(FileExistsError):
                folder.mkdir(PRIVATE)
            facts = folder.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == mine:
                with suppress(PermissionError):  # another user's, where a mount shows all users as one
                    folder.chmod(PRIVATE)
                    return folder
        raise PermissionError(errno.EPERM, "the folder of frozen code belongs to another user")


@cache
def package_digest() -> str:
    """Return the digest of this package as this process loaded it."""
    return digest_of(sorted(_files()))


def digest_of(files: list[tuple[str, Path]]) -> str:
    """Return the digest of files and their names."""
    digest = xxhash.xxh3_128()
    for name, path in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the package, with their names in the copy."""
    roots = [PACKAGE, *(folder for folder in map(shipped, BESIDE) if folder.parent == PACKAGE.parent)]
    for root in roots:
        for path in root.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(root.parent)), path


def _publish(files: list[tuple[str, Path]], copy: Path) -> None:
    """Copy files aside and rename the folder into place; another process may do so first."""
    partial = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}.partial")
    with writing_run(copy):
        try:
            for name, path in files:
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)  # keeps the time, by which Python matches bytecode
                compiled = Path(cache_from_source(path))
                if path.suffix == ".py" and compiled.is_file():
                    compiled_target = Path(cache_from_source(target))
                    compiled_target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(compiled, compiled_target)
            partial.rename(copy)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not copy.exists():
                with suppress(OSError):  # not empty: other copies
                    copy.parent.rmdir()
                raise


def module_command(module: str, folder: RunFolder | None = None) -> tuple[str, ...]:
    """Return the command that runs a module from a run's frozen code, never from the current folder."""
    frozen = [folder.code.read_text()] if folder is not None and folder.code.exists() else []
    paths = f"sys.path[:] = [*{frozen!r}, *filter(None, sys.path)]"
    return (sys.executable, "-c", f"import sys; {paths}; from {module} import main; sys.exit(main(sys.argv[1:]))")


@dataclass(frozen=True, slots=True)
class CodeKind:
    """A kind of class that users implement: its name, its setting and its methods."""

    name: str
    where: str
    needed: tuple[str, ...]  # methods


READERS = PACKAGE / "readers"
NOTHING: dict[str, Any] = {}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CORRECT = Command.of("config check", before="correct it, then: ")
TASK = CodeKind("task", "train.task", ("model", "cost", "collate", "loss"))
READER = CodeKind("reader", "data.reader", ("files", "entries", "read"))
ENCODER = CodeKind("encoder", "embed.encoder", ("model", "tokenize", "forward"))


def load_task(name: str | None, options: Mapping[str, Any] | None = None, *, beside: Path | None = None) -> Task:
    """Load the task of that name; look for its module first in `beside`, mostly the configuration's folder."""
    if not name:
        remedy = "--set train.task=package.module:Name   (its methods: python -m pydoc pipeline.protocol)"
        raise ConfigError("train.task is not set: nothing to plan or train", where=TASK.where, remedy=remedy)
    return _load(TASK, name, options or {}, beside)  # type: ignore[no-any-return]


def load_reader(name: str, path: Path, options: Mapping[str, Any], *, beside: Path | None = None) -> Reader:
    """Load the reader of that name for the data at a path; its module is found like a task's."""
    return _load(READER, name, {**options, "path": path}, beside)  # type: ignore[no-any-return]


def load_encoder(name: str, weights: Path, options: Mapping[str, Any], *, beside: Path | None = None) -> Encoder:
    """Load the encoder of that name, with its weights if it takes them; its module is found like a task's."""
    return _load(ENCODER, name, options, beside, {"weights": weights})  # type: ignore[no-any-return]


def _load(
    kind: CodeKind, name: str, options: Mapping[str, Any], beside: Path | None, offered: Mapping[str, Any] = NOTHING
) -> Any:
    """Import a class and return an instance made with these options; any error becomes a ConfigError.

    A class gets those of the `offered` arguments that it takes.
    """
    module_name, _, class_name = name.partition(":")
    if beside is not None and str(beside) not in sys.path:
        sys.path.insert(0, str(beside))  # a frozen copy takes precedence over its source
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        _refuse_namesake(error, kind, beside)
        if not isinstance(error, ModuleNotFoundError):
            raise user_code_failed(f"importing {module_name}", error, kind) from error
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise user_code_failed(f"importing {module_name}", error, kind) from error
        remedy = f"PYTHONPATH=FOLDER where FOLDER holds {error.name}, or install it into this environment"
        raise ConfigError(f"module {error.name!r} not found", where=f"{kind.where}: {name}", remedy=remedy) from None
    except (Exception, SystemExit) as error:
        raise user_code_failed(f"importing {module_name}", error, kind) from error
    own_class = getattr(module, class_name, None)
    if own_class is None:
        needed = f"{', '.join(kind.needed[:-1])} and {kind.needed[-1]}"
        known = ", ".join(sorted(_kind_in(module, kind))) or f"no class with {needed}"
        what = f"{module_name} has no {class_name!r}; it has {known}"
        raise ConfigError(what, where=f"{kind.where}: {name}", remedy=CORRECT)
    _refuse_unknown(own_class, options, kind)
    options = {**options} | {key: value for key, value in offered.items() if takes(own_class, key)}
    try:
        made = own_class(**options) if callable(own_class) else own_class
    except PipelineError as error:  # it explains itself
        error.next = error.next or CORRECT
        raise
    except (Exception, SystemExit) as error:
        raise user_code_failed(f"{name}()", error, kind) from error
    if missing := [method for method in kind.needed if not callable(getattr(made, method, None))]:
        what = f"the {kind.name} has no {', '.join(f'{method}()' for method in missing)}"
        remedy = f"a {kind.name}'s methods: python -m pydoc pipeline.protocol"
        raise ConfigError(what, where=f"{kind.where}: {name}", remedy=remedy)
    return made


@contextmanager
def imported_afresh(folder: Path) -> Iterator[None]:
    """Import fresh copies of the user's modules within the block; restore the imported ones and sys.path after it.

    So a process can work on projects with equally named modules, and sees edits.
    """
    paths, before = list(sys.path), _own_modules({folder, Path.cwd()})
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in _own_modules({folder, Path.cwd()}):
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:] = paths


def _own_modules(folders: set[Path]) -> dict[str, ModuleType]:
    """Return the imported modules from these folders, or with the names of files there."""
    named = {file.stem for folder in folders for file in folder.glob("*.py")}
    own = {name for name, module in sys.modules.items() if name in named or _root_of(module) in folders}
    own -= {PACKAGE.name, "__main__"}
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in own}


def _root_of(module: ModuleType) -> Path | None:
    """Return the folder that a module or a package lies in."""
    known = getattr(module, "__dict__", {})  # sys.modules may hold other objects
    places = [*known.get("__path__", ()), known.get("__file__")]
    return Path(places[0]).parent if isinstance(places[0], str) else None


def _refuse_namesake(error: ImportError, kind: CodeKind, beside: Path | None) -> None:
    """Raise if the missing module is in a package `pipeline` of the user, which this package hides."""
    if (error.name or "").partition(".")[0] != PACKAGE.name:
        return
    for folder in (beside, Path.cwd()):
        for path in () if folder is None else (folder / PACKAGE.name, folder / f"{PACKAGE.name}.py"):
            if path.exists() and path.resolve() != PACKAGE:
                what = f"{_first_line(error)}: {path} is hidden by this program, which is also named `pipeline`"
                remedy = f"rename it, and change its imports: mv {path.name} my_{path.name}"
                raise ConfigError(what, where=kind.where, remedy=remedy) from error


def _refuse_unknown(own_class: Any, options: Mapping[str, Any], kind: CodeKind) -> None:
    """Raise for an option that the class does not take, and suggest the nearest one."""
    try:
        taken = inspect.signature(own_class).parameters
    except (TypeError, ValueError):  # not callable, or of unknown signature
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    for name in options:
        if name not in taken:
            close = get_close_matches(name, taken, n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(taken) or 'none'}"
            what = f"{own_class.__name__} has no option {name!r}{meant}"
            section = kind.where.partition(".")[0]
            raise ConfigError(what, where=f"{section}.options.{name}", remedy=CORRECT)


def takes(own_class: Any, name: str) -> bool:
    """Tell whether a class takes an argument of this name."""
    try:
        return name in inspect.signature(own_class).parameters
    except (TypeError, ValueError):
        return False


def sources(own: Task | Reader | Encoder) -> list[tuple[str, Path]]:
    """Return the user's own source files of a task or a reader, by name relative to their import root.

    They are its module, or all of its package, and what these import from the same root.
    """
    module = sys.modules[type(own).__module__]
    file = Path(inspect.getfile(module)).resolve()
    if PACKAGE in file.parents or "site-packages" in file.parts:
        return []  # our code is frozen separately; installed packages have versions
    return sorted(files_from(file.parents[module.__name__.count(".")], module.__name__).items())


def files_from(root: Path, module: str) -> dict[str, Path]:
    """Return the files of a module, or of its package, and of what these import from below the same root, by name."""
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        for path in _files_of(root, waiting.pop()):
            name = str(path.relative_to(root))
            if name not in files:
                files[name] = path
                waiting += _imported(path)
    return files


def _files_of(root: Path, module: str) -> list[Path]:
    """Return the files of a module, or of its top package; none if it is outside the root.

    Of folders without `__init__.py` only the imported module counts: they may hold a data set.
    """
    top, place = root / module.partition(".")[0], root.joinpath(*module.split("."))
    single = top.with_suffix(".py")
    has_it = place != top and not single.is_file() and (place.is_dir() or place.with_suffix(".py").is_file())
    if (top / "__init__.py").is_file() or has_it:
        return sorted(path for path in top.rglob("*.py") if "__pycache__" not in path.parts)
    return [single] if single.is_file() else []


def _imported(path: Path) -> list[str]:
    """Return the absolute imports of a file, without ours; an imported name may be a module, too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] != "pipeline"]


FIGURES = ("metrics", "outputs")  # methods that evaluate a model and cannot change its weights


def source_digest(own: Task | Reader | Encoder, without: Container[str] = FIGURES) -> str:
    """Return the digest of the user's code; empty without any.

    It ignores comments, formatting, docstrings, and the methods `without` of the task.
    """
    classes = {base.__name__ for base in type(own).__mro__}
    digest, files = xxhash.xxh3_128(), sources(own)
    for name, path in files:
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
            if isinstance(node, ast.ClassDef) and node.name in classes:
                node.body = [part for part in node.body if getattr(part, "name", None) not in without]
        digest.update(f"{name}\0{_plain(tree)!r}\0".encode())
    return digest.hexdigest() if files else ""


def _plain(node: Any) -> Any:
    """Return a syntax tree as plain values, without empty fields: later versions of Python add some."""
    if isinstance(node, list):
        return [_plain(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return (type(node).__name__, fields)


def reading_digest(reader: Reader) -> str:
    """Return the digest of a reader's code together with our own readers, which it may use."""
    own = sources(reader) or [("", Path(inspect.getfile(type(reader))))]
    ours = [(str(path.relative_to(READERS.parent)), path) for path in sorted(READERS.rglob("*.py"))]
    return digest_of([*own, *ours])


@contextmanager
def blamed(task: Task) -> Iterator[None]:
    """Turn errors of a task's code within the block into ConfigErrors; other errors are bugs of ours."""
    try:
        yield
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        own = inspect.getfile(type(task))
        if any(frame.filename == own for frame in traceback.extract_tb(error.__traceback__)):
            raise user_code_failed("running the task", error) from error
        raise


def user_code_failed(doing: str, error: BaseException, kind: CodeKind = TASK) -> ConfigError:
    """Return a ConfigError that says where in the user's code an error was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    own = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), None)
    if own is not None and own is not frames[-1]:
        place += f", called from {own.filename}:{own.lineno}"
    what = f"{doing} failed with {type(error).__name__}: {_first_line(error)}{place}"
    return ConfigError(what, where=kind.where, remedy=f"correct the {kind.name}; --debug shows the traceback")


def _is_ours(file: str) -> bool:
    return Path(__file__).parents[1] in Path(file).parents or "importlib" in file


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or "no message"


def _kind_in(module: Any, kind: CodeKind) -> Iterator[str]:
    """Yield the names of a module's classes that have the methods of a kind."""
    for name, value in vars(module).items():
        if isinstance(value, type) and all(hasattr(value, method) for method in kind.needed):
            yield name
