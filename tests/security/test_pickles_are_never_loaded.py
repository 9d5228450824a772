"""A pickle that runs code when it is read, in the place of every file that the program reads: nothing of it runs.

Checkpoints of ESM-2 and weights to begin with are tested beside their readers, too (test_checkpoint.py of the encoder,
test_pretrained.py of training), in all forms of torch.save; here each goes in by its command.
"""

from __future__ import annotations

import ast
import pickle
import re
import shutil
from collections.abc import Callable
from functools import cache as kept
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.load import from_resolved
from pipeline.encoder.published_weights import read_pt, read_safetensors
from pipeline.errors import PipelineError, WeightsUnusable
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder
from pipeline.memory.history import Profiles
from pipeline.readers.pairs import Pairs
from pipeline.readers.spectra import Spectra
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.transfer import export_cache, take_in
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import FORMATS, format_of, read_file
from pipeline.training.checkpoints.checkpoint import open_checkpoint
from pipeline.training.evaluating.outputs import GatheredOutputs
from pipeline.training.forensics import step_bundle
from tests.conftest import ROOT
from tests.security.bombs import script
from tests.testkit.evil import Evil
from tests.training.checkpoints.saved import checkpoints, state_at
from tests.training.forensics.test_bundles import BUNDLE_OF, RNG_OF

KEY = b"sixteen bytes..."


@pytest.fixture(params=["torch.save", "bare"])
def evil(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """Return the bytes of such a pickle, which work."""
    made, path = tmp_path / "made", tmp_path / "evil"
    if request.param == "bare":
        path.write_bytes(pickle.dumps(Evil(made)))
        pickle.loads(path.read_bytes())
    else:
        torch.save({"model": Evil(made)}, path)
        torch.load(path, weights_only=False)
    assert made.exists()  # so the file is what it should be
    made.unlink()
    return path.read_bytes()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a cache of one record."""
    root = tmp_path_factory.mktemp("made") / "cache"
    store = CacheFolder(root).kind("graph")
    with store.writer() as writer:
        writer.put(KEY, {"a": np.arange(3)})
    store.write_index()
    return root


def planted(folder: Path, evil: bytes) -> list[Path]:
    """Put the pickle in the place of every file of a folder, and return them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.unlink()
        path.write_bytes(evil)
    return files


def refused(read: Callable[[], object]) -> str:
    """Read, and return why it was refused; empty where what is there counts as nothing."""
    try:
        read()
    except (PipelineError, UnusableInput) as error:
        return str(error)
    return ""


def test_every_file_of_a_cache(tmp_path: Path, cache: Path, evil: bytes) -> None:
    names = [path.relative_to(cache) for path in cache.rglob("*") if path.is_file()]
    assert {"index.bin", "pipeline-cache.json"} < {path.name for path in names}
    for number, name in enumerate(names):
        copy = shutil.copytree(cache, tmp_path / f"cache-{number}")
        (copy / name).unlink()
        (copy / name).write_bytes(evil)

        def read(root: Path = copy) -> object:
            store = CacheFolder(root).kind("graph")
            return store.stat(), list(store.missing([KEY])), store.get(KEY)

        told = refused(read)
        assert told or name.name == "index.bin"  # which is made anew from the shards
    assert not (tmp_path / "made").exists()


def test_every_file_of_an_export_that_is_brought_in(tmp_path: Path, cache: Path, evil: bytes) -> None:
    export_cache(CacheFolder(cache), tmp_path / "export")
    for path in [one for one in (tmp_path / "export").rglob("*") if one.is_file()]:
        copy = shutil.copytree(tmp_path / "export", tmp_path / "other")
        planted_at = copy / path.relative_to(tmp_path / "export")
        planted_at.unlink()
        planted_at.write_bytes(evil)
        told: list[object] = []
        why = refused(lambda here=copy, told=told: told.extend(take_in(CacheFolder(tmp_path / "new"), here).refused))  # type: ignore[misc]
        is_needed = path.name != "pipeline-cache.json"  # which an import does not read
        assert bool(why or told) == is_needed, path
        shutil.rmtree(copy)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert not (tmp_path / "made").exists()


def test_every_file_of_a_training_checkpoint(tmp_path: Path, evil: bytes) -> None:
    checkpoints(tmp_path / "good").save(state_at(1), 1)
    (good,) = (tmp_path / "good").glob("step-*")
    names = [path.name for path in good.iterdir()]
    assert len(names) >= 3
    for name in names:
        copy = shutil.copytree(good, tmp_path / name / good.name)
        (copy / name).unlink()
        (copy / name).write_bytes(evil)
        assert refused(lambda here=copy: open_checkpoint(here).sealed.verify())  # type: ignore[misc]
    assert not (tmp_path / "made").exists()


def test_every_file_of_a_bundle_for_replaying(tmp_path: Path, evil: bytes) -> None:
    for name in ("manifest.json", "rng.safetensors"):
        written = step_bundle.write_bundle(tmp_path / name, BUNDLE_OF, RNG_OF)
        assert written is not None
        assert {path.name for path in written.iterdir()} == {"manifest.json", "rng.safetensors"}
        (written / name).unlink()
        (written / name).write_bytes(evil)
        assert refused(lambda here=written: (step_bundle.read_bundle(here), step_bundle.read_rng(here)))  # type: ignore[misc]
        assert not (tmp_path / "made").exists()


def test_a_structure_of_every_format(tmp_path: Path, evil: bytes) -> None:
    for suffix in sorted(FORMATS):
        (path := tmp_path / f"a{suffix}").write_bytes(evil)
        data = read_file(path, 1 << 20)
        assert refused(partial(parse_structure, data, format_of(path), FileReading(), beside=evil)), suffix
        assert not (tmp_path / "made").exists(), suffix


def test_a_file_of_a_reader(tmp_path: Path, evil: bytes) -> None:
    for suffix, reader in ((".mgf", Spectra), (".h5", Spectra), (".csv", Pairs), (".tsv", Pairs)):
        (path := tmp_path / f"a{suffix}").write_bytes(evil)
        found: list[object] = []
        why = refused(lambda: found.extend(reader(path).entries()))  # noqa: B023 - called at once
        assert why or all(hasattr(one, "reason") for one in found), suffix
        assert not (tmp_path / "made").exists(), suffix


def test_weights_of_either_name(tmp_path: Path, evil: bytes) -> None:
    for name in ("esm2.pt", "esm2.safetensors"):
        (tmp_path / name).write_bytes(evil)
        read = read_pt if name.endswith("pt") else lambda path: read_safetensors([path])
        assert refused(lambda here=tmp_path / name, read=read: read(here))  # type: ignore[misc]
    assert not (tmp_path / "made").exists()


def test_a_file_of_weights_does_not_change_how_the_next_one_is_read(tmp_path: Path) -> None:
    called = b"(X\1\0\0\0actorch._utils\n_rebuild_parameter\n"
    read_pt(script(tmp_path / "first.pt", called + b"N}X\x0c\0\0\0__defaults__K\5\x85s\x86bu"), foreign=True)
    with pytest.raises(WeightsUnusable):
        read_pt(script(tmp_path / "next.pt", called + b")Ru"), foreign=True)  # a call without its argument


def test_every_file_of_a_run(tmp_path: Path, evil: bytes) -> None:
    run = RunFolder(tmp_path / "20260101-0000")
    run.events.mkdir(parents=True)
    (run.events / "supervisor-1.jsonl").write_bytes(evil + b"\n")
    run.config.write_bytes(evil)
    assert list(LedgerReader(run).fresh()) == []
    assert refused(lambda: from_resolved(run.config.read_text("latin-1"), str(run.config)))
    assert not (tmp_path / "made").exists()


def test_what_is_remembered_of_earlier_runs(tmp_path: Path, evil: bytes) -> None:
    asked = ("embed", "ab12", "north")
    (tmp_path / "tasks-7.jsonl").write_bytes(evil + b"\n")
    assert Profiles(tmp_path / "tasks.jsonl").suggest(*asked, planned_bytes=1 << 30).tasks == 0
    assert not (tmp_path / "made").exists()


def test_outputs_of_an_evaluation(tmp_path: Path, evil: bytes) -> None:
    (tmp_path / "outputs").mkdir()
    for name in ("rank-0-0.safetensors", "rank-0-0.json", "part-000000.safetensors"):
        (tmp_path / "outputs" / name).write_bytes(evil)
    refused(lambda: list(GatheredOutputs(tmp_path / "outputs")))
    assert not (tmp_path / "made").exists()


# ── and nothing in the source could ────────────────────────────────────────────────────────────────────────────────

RUNS_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
UNPICKLES = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "marshal.load", "shelve.open",
             "joblib.load", "pandas.read_pickle", "np.load", "numpy.load", "torch.jit.load"}  # fmt: skip
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load", "yaml.full_load",
          "yaml.unsafe_load"}  # fmt: skip
UNPICKLING_COLLECTIVE = re.compile(
    r"(gather|broadcast|scatter|send|recv)_object|^torch\.distributed\.(rpc|optim)|^ZeroRedundancyOptimizer$"
)
IMPORTS = {  # modules by a name that is not written in the source
    "pipeline/project/run_code.py": "the user's own task or reader, which train.task and data.reader name",
    "pipeline/structures/parsing/structure_files.py": "one of the packages in EXTRA",
    "pipeline/cluster/fork_server.py": "those that tasks of this package begin with",
    "pipeline/api.py": "one of its own table of public names",
    "pipeline/cli/help.py": "one of the command line's own table of verbs",
    "pipeline/cli/options.py": "the module of typer's, or click's, that the command line is made of",
}


def calls_in(path: Path) -> list[tuple[str, str, ast.Call]]:
    """Return every call in a file: the file, what is called, and the call."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [(str(path.relative_to(ROOT)), ast.unparse(node.func), node) for node in nodes]


@kept
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return every call in the package."""
    return [call for path in sorted((ROOT / "pipeline").rglob("*.py")) for call in calls_in(path)]


def refuses_pickles(call: ast.Call) -> bool:
    """Say whether a call of numpy's reader forbids pickled arrays in its own words."""
    words = {word.arg: word.value for word in call.keywords}
    refusal = words.get("allow_pickle")
    return isinstance(refusal, ast.Constant) and refusal.value is False


def test_nothing_evaluates_text_or_unpickles_or_asks_a_shell() -> None:
    assert len(calls()) > 5000  # else this looks at nothing
    plain = [(file, name, call) for file, name, call in calls() if not refuses_pickles(call)]
    assert [(file, name) for file, name, _ in plain if name in RUNS_TEXT | UNPICKLES | SHELLS] == []
    shells = [(file, name) for file, name, call in calls() for word in call.keywords if word.arg == "shell"]
    assert shells == []
    assert [(file, name) for file, name, call in plain for word in call.keywords if word.arg == "allow_pickle"] == []


def test_no_collective_call_unpickles_what_another_rank_sends() -> None:
    known = {name for name in dir(torch.distributed) if "object" in name}
    assert known == set(filter(UNPICKLING_COLLECTIVE.search, dir(torch.distributed))) != set()
    nodes = [node for path in (ROOT / "pipeline").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    named = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    named += [node.name for node in nodes if isinstance(node, ast.alias)]
    assert len(named) > 50_000
    assert list(filter(UNPICKLING_COLLECTIVE.search, named)) == []


def test_torch_loads_in_one_file_and_weights_alone() -> None:
    loads = [(file, call) for file, name, call in calls() if name == "torch.load"]
    assert {file for file, _ in loads} == {"pipeline/encoder/published_weights.py"}
    assert all(any(ast.unparse(word) == "weights_only=True" for word in call.keywords) for _, call in loads)


def test_modules_are_imported_by_a_name_only_where_a_user_names_theirs() -> None:
    imports = [(file, call.args[0]) for file, name, call in calls() if name.rpartition(".")[2] == "import_module"]
    named = {file for file, module in imports if not isinstance(module, ast.Constant)}
    assert named == set(IMPORTS)
