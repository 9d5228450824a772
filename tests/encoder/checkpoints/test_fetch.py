"""A download ends with the model that was published, or with what to do; Hugging Face's library continues it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save

from pipeline.encoder.checkpoint_files import CONFIG, SINGLE, Published
from pipeline.encoder.weights import fetch, find_checkpoint
from pipeline.errors import ConfigError, DataError, WeightsUnusable
from tests.encoder.checkpoints.hub import Hub, Server
from tests.encoder.checkpoints.relatives import face_config, face_tensors

NAME = "esm2_t3_tiny"


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server of the small checkpoint that stands for Hugging Face's, with a cache of its own."""
    files = {CONFIG: json.dumps(face_config()).encode(), SINGLE: save(face_tensors(tiny)), "tf_model.h5": b"no"}
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    with Server(Hub({**files, "esm2_t3_tiny.pt": tiny.read_bytes()})) as server:
        # What HF_ENDPOINT and HF_HOME say is read when the library is imported.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server


@pytest.fixture
def publish(hub: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts the small checkpoint into the table of published models."""

    def add(**digests: str) -> None:
        model = Published(NAME, 3, 32, 4, **digests)
        monkeypatch.setattr("pipeline.encoder.checkpoint_files.MODELS", (model,))

    return add


def digest(hub: Server, name: str) -> str:
    return hashlib.sha256(hub.hub.files[name]).hexdigest()


def test_a_model_comes_to_the_cache_that_other_programs_know_and_is_found_there(hub, publish, tmp_path):
    publish(safetensors_sha256=digest(hub, SINGLE))
    found = fetch(NAME, None)
    assert (found.verdict, found.weights.name, found.weights.layers) == ("published", NAME, 3)
    assert {name for name, _, _ in hub.hub.served} == {CONFIG, SINGLE}  # and nothing else
    place = Path(found.weights.path)
    assert place.is_relative_to(tmp_path / "hub" / f"models--facebook--{NAME}")
    assert find_checkpoint(tmp_path / "weights" / f"{NAME}.pt") == place


def test_any_repository_is_fetched_by_its_name_to_where_it_is_wanted(hub, tmp_path):
    found = fetch(f"some.lab/{NAME}", tmp_path / "mine")
    assert (found.verdict, found.weights.path) == ("unknown", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / SINGLE).read_bytes() == hub.hub.files[SINGLE]


def test_what_was_interrupted_is_continued(hub, publish, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # it keeps whole ones
    publish(safetensors_sha256=digest(hub, SINGLE))
    half = len(hub.hub.files[SINGLE]) // 2
    hub.hub.breaks.append(half)
    assert fetch(NAME, None).verdict == "published"
    starts = [start for name, start, _ in hub.hub.served if name == SINGLE]
    assert starts == [0, half // 1000 * 1000]


def test_what_is_not_the_published_model_is_refused_and_not_found_later(hub, publish):
    publish(safetensors_sha256="0" * 64)
    with pytest.raises(WeightsUnusable) as refusal:
        fetch(NAME, None)
    assert all(sha256 in str(refusal.value) for sha256 in ("0" * 64, digest(hub, SINGLE)))
    with pytest.raises(ConfigError):
        find_checkpoint(Path(NAME))


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_says_what_else_there_is(hub, publish, status):
    publish()
    hub.hub.status = status
    with pytest.raises(DataError) as refusal:
        fetch(NAME, None)
    words = f"hf download facebook/{NAME}", f"pipeline weights import {NAME}", "HF_ENDPOINT", "https_proxy"
    assert all(word in refusal.value.remedy for word in words)


def test_without_a_network_it_says_what_to_do(hub, publish, monkeypatch, tmp_path):
    publish()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://no-such-host.invalid")  # RFC 2606
    with pytest.raises(DataError) as refusal:
        fetch(NAME, None)
    assert "pipeline weights import" in refusal.value.remedy
    with pytest.raises(DataError) as refusal:
        fetch("mine", tmp_path / "mine.pt", url="http://no-such-host.invalid/mine.pt")
    assert "curl -LO" in refusal.value.remedy
    assert not (tmp_path / "mine.pt").exists()


def test_a_file_comes_by_its_address_or_leaves_what_was_there(hub, publish, tmp_path):
    publish(pt_sha256=digest(hub, "esm2_t3_tiny.pt"))
    target = tmp_path / "new" / "mine.pt"
    found = fetch(NAME, target, url=f"{hub.url}/{NAME}.pt")
    assert (found.verdict, found.weights.path) == ("published", str(target))
    before = target.read_bytes()
    hub.hub.files["esm2_t3_tiny.pt"] = b"\n<!DOCTYPE html><html>Please log in</html>"
    with pytest.raises(WeightsUnusable, match="web page"):
        fetch(NAME, target, url=f"{hub.url}/{NAME}.pt")
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["mine.pt"]
