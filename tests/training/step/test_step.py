"""One exact optimizer step, however its items are cut into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.schema_train import ScheduleSection
from pipeline.errors import ConfigError
from pipeline.training.step.optimizers import StepSettings, factor, set_rate
from pipeline.training.step.step import Step
from tests.training.step.towers import cut

WIDTH = 8


class Net(nn.Module):
    """Repeated blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class OneTerm:
    """A loss that is a mean over items of unequal weight."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net().double()

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return item

    def collate(self, items: Any, rng: Any) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        error = model(batch["x"]).squeeze(-1) - batch["y"]
        return {"squared": ((error.square() * batch["w"]).sum(), batch["w"].sum())}


class TwoTerms(OneTerm):
    """Terms whose weights do not go together: items, and a label that only some have."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        error = model(batch["x"]).squeeze(-1) - batch["y"]
        known = batch["w"] > 1
        return {
            "squared": (error.square().sum(), float(len(error))),
            "known": ((error.abs() * known).sum(), known.sum().double()),
        }


class Told(TwoTerms):
    """The same, and it tells the weights beforehand."""

    def weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor | float]:
        return {"squared": float(len(batch["y"])), "known": (batch["w"] > 1).sum().double()}


class Forces(TwoTerms):
    """An energy and the forces, which are its slope; the loss leaves it to the step whether gradients are enabled."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        x = batch["x"].clone().requires_grad_()
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return {**super().loss(model, batch), "known": (force.square().sum(), batch["w"].sum())}


def data(count: int = 24) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(count, WIDTH, dtype=torch.float64, generator=rng),
        "y": torch.randn(count, dtype=torch.float64, generator=rng),
        "w": torch.arange(1.0, count + 1, dtype=torch.float64) % 5,
    }


def after(
    task: Any, batches: list[dict[str, Tensor]], settings: StepSettings, steps: int = 2
) -> tuple[list[Tensor], Any]:
    step = Step(task, settings)
    values = [step.run(batches) for _ in range(steps)]
    return [one.detach() for one in step.model.parameters()], values


@pytest.mark.parametrize("task", [OneTerm(), TwoTerms(), Told(), Forces()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_any_cut_of_a_step_does_what_the_whole_does(task: Any, clip: float | None) -> None:
    settings = StepSettings(optimizer="sgd", learning_rate=0.1, clip=clip, ema=0.9)
    whole, told = after(task, [data()], settings)
    for sizes in ([12, 12], [1, 23], [5, 7, 2, 10], [1] * 24):
        parts, told_parts = after(task, cut(data(), sizes), settings)
        for one, other in zip(whole, parts, strict=True):
            assert torch.linalg.norm(one - other) <= 1e-12 * torch.linalg.norm(one), sizes
        for values, values_parts in zip(told, told_parts, strict=True):
            assert {name: pytest.approx(float(value)) for name, value in values.items()} == values_parts, sizes


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_every_way_of_an_optimizer_goes_the_same_way(optimizer: str) -> None:
    ways = (StepSettings(optimizer=optimizer, way=way, learning_rate=0.01) for way in ("loop", "foreach", "fused"))
    expected, *others = (after(OneTerm(), [data()], settings)[0] for settings in ways)
    for found in others:
        for one, other in zip(expected, found, strict=True):
            assert torch.allclose(one, other, rtol=1e-9)


def test_saving_memory_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.training.step.checkpointing.SMALLEST_BYTES", 1)
    plain, _ = after(OneTerm(), cut(data(), [10, 14]), StepSettings())
    for setting in ({"checkpointing": 2}, {"offload": True}, {"checkpointing": 2, "offload": True}):
        saving, _ = after(OneTerm(), cut(data(), [10, 14]), StepSettings(**setting))
        assert all(torch.equal(one, other) for one, other in zip(plain, saving, strict=True)), setting


class Normed(OneTerm):
    """Blocks with random numbers and batch statistics."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)) for _ in range(4))
        return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).double()


def test_any_number_of_checkpointed_blocks_changes_no_bit() -> None:
    def trained(blocks: int) -> list[Tensor]:
        step = Step(Normed(), StepSettings(checkpointing=blocks))
        torch.manual_seed(1)
        for rung in (0, 1):
            with step.remedied(rung):
                step.run(cut(data(), [10, 14]))
        assert step._recomputing.blocks == blocks, "a remedy ends"
        return [*step.model.state_dict().values(), torch.get_rng_state()]

    expected = trained(0)
    for blocks in (1, 2, 4, 9):
        assert all(torch.equal(one, other) for one, other in zip(expected, trained(blocks), strict=True)), blocks


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that Dynamo looks at
def test_a_compiled_model_is_checkpointed_and_counts_no_batch_twice() -> None:
    step = Step(Normed(), StepSettings(checkpointing=2))
    step.model.compile(backend="aot_eager")
    step.run(cut(data(), [24]))
    assert [int(buffer) for name, buffer in step.model.named_buffers() if name.endswith("tracked")] == [1] * 4


@pytest.mark.parametrize("rung", [1, 2, 3])
def test_a_remedy_for_one_micro_batch_changes_no_gradient(rung: int) -> None:
    settings = StepSettings(optimizer="sgd", learning_rate=0.1)
    expected, _ = after(OneTerm(), cut(data(), [10, 14]), settings, steps=1)
    step = Step(OneTerm(), settings)
    first, second = cut(data(), [10, 14])
    step.accumulate(first)
    with step.remedied(rung):
        step.accumulate(second)
    step.update()
    for parameter, wanted in zip(step.model.parameters(), expected, strict=True):
        assert torch.allclose(parameter, wanted, rtol=1e-12)


def test_frozen_parameters_stay_have_no_state_and_must_be_some_and_not_all() -> None:
    step = Step(OneTerm(), StepSettings(frozen=("blocks.0.", "blocks.1.")))
    before = {name: one.detach().clone() for name, one in step.model.named_parameters()}
    step.run([data()])
    moved = [name for name, one in step.model.named_parameters() if not torch.equal(one, before[name])]
    assert moved == [name for name in before if name.startswith(("blocks.2", "head"))]
    assert {name.split()[0] for what, name, _ in step.owned() if what == "optimizer"} == set(moved)
    for frozen, named in ((("block.0",), "blocks"), (("blocks", "head"), "no trainable parameter")):
        with pytest.raises(ConfigError, match=named):
            Step(OneTerm(), StepSettings(frozen=frozen))


def test_averages_follow_the_parameters() -> None:
    step = Step(OneTerm(), StepSettings(ema=0.75))
    before = [one.detach().clone() for one in step.trained]
    step.run([data()])
    for average, old, new in zip(step.averages, before, step.trained, strict=True):
        assert torch.allclose(average, 0.75 * old + 0.25 * new.detach())


class Rare(OneTerm):
    """A second term that only some items have, and some steps have nothing of."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        error = model(batch["x"]).squeeze(-1) - batch["y"]
        rare = batch["w"] > 100
        return {"squared": (error.square().sum(), float(len(error))), "rare": ((error * rare).sum(), rare.sum())}


@pytest.mark.parametrize("sizes", [[24], [12, 12]])
def test_a_term_that_nothing_of_a_step_has_changes_nothing(sizes: list[int]) -> None:
    class Squared(OneTerm):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
            return {"squared": Rare().loss(model, batch)["squared"]}

    expected, _ = after(Squared(), [data()], StepSettings())
    found, values = after(Rare(), cut(data(), sizes), StepSettings())
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(expected, found, strict=True))
    assert float(values[0]["rare"]) == 0.0


@pytest.mark.parametrize("nothing", [0.0, torch.tensor(0.0)])
def test_a_step_without_any_weight_moves_nothing_but_by_decay(nothing: Any) -> None:
    class Empty(OneTerm):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
            return {"squared": (model(batch["x"]).sum() * 0.0, nothing)}

    step = Step(Empty(), StepSettings(weight_decay=0.0))
    before = [one.detach().clone() for one in step.trained]
    step.run([data()])
    assert all(torch.equal(one, old) for one, old in zip(step.trained, before, strict=True))


def test_parameters_of_no_group_get_no_gradients() -> None:
    class Grouped(OneTerm):
        def parameter_groups(self, model: nn.Module) -> Any:
            return [{"params": [*model.head.parameters()], "lr": 0.1}]

    step = Step(Grouped(), StepSettings())
    step.run(cut(data(), [12, 12]))
    assert len(step.trained) == 2
    assert [name for name, one in step.model.named_parameters() if one.requires_grad] == ["head.weight", "head.bias"]


def test_a_module_that_evaluates_on_purpose_goes_on_to() -> None:
    class Still(OneTerm):
        def model(self) -> nn.Module:
            model = super().model()
            model.blocks[0].eval()  # type: ignore[index, union-attr]
            return model

    step = Step(Still(), StepSettings())
    step.evaluate(data())
    step.run(cut(data(), [12, 12]))
    assert [block.training for block in step.model.blocks] == [False, True, True]  # type: ignore[union-attr]


def test_a_loss_through_a_derivative_is_evaluated_and_leaves_no_graph() -> None:
    terms = Step(Forces(), StepSettings()).evaluate(data())
    assert terms["known"][0] > 0
    assert not any(total.requires_grad for total, _ in terms.values())


def test_terms_that_come_and_go_need_weights_told_beforehand() -> None:
    class Sometimes(TwoTerms):
        def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
            terms = dict(super().loss(model, batch))
            return terms if len(batch["y"]) == 4 else {"squared": terms["squared"]}

    step = Step(Sometimes(), StepSettings())
    step.run(cut(data(), [12, 12]))
    with pytest.raises(ConfigError, match=r"weights\(\)"):
        step.run(cut(data(), [20, 4]))


class Half(OneTerm):
    """The same in single precision, as fp16 has it."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net()


def test_memory_that_ends_within_a_fused_optimizer_leaves_no_scale_to_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = {"x": torch.ones(3, WIDTH), "y": torch.zeros(3), "w": torch.ones(3)}
    settings = StepSettings(optimizer="adamw", precision="fp16", way="fused", clip=1.0)
    disturbed, calm = (Step(Half(), settings, scaled=True) for _ in range(2))
    with monkeypatch.context() as patched:

        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patched.setattr(disturbed.optimizer, "step", full)
        disturbed.accumulate(batch)
        with pytest.raises(torch.OutOfMemoryError):
            disturbed.update()
        disturbed.release()
    for step in (disturbed, calm):
        step.run([batch])
    assert not hasattr(disturbed.optimizer, "grad_scale")
    for mine, theirs in zip(disturbed.trained, calm.trained, strict=True):
        assert torch.equal(mine, theirs)


# Learning rates


def test_a_constant_rate_is_constant_once_it_has_grown() -> None:
    assert [factor(ScheduleSection(), step, 5) for step in range(5)] == [1.0] * 5
    shares = [factor(ScheduleSection(warmup=4), step, 9) for step in range(6)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "middle"), [("linear", 0.55), ("cosine", 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)]
)
def test_a_falling_rate_ends_at_its_least(kind: str, middle: float) -> None:
    schedule = ScheduleSection.model_validate({"kind": kind, "least": 0.1})
    assert factor(schedule, 0, 11) == 1.0
    assert factor(schedule, 5, 11) == pytest.approx(middle)
    assert factor(schedule, 10, 11) == pytest.approx(0.1)
    assert factor(schedule, 99, 11) == pytest.approx(0.1)


def test_an_inverse_square_root_after_the_warm_up_is_dreams_own_schedule() -> None:
    """Its rates at these steps, counted from 1, in units of the highest (tests/reference/dreams/hparams.json)."""
    schedule = ScheduleSection(kind="inverse_sqrt", warmup=4999)
    theirs = {1: 0.0002, 10: 0.002, 2500: 0.5, 5000: 1.0, 10_000: 0.7071067811865475, 20_000: 0.5}
    assert {step: factor(schedule, step - 1, 1) for step in theirs} == pytest.approx(theirs)


def test_every_group_gets_its_share_of_its_own_rate_however_often() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.1}])
    for share in (0.5, 0.25, 1.0, 0.25):
        assert set_rate(optimizer, share) == 0.5 * share
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * share, 0.1 * share]
