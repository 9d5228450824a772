"""What holds for every task: its batches, its sums, its layers, half precision, its memory and its options."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.planning.task_contract import breaches
from pipeline.protocol import ITEMS, Contrastive, Example, Outputs
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.encoder_finetune import EncoderFinetune
from pipeline.tasks.interface import Interface
from pipeline.tasks.rna_ligand import RnaLigand, RnaLigandContrast
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.tasks.spectra_pretrain import SpectraPretrain
from pipeline.training.step.checkpointing import repeated
from tests.memory.tracing.traced import tracer, true_peak
from tests.tasks import cases
from tests.tasks.cases import RNG, apart, outputs_of, stepped
from tests.tasks.items import double
from tests.tasks.rna.made import by_key
from tests.testkit.limited import device

CASES = cases.cases()
ALL = pytest.mark.parametrize("name", CASES)
WITH_LAYERS = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.layers])
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def case(name, tmp_path):
    """Return a case; one that learns targets has them in a file."""
    found = CASES[name]
    if found.targets:
        rng = np.random.default_rng(1)
        vectors = {key: rng.normal(size=found.task.output_dim).astype(np.float32) for key in ("1aaa_ARG", "2bbb_FMN")}
        path = by_key(tmp_path / "targets.h5", vectors)
        found = replace(found, task=replace(found.task, **{found.targets: path}))
    return found


def collated(case, taken=slice(None)):
    return case.task.collate(case.make()[taken], RNG)


@pytest.mark.nightly
@ALL
def test_it_keeps_the_contract(case):
    assert list(breaches(case.task, dict(case.sizes[0]), case.make(), **case.contract)) == []


@WITH_LAYERS
def test_an_example_of_the_cost_of_items_has_the_layout_of_their_batch(case):
    if isinstance(case.task, ComplexDocking):
        case = replace(case, make=lambda make=case.make: make()[:1], costs=case.costs[:1])  # uneven items: nearly so
    together = max if case.padded else sum
    costs = [case.task.cost(sizes) for sizes in case.costs]
    sizes = {axis: together(cost[axis] for cost in costs) for axis in costs[0]} | {ITEMS: len(costs)}
    wanted, found = (
        [(one.shape, one.dtype) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
        for batch in (collated(case), case.task.example(sizes))
    )
    assert found == wanted
    columns = {axis: np.array([size, size]) for axis, size in case.costs[0].items()}
    assert {axis: one.tolist() for axis, one in case.task.cost(columns).items()} == {
        axis: [size, size] for axis, size in costs[0].items()
    }


@WITH_LAYERS
def test_it_has_outputs_that_are_the_same_alone_and_in_a_batch(case):
    assert isinstance(case.task, Example)
    assert isinstance(case.task, Outputs)
    if case.alone:  # docking draws its poses by values
        with FakeTensorMode():
            assert case.task.outputs(case.task.model(), case.task.example(case.sizes[0]))
    outputs = outputs_of(case.task, case.model(case.task, torch.float32).eval(), case.task.example(case.sizes[0]))
    numbers = [name for name, values in outputs.items() if all(np.size(value) == 1 for value in values)]
    assert numbers or getattr(case.task, "targets", 1) == 2  # a table of predictions can be sorted
    for dtype, close in ((torch.float32, 1e-4), (torch.float64, 1e-10)) if case.alone else ():
        model, convert = case.model(case.task, dtype), double if dtype is torch.float64 else (lambda batch: batch)
        together = outputs_of(case.task, model.eval(), convert(collated(case)))
        for place in range(len(case.costs)):
            alone = outputs_of(case.task, model, convert(collated(case, slice(place, place + 1))))
            for key, (value,) in alone.items():
                assert np.allclose(together[key][place], value, rtol=0, atol=close, equal_nan=True), (key, place)


@WITH_LAYERS
def test_a_step_is_the_same_however_its_items_are_cut(case):
    count = len(case.costs)
    spans = [[(0, count)], [(0, 1), (1, count)], [(at, at + 1) for at in range(count)]]
    batches = [[double(collated(case, slice(*span))) for span in cut] for cut in spans]
    whole, *cut = (stepped(case.task, some, case.model(case.task)) for some in batches)
    assert max(float(one.abs().max()) for one in whole.values()) > 1e-3
    assert max(apart(whole, one) for one in cut) < 1e-10


@WITH_LAYERS
def test_its_layers_may_run_again_in_backward(case):
    assert set(repeated(case.task.model())) == set(case.layers)
    plain, again = (
        stepped(case.task, [double(collated(case))], case.model(case.task), checkpointing=checkpointing)
        for checkpointing in (0, len(case.layers))
    )
    assert apart(plain, again) < 1e-10


@WITH_LAYERS
def test_half_precision_is_finite_and_sums_the_loss_in_single(case):
    batch, model = collated(case), case.model(case.task, torch.float32).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = {name: float(total.detach()) for name, (total, _) in case.task.loss(model, batch).items()}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            half = case.task.loss(model, batch)
        sum(total for total, _ in half.values()).backward()
        for name, (total, _) in half.items():
            assert total.dtype == torch.float32
            assert float(total.detach()) == pytest.approx(plain[name], rel=0.1)
        assert all(torch.isfinite(one.grad).all() for one in model.parameters() if one.grad is not None)


PLANS = [(name, size) for name, case in CASES.items() if case.layers for size in range(len(case.sizes))]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "size"), PLANS)
def test_its_plan_is_what_it_takes(case, size):
    device.need()
    sizes = case.sizes[size]
    settings = {"clip": 1.0} | ({"batch": sizes[ITEMS]} if isinstance(case.task, Contrastive) else {})
    traced = tracer(case.task, least=case.sizes[0], **settings)
    standing, micro = traced.standing(MemoryChoice()), traced.micro(MemoryChoice(), sizes)
    for times in (1,) if isinstance(case.task, Contrastive) else (1, 2):
        planned = live_peak_bytes(standing, micro, accumulate=times > 1)
        assert planned == pytest.approx(true_peak(case.task, sizes, times, **settings), rel=case.near)


# ---- options ----

NAN, INF = float("nan"), float("inf")
IMAGES = {"left": "images", "right": "text"}
SENSELESS = {  # of each task, options of which the first makes no sense
    Interface: [{"width": 0}, {"dropout": 1.0}, {"contact_weight": INF}, {"pair_layers": -1}],
    ComplexDocking: [
        {"scalars": 0}, {"samples": 0}, {"temperature": 0.0}, {"actual_steps": 21},
        {"translation_least": NAN}, {"rotation_most": 0.001},
    ],
    SpectraFinetune: [
        {"targets": 0}, {"max_peaks": 0}, {"layers": -1}, {"finest": 0.0}, {"finest": 1e-7}, {"finest": NAN},
        {"dropout": 1.0}, {"heads": 8, "d_fourier": 979},
    ],
    SpectraPretrain: [{"masked": 1.5}, {"gamma": 0.5}, {"classes": 1}, {"heads": 7}, {"order_weight": NAN}],
    DenovoRecursive: [
        {"width": 0}, {"heads": 4, "width": 50}, {"width": 32, "heads": 4}, {"latent_steps": 0}, {"max_peaks": 0},
        {"longest": 0}, {"bin_size": 0.0}, {"sigma": NAN}, {"spectrum_weight": -1.0},
        {"render_reach": INF}, {"spectrum_loss": "x"}, {"answer_weights": "x"},
        {"precursor_loss": ""}, {"modifications": ["K[Acetyl]"]}, {"carbamidomethyl": True, "as_published": True},
        {"carbamidomethyl": True, "modifications": []}, {"smoothing": 1.5}, {"dropout": 1.0}, {"tolerance_ppm": -1.0},
    ],
    RnaLigand: [
        {"layers": 0}, {"output_dim": 0}, {"loss_by": "huber"}, {"targets_missing": "x"}, {"distance": "manhattan"},
        {"angle_weight": NAN}, {"dropout": 1.0}, {"num_attention_heads": 3}, {"version": 4}, {"norm_type": "rms"},
        *({"hidden_irreps": text} for text in ("", "16x1o", "32x0e+16y1o", "32x0e+", "0x0e", "8x0e+2x1e", "8x0e+1x3o")),
        {"hidden_irreps": "8x0e+8x0e"}, {"targets": "targets.h5"},
        {"library": "$PWD/library.h5"},
    ],
    RnaLigandContrast: [{"targets_missing": "skip"}],
    ContrastivePair: [
        {"left": "sounds"}, {"right_dim": 0, "right": "vectors"}, {"left_most": 0}, {"temperature": 0.001},
        {"temperature": INF}, {"dropout": -0.1}, {"heads": 7},
        {"templates": ["a dog"], **IMAGES, "classes": ["a", "b"]},
        {"patch": 5, **IMAGES, "image_size": 16}, {"image_heads": 3, **IMAGES, "image_width": 16},
        {"crop_least": 0.0, **IMAGES}, {"classes": ["a"], **IMAGES, "class_weight": 1.0},
        {"classes": [], **IMAGES, "templates": ["a {}"]}, {"classes": ["a", "a"], **IMAGES},
        {"merges": "/none", **IMAGES, "templates": ["a {}"], "classes": ["a", "b"]},
        {"merges": None, **IMAGES, "templates": ["a {}"], "classes": ["a", "b"], "vocabulary": 500},
        {"templates": ["a {}"], **IMAGES, "classes": ["a" * 400, "b"]},
        {"templates": ["a {}"], **IMAGES, "classes": ["a", "b"], "right": "tokens"},
    ],
    EncoderFinetune: [{"rank": 2, "top_layers": 1}, {"top_layers": 40, "rank": 0}, {"told": "chains"}, {"alpha": 0.0}],
}  # fmt: skip


@pytest.mark.parametrize("task", SENSELESS, ids=lambda task: task.__name__)
def test_options_that_make_no_sense_are_refused_by_name(task):
    for options in SENSELESS[task]:
        with pytest.raises(ConfigError) as caught:
            task(**options)
        assert caught.value.where == f"train.options.{next(iter(options))}", options
        assert caught.value.exit_code == 2
