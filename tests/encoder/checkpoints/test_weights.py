from __future__ import annotations

import hashlib
import os
import re
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from pipeline.encoder import esm_checkpoint as checkpoints
from pipeline.encoder import weights
from pipeline.encoder.checkpoint_files import ESM1B, ESM2, ESMC, MODELS, Published, published
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.encoder.weights import CheckpointFacts, examine_checkpoint, find_checkpoint, identify
from pipeline.errors import ConfigError, WeightsUnusable
from pipeline.store.cache_folder import CacheFolder
from tests.encoder.checkpoints.relatives import face_folder, face_tensors
from tests.testkit.project import settle

NAME = "esm2_t6_8M_UR50D"


@pytest.fixture(autouse=True)
def _no_shared_folders(tmp_path, monkeypatch):
    """Keep what the machine has in its caches out of these tests."""
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))  # it asks HF_HOME only once


@pytest.fixture
def seen(tmp_path):
    return CacheFolder(tmp_path / "cache").kind("weights")


@pytest.fixture
def settled(tiny, tmp_path):
    """Return a checkpoint that has not changed for a while: times prove something only then."""
    path = tmp_path / "esm2_settled.pt"
    path.write_bytes(tiny.read_bytes())
    settle(tmp_path)
    return path


@pytest.fixture
def reads(monkeypatch):
    """Return a list of every checkpoint that is read from now on."""
    found: list[Path] = []
    load = checkpoints.load_esm_checkpoint

    def counted(path: Path) -> checkpoints.EsmCheckpoint:
        found.append(path)
        return load(path)

    monkeypatch.setattr(checkpoints, "load_esm_checkpoint", counted)
    return found


def test_a_bit_that_flipped_in_a_checkpoint_is_found_by_its_checksums(tiny, tmp_path):
    """torch does not compare them, and the numbers stay finite: the embeddings would be those of other weights."""
    path = tmp_path / "esm2_mine.pt"
    with zipfile.ZipFile(tiny) as archive:
        member = max(archive.infolist(), key=lambda member: member.file_size)
    data = bytearray(tiny.read_bytes())
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, member.header_offset + 26)
    data[member.header_offset + 30 + name_bytes + extra_bytes + 40] ^= 1
    path.write_bytes(data)
    for look in (weights.examine_checkpoint, weights.checkpoint_facts):
        with pytest.raises(WeightsUnusable, match=re.escape(member.filename)) as refusal:
            look(path)
        assert "weights fetch" in refusal.value.remedy


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="this torch always writes checksums")
def test_a_checkpoint_that_was_saved_without_checksums_is_read(tiny, tmp_path):
    path = tmp_path / "esm2_mine.pt"
    torch.serialization.set_crc32_options(False)  # type: ignore[no-untyped-call]
    try:
        torch.save(torch.load(tiny, weights_only=False), path)
    finally:
        torch.serialization.set_crc32_options(True)  # type: ignore[no-untyped-call]
    assert weights.checkpoint_facts(path).digest == weights.checkpoint_facts(tiny).digest


def test_what_is_identified_is_what_is_there_and_it_is_read_once(settled, seen, tmp_path, reads):
    digest = checkpoints.digest_weights(checkpoints.load_esm_checkpoint(settled))
    reads.clear()
    sizes = {"layers": 3, "dim": 32, "heads": 4, "precision": "fp32", "bytes": settled.stat().st_size}
    found = identify(settled, seen)
    assert found == CheckpointFacts(name="esm2_settled", form="fair-esm", path=str(settled), digest=digest, **sizes)
    assert identify(settled, seen) == found
    assert identify(settled, CacheFolder(tmp_path / "cache").kind("weights")) == found
    assert reads == [settled]


def test_checkpoint_that_was_replaced_is_read_again(settled, seen, reads):
    first = identify(settled, seen)
    other = settled.with_name("esm2_other.pt")
    write_random_checkpoint(other, 3, 32, 4, seed=2)
    times = settled.stat()
    other.replace(settled)
    os.utime(settled, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size and of the same age

    assert settled.stat().st_size == times.st_size
    assert identify(settled, seen).digest != first.digest
    assert len(reads) == 2


def test_checkpoint_that_was_just_written_is_not_remembered(tiny, tmp_path, seen, reads, monkeypatch):
    path = tmp_path / "esm2_young.pt"
    path.write_bytes(tiny.read_bytes())
    os.utime(path, ns=(0, 0))  # whole seconds: for two of them, its times prove nothing
    monkeypatch.setattr("pipeline.keys.time.time_ns", lambda: path.stat().st_ctime_ns + 1_900_000_000)
    identify(path, seen)
    identify(path, seen)
    assert reads == [path, path]


@pytest.mark.parametrize("which", ["config.json", "model.safetensors"])
def test_every_file_of_a_folder_is_watched(tiny, tmp_path, seen, reads, which):
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    settle(folder)
    first = identify(folder, seen)
    identify(folder, seen)
    assert (first.form, first.name, reads) == ("hugging-face", "model", [folder])

    content = (folder / which).read_bytes()
    (folder / which).unlink()
    (folder / which).write_bytes(content)
    assert identify(folder, seen) == first
    assert reads == [folder, folder]


def test_damaged_record_is_made_anew(settled, seen, tmp_path, reads):
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


def test_checkpoint_that_changes_while_it_is_read_or_is_refused_is_not_remembered(settled, seen, monkeypatch):
    load = checkpoints.load_esm_checkpoint

    def disturbed(path: Path) -> checkpoints.EsmCheckpoint:
        found = load(path)
        os.utime(path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "load_esm_checkpoint", disturbed)
        with pytest.raises(WeightsUnusable):
            identify(settled, seen)
    settled.write_bytes(settled.read_bytes()[:-100])
    with pytest.raises(WeightsUnusable):
        identify(settled, seen)
    assert list(seen.keys()) == []


def test_a_path_may_lack_its_suffix_or_have_that_of_another_form(tiny, tmp_path):
    folder = face_folder(tmp_path / "esm2_a", face_tensors(tiny))
    (tmp_path / "esm2_b").symlink_to(tmp_path / "gone")
    (tmp_path / "esm2_b.pt").write_bytes(tiny.read_bytes())
    found = {
        tiny: tiny,
        tiny.parent: tiny.parent,
        tiny.with_suffix(""): tiny,
        tmp_path / "esm2_a.pt": folder,
        tmp_path / "esm2_b": tmp_path / "esm2_b.pt",
    }
    assert {path: find_checkpoint(path) for path in found} == found


@pytest.mark.parametrize(("variable", "below"), [("TORCH_HOME", ""), ("XDG_CACHE_HOME", "torch")])
def test_published_model_is_found_where_torch_hub_put_it_and_no_other(tiny, tmp_path, monkeypatch, variable, below):
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    there = tmp_path / "home" / below / "hub" / "checkpoints"
    there.mkdir(parents=True)
    for name in (NAME, "esm2_mine"):
        (there / f"{name}.pt").write_bytes(tiny.read_bytes())
    for name in (f"{NAME}.pt", NAME):
        assert find_checkpoint(tmp_path / "weights" / name) == there / f"{NAME}.pt"
    with pytest.raises(ConfigError) as refused:
        find_checkpoint(tmp_path / "esm2_mine.pt")
    assert str(there) not in str(refused.value)


def test_published_model_is_found_where_hugging_face_put_it_at_its_main_revision(tiny, tmp_path):
    model = tmp_path / "hub" / f"models--facebook--{NAME}"
    pickled = face_folder(model / "snapshots" / "aaaa", face_tensors(tiny))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")  # which is passed over
    main = face_folder(model / "snapshots" / "bbbb", face_tensors(tiny))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaaa")
    with pytest.raises(ConfigError):
        find_checkpoint(Path(NAME))
    (model / "refs" / "main").write_text("bbbb")
    assert find_checkpoint(Path(NAME)) == main


def test_nothing_found_says_where_it_looked_and_what_to_type(tmp_path):
    with pytest.raises(ConfigError) as refused:
        find_checkpoint(tmp_path / "weights" / f"{NAME}.pt")
    for place in ("weights", "xdg/torch/hub/checkpoints", f"hub/models--facebook--{NAME}/snapshots"):
        assert str(tmp_path / place) in str(refused.value)
    assert f"pipeline weights fetch {NAME}" in refused.value.remedy


def test_table_says_of_each_model_what_its_name_says():
    families = {"esm1": ESM1B, "esm2": ESM2, "esmc": ESMC}
    for model in MODELS:
        assert model.name.startswith("esmc_") or f"_t{model.layers}_" in model.name
        assert model.shape[0] == families[model.name[:4]]
        assert model.dim % model.heads == 0
    digests = [digest for model in MODELS for digest in (model.pt_sha256, model.safetensors_sha256) if digest]
    assert [len(digest) for digest in digests] == [64] * len(set(digests))
    assert published("esm2_t6_9M") is None
    assert published("esmc_600m").repository == "biohub/ESMC-600M"


def pretend(monkeypatch: pytest.MonkeyPatch, path: Path, **values: object) -> None:
    """Let the table know a synthetic checkpoint under its own name."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = Published(**{"name": NAME, "layers": 3, "dim": 32, "heads": 4, "pt_sha256": digest, **values})
    monkeypatch.setattr("pipeline.encoder.weights.published", {model.name: model}.get)


def verdict(path: Path) -> str:
    examined = examine_checkpoint(path, NAME)
    if examined.why is not None:
        with pytest.raises(WeightsUnusable) as refused:
            examined.accepted()
        assert f"weights fetch {NAME}" in refused.value.remedy
    return examined.verdict


def test_a_file_under_a_published_name_is_that_file_or_refused(tiny, monkeypatch):
    assert verdict(tiny) == "different"  # of other sizes
    pretend(monkeypatch, tiny)
    assert verdict(tiny) == "published"
    assert examine_checkpoint(tiny).verdict == "unknown"  # under its own name
    pretend(monkeypatch, tiny, pt_sha256="0" * 64)
    assert verdict(tiny) == "different"
    pretend(monkeypatch, tiny, pt_sha256=None)
    assert verdict(tiny) == "unknown"


def test_safetensors_is_compared_with_its_own_digest(tiny, tmp_path, monkeypatch):
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    pretend(monkeypatch, tiny, safetensors_sha256=digest)
    assert verdict(folder) == "published"
    pretend(monkeypatch, tiny, safetensors_sha256="0" * 64)
    assert verdict(folder) == "different"
    assert verdict(face_folder(tmp_path / "parts", face_tensors(tiny), shards=2)) == "unknown"
