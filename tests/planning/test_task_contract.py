"""What a task must keep to, tried on those that do and on those that do not; and `pipeline config check` with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.planning.task_contract import breaches, unweighted_terms
from pipeline.planning.training_work import sizes_of
from pipeline.project.run_code import load_reader, load_task
from pipeline.tasks.interface import Interface
from tests.tasks.items import DIM, batch_of, made
from tests.testkit.command import Command
from tests.testkit.project import MakeProject

WIDTH = 4


class Right:
    """A task that keeps to everything: the mean of a node's embedding is to be 0."""

    def model(self) -> nn.Module:
        return nn.Linear(DIM, WIDTH)

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": item["nodes"]}

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Any:
        return torch.cat([side.embedding.float() for item in items for side in item.sides.values()])

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return {"square": (model(batch).square().sum(), float(len(batch)))}

    def example(self, sizes: Mapping[str, int]) -> Any:
        return torch.randn(sizes["nodes"], DIM)


class MeanInPlaceOfSum(Right):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return {"square": (model(batch).square().mean(), 1.0)}


class WrongWeights(Right):
    def weights(self, batch: Any) -> dict[str, float]:
        return {"square": 1.0}


class OtherRandomNumbers(Right):
    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(WIDTH, DIM))))  # type: ignore[operator]
        return model


class NoTerms(Right):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).square().mean()


class NeverLarger(Right):
    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": np.minimum(item["nodes"], 1)}


class OfOneSize(Right):
    """Pads every item to one size."""

    padded_to = 400

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": 0 * item["nodes"] + self.padded_to}

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Any:
        alone = [super(OfOneSize, self).collate([item], rng) for item in items]
        return torch.cat([nn.functional.pad(rows, (0, 0, 0, self.padded_to - len(rows))) for rows in alone])


class OfOneSizeWithoutExample(OfOneSize):
    example = None  # type: ignore[assignment]


class SmallerThanItsItems(Right):
    """Ignores sizes that differ, and says a large one."""

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": 0 * item["nodes"] + 50}


class SmallerWithoutExample(SmallerThanItsItems):
    example = None  # type: ignore[assignment]


class Shrinking(Right):
    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": np.maximum(1000 - item["nodes"], 0)}


class OneEntryForAll(Right):
    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"score": [model(batch)]}

    def metrics(self, outputs: Mapping[str, Any]) -> dict[str, float]:
        return {}


class Raises(Right):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        raise ZeroDivisionError("no items")


class Foreign(Right):
    def parameter_groups(self, model: nn.Module) -> list[Any]:
        return [nn.Parameter(torch.zeros(1))]


class Drawing(Right):
    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Any:
        return torch.cat([super(Drawing, self).collate([item], rng) + item.rng.normal() for item in items])


class DrawingForAll(Right):
    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Any:
        return super().collate(items, rng) + 0.01 * torch.randn(1)


class Writing(Right):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return super().loss(model, batch.mul_(1.0))


class InBatch(Right):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return {"likeness": ((model(batch) @ model(batch).T).logsumexp(1).sum(), float(len(batch)))}


class NotANumber(Right):
    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        return {"square": (model(batch).square().sum() * float("nan"), float(len(batch)))}


class NoModel(Right):
    def model(self) -> Any:
        return None


class NoOutputs(OneEntryForAll):
    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return None


BREACHES = {
    NotANumber: "nan",
    NoModel: "model()",
    NoOutputs: "outputs()",
    DrawingForAll: "item.rng",
    Writing: "loss()",
    InBatch: "contrast()",
    MeanInPlaceOfSum: "micro-batches",
    WrongWeights: "weights()",
    OtherRandomNumbers: "ranks",
    NoTerms: "loss()",
    NeverLarger: "cost()",
    SmallerThanItsItems: "cost()",
    SmallerWithoutExample: "cost()",
    Shrinking: "cost()",
    OneEntryForAll: "outputs()",
    Raises: "ZeroDivisionError",
    Foreign: "parameter_groups()",
}


@pytest.fixture(scope="module")
def items() -> Sequence[Any]:
    return list(batch_of([made(1), made(2, 40, 30)]).items)


@pytest.mark.parametrize(
    "task",
    [
        Right(),
        Drawing(),
        OfOneSize(),
        OfOneSizeWithoutExample(),
        Interface(embedding_dim=DIM, width=8, layers=1, pair_width=4),
    ],
    ids=lambda task: type(task).__name__,
)
def test_a_task_that_keeps_to_it_has_no_breach(task: Any, items: Sequence[Any]) -> None:
    assert list(breaches(task, items=items)) == []


@pytest.mark.parametrize("kind", BREACHES, ids=lambda kind: kind.__name__)
def test_a_breach_names_what_broke_it(kind: type[Right], items: Sequence[Any]) -> None:
    found = list(breaches(kind(), items=items))
    assert any(BREACHES[kind] in one for one in found), found


def test_without_items_a_cost_of_one_size_is_taken_for_padding_where_it_is_large() -> None:
    assert list(breaches(OfOneSize())) == []
    assert any("cost()" in one for one in breaches(NeverLarger()))


class Forces(Right):
    """A term through a derivative, and another: without `weights`."""

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        x = batch.clone().requires_grad_()
        (force,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return {"force": (force.square().sum(), float(len(x))), **super().loss(model, batch)}


class Weighted(Forces):
    def weights(self, batch: Any) -> dict[str, float]:
        return {"force": float(len(batch)), "square": float(len(batch))}


def test_several_terms_without_weights_keep_the_contract_and_are_named(items: Sequence[Any]) -> None:
    assert list(breaches(Forces(), items=items)) == []
    assert unweighted_terms(Forces(), items) == unweighted_terms(Forces()) == ["force", "square"]
    assert unweighted_terms(Weighted(), items) == unweighted_terms(Right(), items) == []


def test_config_check_says_once_that_several_terms_without_weights_cost_a_pass(
    pipeline: Command, make_project: MakeProject, tmp_path: Path
) -> None:
    make_project(1)
    (tmp_path / "twolab.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Task:\n"
        "    def model(self): return nn.Linear(2, 2)\n"
        "    def cost(self, item): return {'nodes': item['nodes']}\n"
        "    def collate(self, items, rng): return None\n"
        "    def example(self, sizes): return torch.ones(sizes['nodes'], 2)\n"
        "    def loss(self, model, batch):\n"
        "        total = model(batch).sum()\n"
        "        return {'one': (total, 1.0), 'other': (total, 2.0)}\n"
    )
    done = pipeline("config", "check", "--set", "train.task=twolab:Task")
    assert done.out.count("no weights()") + done.err.count("no weights()") == 1


def test_config_check_tries_the_task_out(pipeline: Command, make_project: MakeProject, tmp_path: Path) -> None:
    make_project(1)
    (tmp_path / "wronglab.py").write_text(
        "from torch import nn\n"
        "class Task:\n"
        "    def model(self): return nn.Linear(2, 2)\n"
        "    def cost(self, item): return {'nodes': item['nodes']}\n"
        "    def collate(self, items, rng): return None\n"
        "    def example(self, sizes): return None\n"
        "    def loss(self, model, batch): raise KeyError('label')\n"
    )
    done = pipeline("config", "check", "--set", "train.task=wronglab:Task")
    assert done.code == 2
    assert "KeyError: 'label'" in done.err
    assert "wronglab.py" in done.err


def test_a_product_of_sizes_is_as_large_as_it_is_however_few_bytes_sizes_are_stored_in() -> None:
    class Squares(Right):
        def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"squares": item["nodes"] * item["nodes"]}

    assert sizes_of(Squares(), {"nodes": np.array([60_000], np.int32)})["squares"].tolist() == [3_600_000_000]


def test_an_option_that_a_class_does_not_take_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="width") as caught:
        load_task("pipeline.tasks.interface:Interface", {"widht": 3})
    assert caught.value.where == "train.options.widht"
    for value in (0, "abc", None):
        with pytest.raises(ConfigError, match="width") as caught:
            load_task("pipeline.tasks.interface:Interface", {"width": value})
        assert (caught.value.where, bool(caught.value.remedy)) == ("train.options.width", True)
    with pytest.raises(ConfigError, match="max_peaks") as caught:
        load_reader("pipeline.readers.spectra:Spectra", Path("x.mgf"), {"max_peak": 3})
    assert caught.value.where == "data.options.max_peak"
