from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.encoder.checkpoints import esm_checkpoint as checkpoints
from pipeline.encoder.checkpoints import weights
from pipeline.encoder.checkpoints.checkpoint_files import ESM1B, ESM2, MODELS, Published, published
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.checkpoints.weights import (
    CheckpointFacts,
    equals_published,
    find_checkpoint,
    identify,
)
from pipeline.errors import ConfigError, WeightsUnusable
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.store import Store
from tests.encoder.checkpoints.relatives import contents, face_folder, face_tensors

NAME = "esm2_t6_8M_UR50D"


@pytest.fixture(autouse=True)
def _no_shared_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the machine has in its caches out of these tests."""
    for name in ("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def seen(tmp_path: Path) -> Store:
    return CacheFolder(tmp_path / "cache").kind("weights")


@pytest.fixture
def settled(tiny: Path, tmp_path: Path) -> Path:
    """Return a checkpoint that has not changed for a while: times prove something only then."""
    path = tmp_path / "esm2_settled.pt"
    path.write_bytes(tiny.read_bytes())
    wait_until_settled(path)
    return path


def wait_until_settled(*paths: Path) -> None:
    deadline = time.monotonic() + 5
    while not all(weights.is_settled(path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in paths):
        assert time.monotonic() < deadline


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list of every checkpoint that is read from now on."""
    found: list[Path] = []
    load = checkpoints.load_esm_checkpoint

    def counted(path: Path) -> checkpoints.EsmCheckpoint:
        found.append(path)
        return load(path)

    monkeypatch.setattr(checkpoints, "load_esm_checkpoint", counted)
    return found


def flip_a_bit_of_a_tensor(path: Path) -> str:
    """Change the least bit of a number in an archive, which stays finite; return the member that it is in."""
    with zipfile.ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda member: member.file_size)
    data = bytearray(path.read_bytes())
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, member.header_offset + 26)
    data[member.header_offset + 30 + name_bytes + extra_bytes + 40] ^= 1
    path.write_bytes(data)
    return member.filename


@pytest.mark.parametrize("look", [weights.examine_checkpoint, weights.checkpoint_facts], ids=["check", "identify"])
def test_a_bit_that_flipped_in_a_checkpoint_is_found_by_its_checksums(
    tiny: Path, tmp_path: Path, look: Callable[[Path], object]
) -> None:
    """torch does not compare them, and the numbers stay finite: the embeddings would be those of other weights."""
    path = tmp_path / "esm2_mine.pt"
    path.write_bytes(tiny.read_bytes())
    member = flip_a_bit_of_a_tensor(path)
    with pytest.raises(WeightsUnusable, match=f"is damaged: {re.escape(member)}") as refusal:
        look(path)
    assert "weights fetch" in refusal.value.remedy


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="this torch always writes checksums")
def test_a_checkpoint_that_was_saved_without_checksums_is_read(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "esm2_mine.pt"
    torch.serialization.set_crc32_options(False)  # type: ignore[no-untyped-call]
    try:
        torch.save(torch.load(tiny, weights_only=False), path)
    finally:
        torch.serialization.set_crc32_options(True)  # type: ignore[no-untyped-call]
    assert weights.checkpoint_facts(path).digest == weights.checkpoint_facts(tiny).digest


# ── identify ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_identified_is_what_is_there(settled: Path, seen: Store) -> None:
    found = identify(settled, seen)

    assert found == CheckpointFacts(
        name="esm2_settled",
        form="fair-esm",
        path=str(settled),
        digest=checkpoints.digest_weights(checkpoints.load_esm_checkpoint(settled)),
        layers=3,
        dim=32,
        heads=4,
        precision="fp32",
        bytes=settled.stat().st_size,
    )
    assert CheckpointFacts.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_unchanged_checkpoint_is_read_once(settled: Path, seen: Store, tmp_path: Path, reads: list[Path]) -> None:
    first = identify(settled, seen)

    assert identify(settled, seen) == first
    assert identify(settled, CacheFolder(tmp_path / "cache").kind("weights")) == first
    assert reads == [settled]


def test_second_time_torch_is_not_even_imported(settled: Path, seen: Store, tmp_path: Path) -> None:
    identify(settled, seen)
    code = (
        "import sys; from pathlib import Path; from pipeline.store.cache_folder import CacheFolder; "
        "from pipeline.encoder.checkpoints.weights import identify, equals_published; "
        f"print(identify(Path({str(settled)!r}), "
        f"CacheFolder(Path({str(tmp_path / 'cache')!r})).kind('weights')).digest); "
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == identify(settled, seen).digest


def test_checkpoint_that_was_replaced_is_read_again(settled: Path, seen: Store, reads: list[Path]) -> None:
    first = identify(settled, seen)
    other = settled.with_name("esm2_other.pt")
    write_random_checkpoint(other, 3, 32, 4, seed=2)
    times = settled.stat()
    other.replace(settled)
    os.utime(settled, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size and of the same age

    assert settled.stat().st_size == times.st_size
    assert identify(settled, seen).digest != first.digest
    assert len(reads) == 2


def test_checkpoint_that_was_just_written_is_not_remembered(
    tiny: Path, tmp_path: Path, seen: Store, reads: list[Path]
) -> None:
    path = tmp_path / "esm2_young.pt"
    path.write_bytes(tiny.read_bytes())
    os.utime(path, ns=(0, 0))  # whole seconds: for two of them, its times prove nothing

    identify(path, seen)
    identify(path, seen)
    assert reads == [path, path]


@pytest.mark.parametrize("which", ["config.json", "model.safetensors"])
def test_every_file_of_a_folder_is_watched(
    tiny: Path, tmp_path: Path, seen: Store, reads: list[Path], which: str
) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    wait_until_settled(*folder.iterdir())
    first = identify(folder, seen)
    identify(folder, seen)
    assert (first.form, first.name, reads) == ("hugging-face", "model", [folder])

    content = (folder / which).read_bytes()
    (folder / which).unlink()
    (folder / which).write_bytes(content)
    assert identify(folder, seen) == first
    assert reads == [folder, folder]


def test_same_weights_in_both_forms_have_one_digest(settled: Path, tmp_path: Path, seen: Store) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(settled))

    assert identify(folder, seen).digest == identify(settled, seen).digest


def test_damaged_record_is_made_anew(settled: Path, seen: Store, tmp_path: Path, reads: list[Path]) -> None:
    first = identify(settled, seen)
    (shard,) = (tmp_path / "cache/weights/shards").iterdir()
    content = shard.read_bytes()
    at = content.index(first.digest.encode())
    shard.chmod(0o644)
    shard.write_bytes(content[:at] + b"0000" + content[at + 4 :])
    fresh = CacheFolder(tmp_path / "cache").kind("weights")

    assert identify(settled, fresh) == first
    assert identify(settled, CacheFolder(tmp_path / "cache").kind("weights")) == first
    assert len(reads) == 2


def test_checkpoint_that_changes_while_it_is_read_is_refused(
    settled: Path, seen: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = checkpoints.load_esm_checkpoint

    def disturbed(path: Path) -> checkpoints.EsmCheckpoint:
        found = load(path)
        os.utime(path)
        return found

    monkeypatch.setattr(checkpoints, "load_esm_checkpoint", disturbed)
    with pytest.raises(WeightsUnusable, match="changed while it was read"):
        identify(settled, seen)
    assert list(seen.keys()) == []


def test_checkpoint_that_is_refused_is_not_remembered(settled: Path, seen: Store) -> None:
    settled.write_bytes(settled.read_bytes()[:-100])
    with pytest.raises(WeightsUnusable, match="truncated"):
        identify(settled, seen)

    assert list(seen.keys()) == []


# ── find ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_path_that_is_there_is_taken_as_it_is(tiny: Path) -> None:
    assert find_checkpoint(tiny) == tiny
    assert find_checkpoint(tiny.parent) == tiny.parent


def test_suffix_may_be_left_out(tiny: Path) -> None:
    assert find_checkpoint(tiny.with_suffix("")) == tiny


def test_folder_of_the_same_name_will_do(tiny: Path, tmp_path: Path) -> None:
    folder = face_folder(tmp_path / "esm2_a", face_tensors(tiny))

    assert find_checkpoint(tmp_path / "esm2_a.pt") == folder


@pytest.mark.parametrize("variable", ["TORCH_HOME", "XDG_CACHE_HOME"])
def test_published_model_is_found_where_torch_hub_put_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    home = tmp_path / "home" if variable == "TORCH_HOME" else tmp_path / "home" / "torch"
    there = home / "hub" / "checkpoints" / f"{NAME}.pt"
    there.parent.mkdir(parents=True)
    there.write_bytes(tiny.read_bytes())

    assert find_checkpoint(tmp_path / "weights" / f"{NAME}.pt") == there
    assert find_checkpoint(tmp_path / "weights" / NAME) == there


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_published_model_is_found_where_hugging_face_put_it_at_its_main_revision(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "face"))
    hub = tmp_path / "face" / "hub" if variable == "HF_HOME" else tmp_path / "face"
    model = hub / f"models--facebook--{NAME}"
    face_folder(model / "snapshots" / "aaaa", face_tensors(tiny))
    main = face_folder(model / "snapshots" / "bbbb", face_tensors(tiny))
    assert find_checkpoint(Path(NAME)).name == "aaaa"

    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("bbbb\n")
    assert find_checkpoint(Path(NAME)) == main


def test_snapshot_without_safetensors_is_passed_over(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshots = tmp_path / f"models--facebook--{NAME}" / "snapshots"
    (snapshots / "aaaa").mkdir(parents=True)
    (snapshots / "aaaa" / "config.json").write_text("{}")
    (snapshots / "aaaa" / "pytorch_model.bin").write_bytes(b"x")
    good = face_folder(snapshots / "bbbb", face_tensors(tiny))

    assert find_checkpoint(tmp_path / f"{NAME}.pt") == good


def test_model_of_ones_own_is_not_sought_in_shared_folders(tiny: Path, tmp_path: Path) -> None:
    there = tmp_path / "xdg" / "torch" / "hub" / "checkpoints" / "esm2_mine.pt"
    there.parent.mkdir(parents=True)
    there.write_bytes(tiny.read_bytes())

    with pytest.raises(ConfigError) as refused:
        find_checkpoint(tmp_path / "esm2_mine.pt")
    assert str(there) not in str(refused.value)


def test_nothing_found_says_where_it_looked_and_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        find_checkpoint(tmp_path / "weights" / f"{NAME}.pt")
    said = str(refused.value)

    assert "embed.weights" in said
    for place in ("weights", "xdg/torch/hub/checkpoints", f"xdg/huggingface/hub/models--facebook--{NAME}/snapshots"):
        assert str(tmp_path / place) in said
    assert f"pipeline weights fetch {NAME}" in said


def test_broken_link_is_not_a_checkpoint_and_others_are_looked_for(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "esm2_a").symlink_to(tmp_path / "gone")
    (tmp_path / "esm2_a.pt").write_bytes(tiny.read_bytes())

    assert find_checkpoint(tmp_path / "esm2_a") == tmp_path / "esm2_a.pt"


# ── the table of published models ────────────────────────────────────────────────────────────────────────────────────


def test_table_says_of_each_model_what_its_name_says() -> None:
    assert len(MODELS) == 12
    for model in MODELS:
        assert model.name.startswith((f"esm2_t{model.layers}_", f"esm1b_t{model.layers}_", f"esm1v_t{model.layers}_"))
        assert model.shape[0] == (ESM2 if model.name.startswith("esm2") else ESM1B)
        assert published(model.name) is model
        assert model.dim % model.heads == 0
        for digest in (model.pt_sha256, model.safetensors_sha256):
            assert digest is None or (len(digest) == 64 and int(digest, 16) > 0)
    digests = [model.pt_sha256 for model in MODELS if model.pt_sha256]
    assert len(set(digests)) == len(digests) == 5
    assert published("esm2_t6_9M") is None


def test_sizes_in_the_table_are_those_that_the_format_gives() -> None:
    """A size is that of the tensors and a little more, which no accident would hit."""
    for model in MODELS:
        if model.pt_bytes is None:
            continue
        dim, layers = model.dim, model.layers
        encoder = 33 * dim + layers * (12 * dim * dim + 13 * dim) + 2 * dim
        head = dim * dim + 3 * dim + 33
        width = 2 if "3B" in model.name else 4
        assert 0 < model.pt_bytes - width * (encoder + head) < 2_000 * (17 * layers + 10)


def pretend(monkeypatch: pytest.MonkeyPatch, path: Path, **values: object) -> Published:
    """Let the table know a synthetic checkpoint."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = replace(MODELS[0], **{"pt_bytes": path.stat().st_size, "pt_sha256": digest, **values})
    monkeypatch.setattr("pipeline.encoder.checkpoints.weights.published", {model.name: model}.get)
    return model


def test_file_that_was_published_is_known(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pretend(monkeypatch, tiny)

    assert equals_published(tiny, model.name)
    assert not equals_published(tiny, "esm2_mine")


def test_model_without_a_known_digest_is_unknown(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pretend(monkeypatch, tiny, pt_sha256=None, pt_bytes=None)

    assert not equals_published(tiny, model.name)


@pytest.mark.parametrize("size", [1_000, None])
def test_file_that_differs_from_what_was_published_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    model = pretend(monkeypatch, tiny, pt_sha256="0" * 64, pt_bytes=size)

    with pytest.raises(WeightsUnusable, match="1,000" if size else "its SHA-256 is") as refused:
        equals_published(tiny, model.name)
    assert f"pipeline weights fetch {model.name}" in refused.value.remedy


def test_safetensors_is_compared_with_its_own_digest(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    model = pretend(monkeypatch, tiny, safetensors_sha256=digest)

    assert equals_published(folder, model.name)
    pretend(monkeypatch, tiny, safetensors_sha256="0" * 64)
    with pytest.raises(WeightsUnusable):
        equals_published(folder, model.name)
    assert not equals_published(face_folder(tmp_path / "parts", face_tensors(tiny), shards=2), model.name)


def test_synthetic_checkpoint_under_a_published_name_is_not_taken_for_it(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.pt"
    path.write_bytes(tiny.read_bytes())
    assert contents(path)["cfg"]["model"].encoder_layers == 3

    with pytest.raises(WeightsUnusable, match="was published with 30,099,493"):
        equals_published(path, NAME)
