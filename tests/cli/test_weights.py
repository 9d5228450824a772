"""`pipeline weights` brings checkpoints by every way there is, says what they are, and refuses what they are not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.encoder import checkpoint_files, weights
from pipeline.encoder.checkpoint_files import Published
from pipeline.encoder.synth import write_random_checkpoint
from tests.encoder.checkpoints.hub import Hub, Server
from tests.encoder.checkpoints.relatives import face_config, face_folder, face_tensors
from tests.testkit.command import Command

TINY = "esm2_t2_tiny"
FILE = "any.pt"  # by which it is served
SIZES = ("--layers", "2", "--dim", "32", "--heads", "4")
DEFAULT = "weights/esm2_t33_650M_UR50D.pt"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint in fair-esm's format."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny") / f"{TINY}.pt"
    write_random_checkpoint(path, layers=2, dim=32, heads=4)
    return path


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Return the same weights as a Hugging Face folder, with what else such folders hold."""
    folder = face_folder(tmp_path / "brought" / TINY, face_tensors(tiny), face_config(num_hidden_layers=2))
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def served(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server of the small checkpoint."""
    monkeypatch.setenv("no_proxy", "*")
    with Server(Hub({FILE: tiny.read_bytes()})) as server:
        yield server


@pytest.fixture
def publish(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts the small checkpoint into the table of published models."""

    def add(data: bytes | None = None) -> None:
        data = tiny.read_bytes() if data is None else data
        model = Published(TINY, 2, 32, 4, hashlib.sha256(data).hexdigest())
        monkeypatch.setattr(checkpoint_files, "MODELS", (*checkpoint_files.MODELS, model))

    return add


@pytest.fixture
def configure(tmp_path: Path) -> Callable[[str], None]:
    """Return a function that writes a configuration with these weights."""

    def write(weights: str) -> None:
        (tmp_path / "x.csv").write_text("id,path\n")
        (tmp_path / "pipeline.yaml").write_text(f"data:\n  path: x.csv\nembed:\n  weights: {weights}\n")

    return write


class Bomb:
    def __reduce__(self) -> object:
        return (os.system, ("touch exploded",))


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """Return a file that would run a command if it were unpickled without care."""
    path = tmp_path / "esm2_bomb.pt"
    torch.save({"cfg": {}, "model": Bomb()}, path)
    return path


def names(folder: Path | str = ".") -> list[str]:
    """Return what is in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def test_fetch_brings_a_published_model_to_where_it_is_configured_and_then_asks_nobody(
    pipeline: Command, served, publish, configure
):
    publish()
    configure(f"models/{TINY}.pt")
    done = pipeline("weights", "fetch", "--url", f"{served.url}/{FILE}")
    assert done.code == 0, done.err
    assert Path("models", f"{TINY}.pt").read_bytes() == served.hub.files[FILE]
    assert "as published" in done.out
    assert "to use it" not in done.out
    assert names("models") == [f"{TINY}.pt"]
    assert pipeline("weights", "fetch", "--url", f"{served.url}/{FILE}").code == 0
    assert len(served.hub.served) == 1


def test_fetch_of_another_model_says_what_to_configure(pipeline: Command, served, configure, tmp_path):
    configure(DEFAULT)
    done = pipeline("weights", "fetch", TINY, "--url", f"{served.url}/{FILE}")
    assert done.code == 0, done.err
    assert "no published digest" in done.out
    assert f"embed:\n  weights: {tmp_path}/weights/{TINY}.pt" in done.out


def test_an_unknown_model_is_refused_with_the_nearest_name_and_the_table(pipeline: Command):
    for name in ("esm2_650M", "650m", "650", "esm2_t33_650M_UR50d", "t33", "zzz"):
        refused = pipeline("weights", "fetch", name)
        assert refused.code == 2, name
        assert ("pipeline weights fetch esm2_t33_650M_UR50D" in refused.err) == (name != "zzz"), name
        assert all(model.name in refused.err for model in checkpoint_files.MODELS), name


@pytest.mark.parametrize("family", ["esm1b", "esm2"])
def test_an_esm_1b_is_fetched_by_its_name_and_an_esm_2_of_the_same_sizes_is_not_it(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, family
):
    monkeypatch.setenv("no_proxy", "*")
    model = Published("esm1b_t2_tiny", 2, 32, 4)
    monkeypatch.setattr(checkpoint_files, "MODELS", (*checkpoint_files.MODELS, model))
    assert pipeline("weights", "synth", "--family", family, *SIZES, "--out", f"{family}_made.pt").code == 0
    with Server(Hub({FILE: Path(f"{family}_made.pt").read_bytes()})) as server:
        done = pipeline("weights", "fetch", model.name, "--url", f"{server.url}/{FILE}")
    assert (done.code == 0) == (family == "esm1b"), done.err


@pytest.mark.parametrize("fault", ["bytes", "architecture", "no checkpoint", "code", "portal"])
def test_a_download_that_is_not_the_model_leaves_nothing_and_keeps_what_was_there(
    pipeline: Command, served, publish, tiny, bomb, fault
):
    name, said = TINY, ""
    if fault == "bytes":
        publish(tiny.read_bytes()[::-1])
        said = hashlib.sha256(served.hub.files[FILE]).hexdigest()
    elif fault == "architecture":
        name, said = "esm2_t48_15B_UR50D", "48 layers of width 5120"
    elif fault == "no checkpoint":
        served.hub.files[FILE] = b"PK\x03\x04 but then something else"
    elif fault == "code":
        served.hub.files[FILE] = bomb.read_bytes()
    else:
        served.hub.files[FILE] = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"
    Path("weights").mkdir()
    shutil.copy(tiny, f"weights/{name}.pt")
    refused = pipeline("weights", "fetch", name, "--url", f"{served.url}/{FILE}", "--force")
    assert (refused.code, said in refused.err) == (3, True), refused.err
    assert Path("weights", f"{name}.pt").read_bytes() == tiny.read_bytes()
    assert names("weights") == [f"{name}.pt"]
    assert not Path("exploded").exists()


def test_a_damaged_file_in_its_place_is_not_taken_for_the_model(pipeline: Command, served, tiny):
    Path("weights").mkdir()
    place = Path("weights", tiny.name)
    place.write_bytes(tiny.read_bytes()[:-100])
    refused = pipeline("weights", "fetch", TINY, "--url", f"{served.url}/{FILE}")
    assert refused.code == 3
    assert f"pipeline weights fetch {TINY} --force" in refused.err
    assert pipeline("weights", "fetch", TINY, "--url", f"{served.url}/{FILE}", "--force").code == 0
    assert place.read_bytes() == tiny.read_bytes()


def test_import_copies_a_file_to_where_it_is_configured_or_wanted(pipeline: Command, tiny, configure):
    configure(f"models/{TINY}.pt")
    done = pipeline("weights", "import", str(tiny))
    assert done.code == 0, done.err
    assert "to use it" not in done.out
    assert names("models") == [tiny.name]
    Path("here").mkdir()
    assert pipeline("weights", "import", str(tiny), "--out", "here").code == 0
    assert pipeline("weights", "import", str(tiny), "--out", "there/mine.pt").code == 0
    for copy in (Path("models", tiny.name), Path("here", tiny.name), Path("there/mine.pt")):
        assert copy.read_bytes() == tiny.read_bytes()


def test_import_of_a_folder_takes_what_is_needed_and_no_more(pipeline: Command, tiny, folder, configure, tmp_path):
    configure(DEFAULT)
    done = pipeline("weights", "import", str(folder))
    assert done.code == 0, done.err
    copy = Path("weights", TINY)
    assert names(copy) == ["config.json", "model.safetensors"]
    assert (copy / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert f"embed:\n  weights: {tmp_path}/weights/{TINY}" in done.out
    found = [json.loads(pipeline("weights", "check", str(path), "--json").out) for path in (tiny, copy)]
    assert found[0]["digest"] == found[1]["digest"], "a file and a folder of the same weights have the same key"
    assert [one["form"] for one in found] == ["fair-esm", "hugging-face"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_import_never_replaces_another_checkpoint_unless_told_to(pipeline: Command, tiny, folder, kind):
    source = tiny if kind == "file" else folder
    place = Path("weights", source.name)
    pipeline("weights", "synth", *SIZES, "--seed", "7", "--out", f"weights/{TINY}.pt")
    if kind == "folder":
        place.mkdir()
        (place / "config.json").write_text("{}")
    before = names("weights")
    refused = pipeline("weights", "import", str(source))
    assert (refused.code, "--force" in refused.err) == (2, True)
    assert pipeline("weights", "import", str(source), "--force").code == 0
    assert names("weights") == before
    assert pipeline("weights", "check", str(place)).code == 0
    assert "already there" in pipeline("weights", "import", str(source)).out


def test_an_import_that_is_refused_leaves_nothing(pipeline: Command, publish, tiny, monkeypatch):
    Path(f"{TINY}.pt").write_bytes(tiny.read_bytes()[:-100])  # truncated
    assert pipeline("weights", "import", f"{TINY}.pt").code == 3
    assert pipeline("weights", "import", "nothing.pt").code == 2
    publish(tiny.read_bytes() + b"more")  # other bytes than published
    assert pipeline("weights", "import", str(tiny)).code == 3
    assert not Path("weights").exists()


def test_a_copy_that_the_disk_gives_back_otherwise_is_refused(pipeline: Command, tiny, monkeypatch):
    def damaged(path: Path) -> str:
        with path.open("r+b") as file:
            file.write(b"\0")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    whole = weights.sha256_of
    monkeypatch.setattr(weights, "sha256_of", lambda path: (damaged if path.parent.name[0] == "." else whole)(path))
    assert pipeline("weights", "import", str(tiny)).code == 3
    assert names("weights") == []


def test_check_says_everything_about_a_checkpoint(pipeline: Command, tiny, publish, configure):
    sha256 = hashlib.sha256(tiny.read_bytes()).hexdigest()
    said = pipeline("weights", "check", str(tiny))
    for word in (TINY, "fair-esm", "fp32", f"{sha256}  {tiny.name}", "unknown"):
        assert word in said.out
    publish()
    configure(str(tiny))
    found = json.loads(pipeline("weights", "check", "--json").out)
    sizes = {"name": TINY, "layers": 2, "dim": 32, "heads": 4, "precision": "fp32", "verdict": "published", "why": None}
    assert found.items() >= {**sizes, "path": str(tiny), "bytes": tiny.stat().st_size}.items()
    assert found["sha256"] == {tiny.name: sha256}
    assert len(found["digest"]) == 32
    layer = 4 * (32 * 32 + 32) + 2 * 4 * 32 * 32 + 5 * 32 + 2 * 2 * 32
    assert found["parameters"] == 33 * 32 + 2 * layer + 2 * 32
    shutil.copy(tiny, "esm2_t48_15B_UR50D.pt")  # another architecture under a published name
    said = pipeline("weights", "check", "esm2_t48_15B_UR50D.pt", "--json")
    assert (said.code, json.loads(said.out)["verdict"], bool(json.loads(said.out)["why"])) == (3, "different", True)


def test_check_of_a_pickle_that_wants_to_run_code_runs_none(pipeline: Command, bomb):
    for verb in ("check", "import"):
        assert pipeline("weights", verb, str(bomb)).code == 3
        assert names() == [bomb.name]


def test_what_is_not_configured_or_configured_wrongly_is_said(pipeline: Command):
    refused = pipeline("weights", "check")
    assert (refused.code, "pipeline weights fetch esm2_t33_650M_UR50D" in refused.err) == (2, True)
    Path("pipeline.yaml").write_text("data:\n  pth: x\n")
    assert pipeline("weights", "fetch").code == 2
    assert pipeline("weights", "check", "--set", "embed.weights=x.pt").code == 2


def test_synth_replaces_only_when_told_to_and_what_cannot_be_is_refused_and_changes_nothing(pipeline: Command):
    synth = ("weights", "synth", *SIZES, "--out", "esm2_x.pt")
    assert pipeline(*synth).code == 0
    there, before = names(), Path("esm2_x.pt").read_bytes()
    assert pipeline(*synth, "--seed", "1").code == 2
    stresses = [f"--stress {stress}" for stress in ("nan", "inf", "0", "-1")]
    for words in ("--dim 30", "--layers 0", "--out other.pt", "--out .", *stresses):
        refused = pipeline(*synth, "--force", *words.split())
        assert (refused.code, refused.err[:7]) == (2, "error: "), words
        assert (names(), Path("esm2_x.pt").read_bytes()) == (there, before), words
    assert pipeline(*synth, "--seed", "1", "--force").code == 0
    assert Path("esm2_x.pt").read_bytes() != before
    assert names() == there
