"""A class of the user's encodes: from `pipeline submit` to rows in the cache, under keys of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.load import read_config
from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.encoder_source import OwnSource
from pipeline.encoder.engine.token_batches import BatchSchedule, EngineSettings
from pipeline.errors import JobFailed
from pipeline.journal.run_folder import runs_in
from pipeline.project.project import Project
from pipeline.project.run_code import load_encoder, sources
from pipeline.store.cache_folder import CacheFolder
from tests.encoder.own import drawn, write_project, write_weights
from tests.testkit.command import Command
from tests.testkit.project import settle

SUBMIT = ("submit", "--stage", "embed", "--executor", "local", "--follow")
TEXTS = drawn(30, 7, 61, 44)
NO_TORCH = """\
import sys
from pipeline.cli.main import main
sys.argv = ["pipeline", "submit", "--stage", "embed", "--executor", "local", "--follow", "--set", "embed.cls=true"]
try:
    main()
finally:
    print("imported:", sorted({"torch", "own_enc"} & set(sys.modules)))
"""


@pytest.fixture
def pipeline(tmp_path, monkeypatch, capsys):
    """Return the command line, in an empty folder, as a process has it that imported nothing of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that changes twice in a second is read again
    sys.modules.pop("own_enc", None)
    return Command(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def _forgotten():
    sys.modules.pop("own_enc", None)


def test_doctor_looks_at_the_class_and_asks_for_no_checkpoint(tmp_path, pipeline):
    write_project(tmp_path, TEXTS)
    told = pipeline("doctor", "--json", "--set", "embed.also.other.options={scale: 2.0}")
    rows = {row["what"]: row for row in json.loads(told.out)}
    assert [rows[name]["verdict"] for name in ("weights", "weights other")] == ["ok", "ok"]
    told = pipeline("doctor", "--json", "--set", "embed.encoder=own_enc:Nowhere")
    assert {row["what"]: row["verdict"] for row in json.loads(told.out)}["weights"] == "BAD"


def digest(folder: Path, **options: object) -> str:
    """Return what tells the keys of a project's encoder from others."""
    config = read_config(folder / "pipeline.yaml").config
    chosen = config.embed.model_copy(update={"options": options})
    return Project.open(config.model_copy(update={"embed": chosen}), beside=folder).encoding.weights.digest


def by_hand(folder: Path, text: str) -> torch.Tensor:
    """Return the rows of a text as the encoder above makes them alone, with that of its mark."""
    import own_enc

    encoder = own_enc.Encoder(folder / "small.safetensors")
    token_1T = torch.tensor([encoder.tokenize(text)])
    with torch.inference_mode():
        return encoder.model()(token_1T, torch.ones_like(token_1T, dtype=torch.bool))[0]


@pytest.mark.nightly
def test_rows_of_the_users_encoder_come_into_the_cache_and_are_not_made_twice(tmp_path, pipeline):
    (long,) = drawn(90)
    write_project(tmp_path, [*TEXTS, long, "ACDUO"], encoder="own_enc:Marked", options="longest: 64")
    settle(tmp_path)
    first = pipeline(*SUBMIT, "--set", "embed.cls=true", "--set", "data.max_rejected_fraction=1")
    assert first.code == 0, first.err
    run = runs_in(tmp_path / "runs")[-1]
    assert "'U'" in run.rejected.read_text()  # a letter that it does not know
    assert (Path(run.task_code.read_text()) / "own_enc.py").read_text() == (tmp_path / "own_enc.py").read_text()
    store = CacheFolder(tmp_path / "cache").kind("embed")
    records = {record.meta["text"]: record for record in store.read(store.keys())}
    assert records.keys() == {*TEXTS, long}
    sys.path.insert(0, str(tmp_path))
    for text in TEXTS:
        wanted_LD = by_hand(tmp_path, text)
        np.testing.assert_allclose(records[text].arrays["cls"], wanted_LD[0], atol=1e-6)
        np.testing.assert_allclose(records[text].arrays["rows"], wanted_LD[1:], atol=1e-6)
    assert records[long].meta["cut"] == {"policy": "windows", "length": 64, "overlap": 32}
    np.testing.assert_allclose(records[long].arrays["rows"][:40], by_hand(tmp_path, long[:64])[1:41], atol=1e-6)
    data = tmp_path / "data.fasta"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-2]))  # without what was rejected
    words = [sys.executable, "-c", NO_TORCH]
    again = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert "nothing to do" in again.stdout
    assert again.stdout.splitlines()[-1] == "imported: []"


def write_code(folder: Path, old: str, new: str) -> None:
    """Change the encoder's code, and forget what was imported of it."""
    code = (folder / "own_enc.py").read_text()
    assert old in code
    (folder / "own_enc.py").write_text(code.replace(old, new, 1))
    for name in ("own_enc", "mylab", "mylab.scales"):
        sys.modules.pop(name, None)


def test_code_weights_and_options_are_in_the_keys_and_places_and_comments_are_not(tmp_path, pipeline):
    write_project(tmp_path, TEXTS)
    elsewhere = Path(shutil.copytree(tmp_path, tmp_path / "elsewhere"))
    before = digest(tmp_path)
    write_code(tmp_path, "class Apart", "# nothing\nclass Apart")
    assert digest(tmp_path) == before
    digests = [before, digest(tmp_path, scale=2.0)]
    write_code(tmp_path, "self.scale * model", "2 * self.scale * model")
    digests.append(digest(tmp_path))
    write_weights(tmp_path / "small.safetensors", seed=1)
    digests.append(digest(tmp_path))
    (tmp_path / "mylab").mkdir()  # a folder that is no package
    write_code(tmp_path, "import torch\n", "import torch\nfrom mylab import scales\n")
    for factor in (1.0, 2.0):
        (tmp_path / "mylab" / "scales.py").write_text(f"FACTOR = {factor}\n")
        write_code(tmp_path, "import scales", "import scales")
        digests.append(digest(tmp_path))
    assert len(set(digests)) == len(digests)
    (tmp_path / "safetensors" / "more").mkdir(parents=True)  # data, called like a package that the encoder imports
    for name in ("convert.py", "more/convert.py"):
        (tmp_path / "safetensors" / name).write_text("")
    found = dict(sources(load_encoder("own_enc:Encoder", tmp_path, {}, beside=tmp_path)))
    assert set(found) == {"own_enc.py", "mylab/scales.py"}
    sys.modules.pop("own_enc")
    assert digest(elsewhere) == before


@pytest.mark.parametrize(("encoder", "place"), [("made", ""), ("Encoder", "weights/part")])
def test_weights_that_a_function_takes_or_a_folder_holds_are_in_the_keys(tmp_path, pipeline, encoder, place):
    write_project(tmp_path, TEXTS, encoder=f"own_enc:{encoder}")
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    if place:
        config = (tmp_path / "pipeline.yaml").read_text()
        (tmp_path / "pipeline.yaml").write_text(config.replace("small.safetensors", "weights"))
    digests = []
    for seed in (0, 1):
        write_weights(folder / "small.safetensors", seed=seed)
        digests.append(digest(tmp_path))
    if place:
        folder.rename(folder.with_name("other"))
        digests.append(digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_code_that_changed_after_it_was_imported_is_not_remembered_as_the_new(tmp_path, pipeline):
    write_project(tmp_path, TEXTS)
    (tmp_path / "runs").mkdir()
    settle(tmp_path)
    digest(tmp_path)
    code = (tmp_path / "own_enc.py").read_text()
    (tmp_path / "own_enc.py").write_text(code.replace("self.width = 16", "self.width = 32"))
    stale = digest(tmp_path)
    sys.modules.pop("own_enc")
    assert digest(tmp_path) != stale


def source_of(folder: Path, name: str) -> OwnSource:
    """Return what the stage builds encoders from."""
    config = read_config(folder / "pipeline.yaml").config
    return OwnSource(name, load_encoder(f"own_enc:{name}", config.embed.weights, {}, beside=folder), lambda: "")


GATED = {"Encoder": True, "Apart": True, "Marked": True, "Forgetful": False, "Otherwise": False}


@pytest.mark.parametrize(("encoder", "passes"), GATED.items())
def test_the_gate_sees_rows_that_depend_on_padding_or_are_not_as_they_should_be(tmp_path, pipeline, encoder, passes):
    write_project(tmp_path, TEXTS)
    verdict = source_of(tmp_path, encoder).compared("fp32", 1, "cpu")[0]
    assert (verdict.passed, verdict.threshold, verdict.sequences) == (passes, 0.99999, 9)
    if encoder == "Encoder":
        verdict = source_of(tmp_path, encoder).compared("bf16", 1, "cpu")[0]
        assert (verdict.passed, verdict.threshold) == (True, 0.999)


@pytest.mark.parametrize(
    ("encoder", "passes"), [("Marked", True), ("MarkedReferenced", True), ("MarkedForgetful", False)]
)
def test_the_gate_sees_a_mark_whose_row_depends_on_padding(tmp_path, pipeline, encoder, passes):
    write_project(tmp_path, TEXTS)
    source = source_of(tmp_path, encoder)
    assert source.compared("fp32", 1, "cpu", cls=True)[0].passed == passes
    assert source.compared("fp32", 1, "cpu")[0].passed  # the residues are right
    forward = source.build(layer=1, precision="fp32", device=torch.device("cpu"))
    tokens = [forward.tokenize(text) for text in TEXTS]
    marked = forward(tokens, cls=True).split([1 + len(text) for text in TEXTS])
    assert torch.equal(torch.cat([rows_LD[1:] for rows_LD in marked]), forward(tokens))
    assert torch.equal(forward(tokens), torch.cat([forward([letters]) for letters in tokens]))


BROKEN = {"Unmarked": "(1, 64, 16)", "Short": "(1, 63, 16)", "Failing": "IndexError", "Wrapped": "'tuple'",
          "Shorter": "(299, 16)"}  # fmt: skip


@pytest.mark.parametrize(("encoder", "said"), BROKEN.items())
def test_an_encoder_that_fails_or_gives_no_rows_is_told(tmp_path, pipeline, encoder, said):
    write_project(tmp_path, TEXTS)
    with pytest.raises(JobFailed) as failed:
        source_of(tmp_path, encoder).compared("fp32", 1, "cpu")
    assert said in str(failed.value)


def test_memory_of_attention_over_pairs_grows_with_the_length(tmp_path, pipeline):
    write_project(tmp_path, TEXTS)
    encoder = source_of(tmp_path, "Encoder").build(layer=1, precision="fp32", device=torch.device("cpu"))
    for residues in (100, 1000):  # measured at 64 and 254
        letters = np.frombuffer(drawn(residues)[0].encode(), np.uint8)
        peak_bytes = encoder.peak_bytes(letters)
        assert peak_bytes >= 2 * 4 * residues**2  # scores and their softmax
        assert encoder.bytes_per_token(residues) * residues == pytest.approx(peak_bytes, rel=0.01)


def test_a_batch_that_does_not_fit_is_halved_and_what_is_too_long_goes_in_windows(tmp_path, pipeline):
    write_project(tmp_path, TEXTS)
    source = source_of(tmp_path, "Encoder")
    forward, was_built = source.encoder.forward, []

    def limited(model, token_BT, *others):
        if was_built and token_BT.numel() > 70:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return forward(model, token_BT, *others)

    source.encoder.forward = limited
    recipe = EmbeddingRecipe("0", 1, "chain", "fp32", "fp32", length=64, overlap=16)
    engine = Engine(source, recipe, EngineSettings("tokens", cap=4, budget=4096, device="cpu"))
    texts, made = [*drawn(200), *TEXTS], {}

    def read(places):
        was_built.append(True)
        return [texts[at] for at in places]

    outcomes = engine.run(np.array([*map(len, texts)]), read, lambda row: made.update({row.text: row}))
    assert all(outcome.reason is None for outcome in outcomes)
    assert made[texts[0]].variant.cut == SequenceCut("windows", 64, 16)
    assert all(made[text].variant.cut is None for text in TEXTS)


READS = """
    def files_read(self):
        return [Path(__file__).with_name("table.tsv")]
"""


def test_a_file_that_only_the_encoder_knows_of_is_in_the_keys_each_time_it_changes(tmp_path, pipeline):
    write_project(tmp_path, TEXTS)
    code = (tmp_path / "own_enc.py").read_text()
    (tmp_path / "own_enc.py").write_text(code.replace("\n\nclass Forgetful", f"{READS}\n\nclass Forgetful"))
    (tmp_path / "runs").mkdir()  # where it is remembered what an encoder is
    digests = []
    for table in ("a", "b"):
        (tmp_path / "table.tsv").write_text(table)
        settle(tmp_path)
        sys.modules.pop("own_enc", None)
        digests += [digest(tmp_path), digest(tmp_path)]
    first, again, second, once_more = digests
    assert (first, second) == (again, once_more)
    assert first != second


@pytest.mark.parametrize("told", ["by a version", "by its code"])
def test_an_installed_encoder_is_known_by_its_version_whatever_its_package_is_called_or_by_its_code(
    tmp_path, pipeline, monkeypatch, told
):
    write_project(tmp_path, TEXTS, encoder="installed_enc:Encoder")
    site = tmp_path / "site-packages"
    site.mkdir()
    code = (tmp_path / "own_enc.py").read_text()
    (tmp_path / "own_enc.py").rename(site / "installed_enc.py")
    monkeypatch.syspath_prepend(str(site))
    digests = []
    for version, scale in (("1.0", "self.scale"), ("2.0", "3 * self.scale")):
        if told == "by a version":
            shutil.rmtree(site / "Lab_Encoders-1.0.dist-info", ignore_errors=True)
            about = site / f"Lab_Encoders-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Lab-Encoders\nVersion: {version}\n")
            (about / "top_level.txt").write_text("installed_enc\n")
        (site / "installed_enc.py").write_text(code.replace("self.scale * model", f"{scale} * model"))
        sys.modules.pop("installed_enc", None)
        digests.append(digest(tmp_path))
    assert digests[0] != digests[1]


WRONG = {
    ("embed.encoder=own_enc:Missing",): "'Missing'",
    ("embed.encoder=nowhere:Encoder",): "'nowhere'",
    ("embed.encoder=own_enc:Nameless",): "'acdef'",
    ("embed.encoder=esm2c",): "esmc",
    ("embed.encoder=my/enc:Encoder",): "package.module:Name",
    ("embed.encoder=esm2", "embed.options={scale: 2}"): "embed.options",
    ("embed.options={sacle: 2}",): "scale",
    ("embed.options={longest: -1}",): "longest",
    ("embed.weights=nothing.safetensors",): "embed.weights",
    ("embed.layer=2",): "embed.layer",
    ("embed.cls=true",): "--pool mean",
    ("embed.cls=true", "embed.encoder=own_enc:Numbered"): "own_enc:Numbered",
}


@pytest.mark.parametrize(("settings", "said"), WRONG.items())
def test_wrong_settings_are_refused_before_anything_is_submitted(tmp_path, pipeline, settings, said):
    write_project(tmp_path, TEXTS)
    done = pipeline(*SUBMIT, *(word for setting in settings for word in ("--set", setting)))
    assert done.code == 2, done.out
    assert said in done.err
    assert not runs_in(tmp_path / "runs")


def test_what_it_takes_as_one_is_not_cut_where_only_longer_ones_are(tmp_path, pipeline):
    write_project(tmp_path, TEXTS, options="longest: 4096")
    recipe = Project.open(read_config(tmp_path / "pipeline.yaml").config, beside=tmp_path).encoding.recipe
    windows = SequenceCut("windows", 1022, 256)
    cuts = [[variant.cut for variant in recipe.accepted(residues)] for residues in (1022, 4096, 4097)]
    assert cuts == [[None], [None, windows], [windows]]  # in the middle, where memory ends
    assert {variant.cut for variant in recipe.variants()} == {None, windows}
    schedule = BatchSchedule(np.array([1022, 4096, 4097, 4096]), np.array([], int), recipe, policy="tokens", cap=None)
    assert [schedule.draw(8196).tolist() for _ in range(3)] == [[2], [1, 3], [0]]
