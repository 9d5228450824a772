"""The network against the original's numbers: nine variants, losses and gradients."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.tasks.irreps import product_paths
from pipeline.tasks.rna.pocket_network import NAMES, SYSTEM, PocketNetwork, PocketSizes
from pipeline.tasks.rna.turning_fields import Fields, fields_of
from pipeline.tasks.rna_ligand import RnaLigand, RnaLigandContrast
from pipeline.training.checkpoints.trained_weights import renamed
from tests.reference import document, recorded
from tests.tasks.originals import (
    POCKETS,
    VARIANTS,
    off,
    pocket_batch,
    pocket_network,
    pocket_sizes,
    pocket_state,
)

ANOTHER_MODEL = 1e-5  # of vectors of 2.4: what FACTS.md says


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_vectors_of_pockets_are_the_originals_together_and_alone(variant):
    outputs, model = recorded("rna3effi/outputs"), pocket_network(variant)
    assert off(model(pocket_batch(*POCKETS)), outputs[f"{variant}.embedding"]) < ANOTHER_MODEL
    alone_BD = torch.cat([model(pocket_batch(name)) for name in POCKETS])
    assert off(alone_BD, outputs[f"{variant}.alone"]) < ANOTHER_MODEL


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_turned_pocket_is_as_wrong_as_in_the_original(variant):
    one = pocket_batch(POCKETS[1])
    model = pocket_network(variant)
    turned_BD = model(one._replace(pos_N3=one.pos_N3 @ recorded("rna3effi/inputs")["rotation"].T))
    assert off(turned_BD, recorded("rna3effi/outputs")[f"{variant}.rotated"]) < ANOTHER_MODEL
    assert off(turned_BD, model(one)) > 0.01  # its norm depends on how a pocket lies


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_come_in_and_go_out_again_to_the_bit(variant):
    model = PocketNetwork(PocketSizes(**pocket_sizes(variant)))
    theirs = pocket_state(variant)
    form = model.published_forms()[SYSTEM]
    assert form.knows(theirs)
    taken = form.read(theirs)
    assert set(model.state_dict()) - set(taken) == set(form.fresh)
    model.load_state_dict(taken, strict=False)
    written = form.write(model.state_dict())
    assert written.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        assert written[name].contiguous().numpy().tobytes() == tensor.numpy().tobytes(), name


def test_at_its_published_size_it_has_the_originals_tensors():
    sizes = {
        name: value
        for name, value in pocket_sizes("best").items()
        if name not in document("rna3effi/hparams")["small_here"]
    }
    small = ("hidden_irreps", "output_dim", "layers", "feature_width")
    model = PocketNetwork(PocketSizes(**{name: value for name, value in sizes.items() if name not in small}))
    assert sum(one.numel() for one in model.parameters()) == document("rna3effi/hparams")["parameters_full"]
    shapes = {name: list(one.shape) for name, one in model.published_forms()[SYSTEM].write(model.state_dict()).items()}
    assert shapes == document("rna3effi/hparams")["shapes_full"]


def test_a_network_that_is_mended_refuses_published_weights_and_says_what_to_set():
    form = RnaLigand(hidden_irreps="8x0e+4x1o+2x2e").model().published_forms()[SYSTEM]
    with pytest.raises(ConfigError, match="as_published") as caught:
        form.read(pocket_state("best"))
    assert caught.value.remedy == "--set train.options.as_published=true"


# ---- losses ----


@pytest.mark.parametrize("loss", ["mse", "cosine", "cosine_mse"])
def test_losses_and_their_gradients_are_the_originals(loss):
    task = RnaLigand(output_dim=32, loss_by=loss)
    predicted_BD = recorded("rna3effi/inputs")["loss.predicted"].clone().requires_grad_()
    batch = task.example({"atoms": 8, "items": 8})._replace(target_BD=recorded("rna3effi/inputs")["loss.target"])
    ((total, weight),) = task.loss(lambda _: predicted_BD, batch).values()
    check(total / weight, predicted_BD, loss)


@pytest.mark.parametrize(("temperature", "name"), [(0.07, "infonce"), (0.2, "infonce_temperature_0.2")])
def test_infonce_over_a_step_and_its_gradient_are_the_originals(temperature, name):
    task = RnaLigandContrast(output_dim=32, temperature=temperature)
    predicted_BD = recorded("rna3effi/inputs")["loss.predicted"].clone().requires_grad_()
    ((total, weight),) = task.contrast(
        None, {"embedding": predicted_BD, "target": recorded("rna3effi/inputs")["loss.target"]}
    ).values()
    check(total / weight, predicted_BD, name)


def check(loss, predicted_BD, name):
    outputs = recorded("rna3effi/outputs")
    assert loss.item() == pytest.approx(float(outputs[f"loss.{name}"]), rel=1e-5)
    loss.backward()
    if f"loss.{name}.gradient" in outputs:
        expected_BD = outputs[f"loss.{name}.gradient"]
        assert off(predicted_BD.grad, expected_BD) < 1e-5 * float(expected_BD.abs().max())


def test_gradients_of_a_training_step_are_the_originals():
    model = PocketNetwork(PocketSizes(**pocket_sizes("best")))
    model.load_state_dict(pocket_network("best").state_dict())
    batch = pocket_batch(*POCKETS)
    loss = torch.nn.functional.mse_loss(model.eval()(batch), recorded("rna3effi/inputs")["train.target"])
    assert loss.item() == pytest.approx(float(recorded("rna3effi/outputs")["train.mse"]), rel=1e-5)
    loss.backward()
    seen = 0
    for name, parameter in model.named_parameters():
        expected = recorded("rna3effi/outputs").get(f"train.gradient.{renamed(name, NAMES)}")
        if expected is not None:
            seen += 1
            assert off(parameter.grad, expected) < 1e-4 * max(float(expected.abs().max()), 1e-3), name
    assert seen == sum(name.startswith("train.gradient.") for name in recorded("rna3effi/outputs"))


FIELDS = Fields(8, 4, 2)
pytestmark = pytest.mark.usefixtures("one_thread")


def test_paths_keep_parity_and_every_one_has_weights():
    paths = product_paths(FIELDS.irreps, FIELDS.irreps)
    assert len(paths) == 11
    assert all(sum(path.degrees) % 2 == 0 for path in paths)
    assert sum(path.weights for path in paths) == 216  # of FACTS.md: without a gate


@pytest.mark.parametrize(
    ("text", "fields"), [("32x0e+16x1o+8x2e", (32, 16, 8)), ("8x0e + 2x2e", (8, 0, 2)), ("4x1o+3x0e", (3, 4, 0))]
)
def test_fields_are_read_from_a_text(text, fields):
    assert fields_of(text) == fields
