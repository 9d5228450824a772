"""`pipeline weights` brings checkpoints by every way there is, says what they are, and refuses what they are not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.encoder.checkpoints import checkpoint_files
from pipeline.encoder.checkpoints.checkpoint_files import Published
from pipeline.encoder.checkpoints.download import DownloadProgress
from pipeline.report.live_status import download_words
from tests.encoder.checkpoints import file_server as web
from tests.encoder.checkpoints.file_server import File, Server
from tests.testkit.command import Command

TINY = "esm2_t2_tiny"
SIZES = ("--layers", "2", "--dim", "32", "--heads", "4")
DEFAULT = "weights/esm2_t33_650M_UR50D.pt"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint in fair-esm's format."""
    import torch

    from pipeline.encoder.checkpoints.synth import write_random_checkpoint

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny") / f"{TINY}.pt"
    write_random_checkpoint(path, layers=2, dim=32, heads=4)
    return path


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Return the same weights as a Hugging Face folder, with what else such folders hold."""
    from safetensors.torch import save_file

    from pipeline.encoder.checkpoints.esm_checkpoint import load_esm_checkpoint
    from tests.cli.face import face_names

    folder = tmp_path / "brought" / TINY
    folder.mkdir(parents=True)
    save_file(face_names(load_esm_checkpoint(tiny)), folder / "model.safetensors")
    config = {"model_type": "esm", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    config |= {"position_embedding_type": "rotary", "token_dropout": True, "layer_norm_eps": 1e-5}
    config |= {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    return folder


@pytest.fixture
def served(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server of the small checkpoint."""
    monkeypatch.setenv("no_proxy", "*")
    with Server(File(tiny.read_bytes())) as server:
        yield server


@pytest.fixture
def publish(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts the small checkpoint into the table of published models."""

    def add(data: bytes | None = None) -> None:
        data = tiny.read_bytes() if data is None else data
        model = Published(TINY, 2, 32, 4, len(data), hashlib.sha256(data).hexdigest())
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
    import torch

    path = tmp_path / "esm2_bomb.pt"
    torch.save({"cfg": {}, "model": Bomb()}, path)
    return path


def names(folder: Path | str = ".") -> list[str]:
    """Return what is in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def test_fetch_brings_a_published_model_to_where_it_is_configured(pipeline: Command, served, publish, configure):
    publish()
    configure(f"models/{TINY}.pt")
    done = pipeline("weights", "fetch", "--url", served.url)
    assert done.code == 0, done.err
    assert Path("models", f"{TINY}.pt").read_bytes() == served.file.body
    assert "fetched: ESM-2, 2 layers of width 32, fp32; as published" in done.out
    assert "to use it" not in done.out
    assert f"{TINY}: " in done.err, "progress is told on stderr"
    assert names("models") == [f"{TINY}.pt"]


def test_fetch_again_finds_it_there_and_asks_nobody(pipeline: Command, served, publish, configure):
    publish()
    configure(f"models/{TINY}.pt")
    pipeline("weights", "fetch", "--url", served.url)
    again = pipeline("weights", "fetch", "--url", served.url)
    assert again.code == 0
    assert "is there already: ESM-2" in again.out
    assert len(served.file.asked) == 1


def test_fetch_of_another_model_says_what_to_configure(pipeline: Command, served, configure, tmp_path):
    configure(DEFAULT)
    done = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert done.code == 0, done.err
    assert "no published digest" in done.out
    assert f"embed:\n  weights: {tmp_path}/weights/{TINY}.pt" in done.out


def test_fetch_needs_no_configuration(pipeline: Command, served):
    assert pipeline("weights", "fetch", TINY, "--url", served.url).code == 0
    assert Path("weights", f"{TINY}.pt").is_file()


def test_fetch_puts_the_file_into_a_folder_that_is_named(pipeline: Command, served):
    Path("here").mkdir()
    assert pipeline("weights", "fetch", TINY, "--url", served.url, "--out", "here").code == 0
    assert Path("here", f"{TINY}.pt").is_file()


@pytest.mark.parametrize("name", ["esm2_650M", "650m", "650", "esm2_t33_650M_UR50d", "t33"])
def test_an_unknown_model_is_refused_with_the_nearest_name(pipeline: Command, name):
    refused = pipeline("weights", "fetch", name)
    assert refused.code == 2
    assert "did you mean" in refused.err
    assert "pipeline weights fetch esm2_t33_650M_UR50D" in refused.err
    assert all(model.name in refused.err for model in checkpoint_files.MODELS)


@pytest.mark.parametrize(("name", "size"), [("esmc_600m", "600"), ("esmc_300m_2024_12_v0", "300"), ("ESMC", "300")])
def test_esm_c_is_not_fetched_and_where_it_is_had_is_told(pipeline: Command, name, size):
    refused = pipeline("weights", "fetch", name)
    assert refused.code == 2
    assert "whoever agrees to its licence" in refused.err
    assert (
        f"huggingface.co/EvolutionaryScale/esmc-{size}m-2024-12, data/weights/esmc_{size}m_2024_12_v0.pth"
        in refused.err
    )
    assert f"pipeline weights import esmc_{size}m_2024_12_v0.pth" in refused.err


def test_an_esm_c_that_was_brought_is_imported_and_known(pipeline: Command):
    Path("brought").mkdir()
    sizes = ("--layers", "1", "--dim", "64", "--heads", "1")
    assert pipeline("weights", "synth", "--family", "esmc", *sizes, "--out", "brought/esmc_mine.pth").code == 0
    done = pipeline("weights", "import", "brought/esmc_mine.pth")
    assert done.code == 0, done.err
    assert "copied: ESM C, 1 layers of width 64" in done.out


@pytest.mark.parametrize("family", ["esm1b", "esm2"])
def test_an_esm_1b_is_fetched_by_its_name_and_an_esm_2_of_the_same_sizes_is_not_it(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, family
):
    monkeypatch.setenv("no_proxy", "*")
    model = Published("esm1b_t2_tiny", 2, 32, 4)
    monkeypatch.setattr(checkpoint_files, "MODELS", (*checkpoint_files.MODELS, model))
    sizes = ("--layers", "2", "--dim", "32", "--heads", "4", "--out", f"{family}_made.pt")
    assert pipeline("weights", "synth", "--family", family, *sizes).code == 0
    with Server(File(Path(f"{family}_made.pt").read_bytes())) as server:
        done = pipeline("weights", "fetch", model.name, "--url", server.url)
    if family == "esm1b":
        assert done.code == 0, done.err
        assert "fetched: ESM-1b or ESM-1v" in done.out
        assert "no published digest" in done.out
    else:
        assert done.code != 0
        assert "as ESM-2 is" in done.err


def test_a_name_like_no_other_gets_the_table(pipeline: Command):
    refused = pipeline("weights", "fetch", "zzz")
    assert refused.code == 2
    assert "did you mean" not in refused.err
    assert "esm2_t48_15B_UR50D" in refused.err


def test_without_a_name_it_is_the_main_model_and_without_a_network_it_says_what_to_do(pipeline: Command, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # the discard port: nobody listens
    refused = pipeline("weights", "fetch")
    assert refused.code == 3
    url = "https://dl.fbaipublicfiles.com/fair-esm/models/esm2_t33_650M_UR50D.pt"
    assert f"{url}: cannot be reached from this machine through the proxy 127.0.0.1" in refused.err
    assert f"curl --fail --location --continue-at - --output esm2_t33_650M_UR50D.pt {url}" in refused.err
    assert f"pipeline weights import esm2_t33_650M_UR50D.pt --out {DEFAULT}" in refused.err


def test_a_download_of_other_bytes_than_published_leaves_nothing(pipeline: Command, served, publish, tiny):
    publish(tiny.read_bytes()[::-1])
    refused = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert refused.code == 3
    assert served.file.sha256 in refused.err
    assert names("weights") == []


def test_a_download_of_another_size_than_published_is_refused_before_it_comes(pipeline: Command, served):
    refused = pipeline("weights", "fetch", "esm2_t6_8M_UR50D", "--url", served.url)
    assert refused.code == 3
    assert "should have 30,099,493" in refused.err


def test_a_download_of_another_architecture_than_published_leaves_nothing(pipeline: Command, served):
    refused = pipeline("weights", "fetch", "esm2_t48_15B_UR50D", "--url", served.url)
    assert refused.code == 3
    assert "2 layers of width 32 with 4 heads, and should have 48 layers of width 5120" in refused.err
    assert names("weights") == []


def test_a_download_that_is_no_checkpoint_leaves_nothing_and_keeps_what_was_there(pipeline: Command, served, tiny):
    served.file.body = b"PK\x03\x04 but then something else"
    Path("weights").mkdir()
    shutil.copy(tiny, "weights")
    refused = pipeline("weights", "fetch", TINY, "--url", served.url, "--force")
    assert refused.code == 3
    assert names("weights") == [tiny.name]
    assert Path("weights", tiny.name).read_bytes() == tiny.read_bytes()


def test_a_download_that_wants_to_run_code_runs_none(pipeline: Command, served, bomb):
    served.file.body = bomb.read_bytes()
    refused = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert refused.code == 3
    assert "wants to run code" in refused.err
    assert not Path("exploded").exists()
    assert names("weights") == []


def test_a_damaged_file_in_its_place_is_not_taken_for_the_model(pipeline: Command, served, tiny):
    Path("weights").mkdir()
    place = Path("weights", tiny.name)
    place.write_bytes(tiny.read_bytes()[:-100])
    refused = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert refused.code == 3
    assert f"pipeline weights fetch {TINY} --force" in refused.err
    assert pipeline("weights", "fetch", TINY, "--url", served.url, "--force").code == 0
    assert place.read_bytes() == tiny.read_bytes()


@pytest.mark.parametrize("stress", ["nan", "inf", "0", "-1"])
def test_attention_is_sharpened_by_a_number_above_nothing(pipeline: Command, stress: str) -> None:
    shape = ("--layers", "1", "--dim", "32", "--heads", "2")
    refused = pipeline("weights", "synth", *shape, "--out", "esm2_x.pt", "--stress", stress)
    assert refused.code == 2
    assert "next: --stress 1" in refused.err
    assert not Path("esm2_x.pt").exists()


def test_an_interrupted_fetch_says_that_nothing_is_lost(pipeline: Command, served, monkeypatch):
    from pipeline.report.live_status import DownloadBars

    def interrupt(self: DownloadBars, progress: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DownloadBars, "show", interrupt)
    stopped = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert stopped.code == 130
    assert "what came is kept" in stopped.err
    assert Path("weights", f"{TINY}.pt.partial").stat().st_size > 0


def test_a_terminal_gets_a_bar(pipeline: Command, served, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert done.code == 0
    assert "━" in done.err
    assert "━" not in done.out


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (DownloadProgress(3 << 20, 9 << 20, 1 << 20), "3.0 MiB of 9.0 MiB, 1.0 MiB/s, 6.0 s left"),
        (DownloadProgress(9 << 20, 9 << 20, 1 << 20), "9.0 MiB of 9.0 MiB, 1.0 MiB/s"),
        (DownloadProgress(3 << 20, None, 1 << 20), "3.0 MiB, 1.0 MiB/s"),
    ],
)
def test_progress_without_a_terminal_is_a_sentence(progress, words):
    assert download_words(progress) == words


def test_a_captive_portal_is_named(pipeline: Command, served):
    served.file.odd.append(web.page())
    refused = pipeline("weights", "fetch", TINY, "--url", served.url)
    assert refused.code == 3
    assert "a web page came in place of the file" in refused.err


def test_import_copies_a_file_to_where_it_is_configured(pipeline: Command, tiny, configure):
    configure(f"models/{TINY}.pt")
    done = pipeline("weights", "import", str(tiny))
    assert done.code == 0, done.err
    assert Path("models", tiny.name).read_bytes() == tiny.read_bytes()
    assert "copied: ESM-2, 2 layers" in done.out
    assert "to use it" not in done.out
    assert names("models") == [tiny.name]


def test_import_of_a_folder_takes_what_is_needed_and_no_more(pipeline: Command, folder, configure, tmp_path):
    configure(DEFAULT)
    done = pipeline("weights", "import", str(folder))
    assert done.code == 0, done.err
    copy = Path("weights", TINY)
    assert names(copy) == ["config.json", "model.safetensors"]
    assert (copy / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert names("weights") == [TINY]
    assert f"embed:\n  weights: {tmp_path}/weights/{TINY}" in done.out
    assert pipeline("weights", "check", str(copy)).code == 0


def test_import_of_one_safetensors_file_gives_it_the_name_that_is_looked_for(pipeline: Command, folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert pipeline("weights", "import", str(folder / "other.safetensors")).code == 0
    assert names(f"weights/{TINY}") == ["config.json", "model.safetensors"]


def test_a_file_and_a_folder_of_the_same_weights_have_the_same_key(pipeline: Command, tiny, folder):
    found = [json.loads(pipeline("weights", "check", str(path), "--json").out) for path in (tiny, folder)]
    assert found[0]["digest"] == found[1]["digest"]
    assert [one["form"] for one in found] == ["fair-esm", "hugging-face"]


def test_import_finds_the_same_file_there_and_says_so(pipeline: Command, tiny, folder):
    for source in (tiny, folder):
        assert "copied" in pipeline("weights", "import", str(source)).out
        again = pipeline("weights", "import", str(source))
        assert again.code == 0
        assert "is there already" in again.out
    assert "is there already" in pipeline("weights", "import", f"weights/{TINY}.pt").out


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
    assert refused.code == 2
    assert "something else is there already" in refused.err
    assert "--force" in refused.err
    assert pipeline("weights", "import", str(source), "--force").code == 0
    assert names("weights") == before
    assert pipeline("weights", "check", str(place)).code == 0
    assert "is there already" in pipeline("weights", "import", str(source)).out


def test_import_to_a_place_of_ones_own(pipeline: Command, tiny):
    Path("here").mkdir()
    assert pipeline("weights", "import", str(tiny), "--out", "here").code == 0
    assert pipeline("weights", "import", str(tiny), "--out", "there/mine.pt").code == 0
    assert Path("here", tiny.name).read_bytes() == Path("there/mine.pt").read_bytes() == tiny.read_bytes()


def test_import_of_nothing_is_refused(pipeline: Command):
    refused = pipeline("weights", "import", "nothing.pt")
    assert refused.code == 2
    assert "nothing.pt" in refused.err


def test_import_of_a_truncated_file_leaves_nothing(pipeline: Command, tiny):
    Path(f"{TINY}.pt").write_bytes(tiny.read_bytes()[:-100])
    refused = pipeline("weights", "import", f"{TINY}.pt")
    assert refused.code == 3
    assert "truncated" in refused.err
    assert not Path("weights").exists()


def test_import_of_other_bytes_under_a_published_name_is_refused(pipeline: Command, publish, tiny):
    publish(tiny.read_bytes() + b"more")
    refused = pipeline("weights", "import", str(tiny))
    assert refused.code == 3
    assert f"{TINY} was published with" in refused.err
    assert not Path("weights").exists()


def test_import_to_a_disk_that_is_too_small_leaves_nothing(pipeline: Command, tiny, monkeypatch):
    size = tiny.stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, size - 1))
    refused = pipeline("weights", "import", str(tiny))
    assert refused.code == 2
    assert f"{size - 1:,} bytes free, and {size:,} are needed" in refused.err
    assert not Path("weights").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, size))
    assert pipeline("weights", "import", str(tiny)).code == 0


def test_import_into_a_folder_that_may_not_be_written_is_refused(pipeline: Command, unprivileged, monkeypatch):
    monkeypatch.chdir(unprivileged)
    (unprivileged / "mine").mkdir(mode=0o500)
    source = str(unprivileged / "esm2_x.pt")
    assert pipeline("weights", "synth", *SIZES, "--out", source).code == 0
    refused = pipeline("weights", "import", source, "--out", str(unprivileged / "mine" / "x.pt"))
    assert refused.code == 2
    assert "Permission denied" in refused.err


def test_a_copy_that_the_disk_gives_back_otherwise_is_refused(pipeline: Command, tiny, monkeypatch):
    from pipeline.encoder.checkpoints import weights

    def damaged(path: Path) -> str:
        with path.open("r+b") as file:
            file.write(b"\0")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    whole = weights.sha256_of
    monkeypatch.setattr(weights, "sha256_of", lambda path: (damaged if "partial" in path.name else whole)(path))
    refused = pipeline("weights", "import", str(tiny))
    assert refused.code == 3
    assert "cannot be read back" in refused.err
    assert names("weights") == []


def test_check_says_everything_about_a_checkpoint(pipeline: Command, tiny):
    said = pipeline("weights", "check", str(tiny))
    assert said.code == 0
    sha256 = hashlib.sha256(tiny.read_bytes()).hexdigest()
    for word in (TINY, "fair-esm", "fp32", f"{sha256}  {tiny.name}", "not known"):
        assert word in said.out


def test_check_prints_one_json_document(pipeline: Command, tiny, publish):
    publish()
    said = pipeline("weights", "check", str(tiny), "--json")
    found = json.loads(said.out)
    sizes = {"name": TINY, "layers": 2, "dim": 32, "heads": 4, "precision": "fp32", "verdict": "published", "why": None}
    assert found.items() >= sizes.items()
    assert found["sha256"] == {tiny.name: hashlib.sha256(tiny.read_bytes()).hexdigest()}
    assert found["bytes"] == tiny.stat().st_size
    assert len(found["digest"]) == 32
    layer = 4 * (32 * 32 + 32) + 2 * 4 * 32 * 32 + 5 * 32 + 2 * 2 * 32
    assert found["parameters"] == 33 * 32 + 2 * layer + 2 * 32


def test_check_of_other_bytes_under_a_published_name_says_all_and_fails(pipeline: Command, tiny, publish):
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    publish(bytes(data))
    said = pipeline("weights", "check", str(tiny), "--json")
    assert said.code == 3
    assert json.loads(said.out)["verdict"] == "different"
    assert "should be" in said.err
    assert "NO" in pipeline("weights", "check", str(tiny)).out


def test_check_of_another_architecture_under_a_published_name_fails(pipeline: Command, tiny):
    shutil.copy(tiny, "esm2_t48_15B_UR50D.pt")  # of which no digest was published
    said = pipeline("weights", "check", "esm2_t48_15B_UR50D.pt", "--json")
    assert said.code == 3
    assert "2 layers of width 32" in json.loads(said.out)["why"]


def test_check_takes_the_configured_checkpoint(pipeline: Command, tiny, configure):
    configure(str(tiny))
    assert json.loads(pipeline("weights", "check", "--json").out)["path"] == str(tiny)


def test_check_without_a_checkpoint_says_how_to_get_one(pipeline: Command):
    refused = pipeline("weights", "check")
    assert refused.code == 2
    assert "pipeline weights fetch esm2_t33_650M_UR50D" in refused.err


def test_check_of_a_pickle_that_wants_to_run_code_runs_none(pipeline: Command, bomb):
    for verb in ("check", "import"):
        refused = pipeline("weights", verb, str(bomb))
        assert refused.code == 3
        assert "wants to run code" in refused.err
        assert names() == [bomb.name]


def test_a_wrong_configuration_is_said_and_not_passed_over(pipeline: Command):
    Path("pipeline.yaml").write_text("data:\n  pth: x\n")
    assert pipeline("weights", "fetch").code == 2
    assert pipeline("weights", "check", "--set", "embed.weights=x.pt").code == 2


def test_synth_writes_what_check_accepts_and_the_same_for_the_same_seed(pipeline: Command):
    done = pipeline("weights", "synth", *SIZES, "--out", "a/esm2_x.pt")
    assert done.code == 0, done.err
    assert "2 layers of width 32 with 4 heads" in done.out
    pipeline("weights", "synth", *SIZES, "--out", "b/esm2_x.pt")
    pipeline("weights", "synth", *SIZES, "--out", "c/esm2_x.pt", "--seed", "1")
    pipeline("weights", "synth", *SIZES, "--out", "d/esm2_x.pt", "--stress", "6")
    found = [json.loads(pipeline("weights", "check", f"{name}/esm2_x.pt", "--json").out)["digest"] for name in "abcd"]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_synth_replaces_only_when_told_to(pipeline: Command):
    pipeline("weights", "synth", *SIZES, "--out", "esm2_x.pt")
    before = Path("esm2_x.pt").read_bytes()
    refused = pipeline("weights", "synth", *SIZES, "--out", "esm2_x.pt", "--seed", "1")
    assert refused.code == 2
    assert Path("esm2_x.pt").read_bytes() == before
    there = names()
    assert pipeline("weights", "synth", *SIZES, "--out", "esm2_x.pt", "--seed", "1", "--force").code == 0
    assert Path("esm2_x.pt").read_bytes() != before
    assert names() == there


@pytest.mark.parametrize("words", [("--dim", "30"), ("--layers", "0"), ("--out", "other.pt"), ("--out", ".")])
def test_synth_of_what_cannot_be_is_refused_and_changes_nothing(pipeline: Command, words):
    pipeline("weights", "synth", *SIZES, "--out", "esm2_x.pt")
    there, before = names(), Path("esm2_x.pt").read_bytes()
    refused = pipeline("weights", "synth", *SIZES, "--out", "esm2_x.pt", "--force", *words)
    assert refused.code == 2
    assert refused.err.startswith("error: ")
    assert names() == there
    assert Path("esm2_x.pt").read_bytes() == before
