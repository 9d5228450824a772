"""Tests whether a task keeps its contract: on tensors without data, and on a few items if there are any.

    from pipeline.planning.task_contract import breaches

    def test_my_task_keeps_the_contract():
        assert list(breaches(Task(), sizes={"nodes": 20, "pairs": 90})) == []

`pipeline config check` does the same for the task of a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pipeline.device.kinds import CPU
from pipeline.errors import PipelineError
from pipeline.memory.footprint import MemoryChoice
from pipeline.planning.training_work import sizes_of
from pipeline.project.run_code import user_code_failed
from pipeline.protocol import ITEMS, Contrastive, Example, Outputs, ParameterGroups, Weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from pipeline.memory.tracing.recorder import Recorder
    from pipeline.protocol import Batch, Task
    from pipeline.training.step.step import Step

GRAPH = ("nodes", "edges", "receptor", "ligand", "pairs", "cross", "residues", "contacts")
ITEM_SIZE, TRIED = 24, 3  # the size and number of made-up items
CLOSE = 1e-3  # sums in single precision depend on their order
IN_BATCH = (
    "the loss compares items within a batch? give the task embed() and contrast() (Contrastive in"
    " pipeline/protocol.py): a step then makes two passes over any micro-batches"
)


def breaches(
    task: Task,
    sizes: Mapping[str, int] | None = None,
    items: Sequence[Any] = (),
    *,
    seed: int = 0,
    item_sizes: Sequence[str] = GRAPH,
    padded: bool = False,
) -> Iterator[str]:
    """Yield a sentence for each rule that a task breaks.

    `sizes` are those of a small batch, as `cost` names them; `items` are what a loader gives to `collate`; `item_sizes`
    are the names of the sizes that `cost` is given; a batch that is `padded` has the size of its largest item.
    """
    names = [name for name in dict.fromkeys((*item_sizes, *_axes(items), *(sizes or ()))) if name != ITEMS]
    try:
        yield from _costs(task, names, items)
        model = _built(task, seed)
        yield from _models(task, model, seed)
        if isinstance(task, Example):
            _try_step(task, sizes or _made_up(task, names, padded=padded))
        if items:
            yield from _careless(task, model, items)
            yield from _with_data(task, model, items)
    except PipelineError as error:
        yield error.what
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the user's code is a finding
        yield user_code_failed("trying the task", error).what


def unweighted_terms(
    task: Task, items: Sequence[Any] = (), *, item_sizes: Sequence[str] = GRAPH, padded: bool = False
) -> list[str]:
    """Return the terms whose weights need an extra pass in each step: of a loss with several, without `weights`."""
    from pipeline.training.step.optimizers import evaluated_terms

    if isinstance(task, Weights | Contrastive):
        return []
    if items:
        batch = _collated(task, items, np.random.default_rng(0))
    elif isinstance(task, Example):
        batch = task.example(_made_up(task, item_sizes, padded=padded))
    else:
        return []
    terms = list(evaluated_terms(task, _built(task, 0), batch))
    return terms if len(terms) > 1 else []


def _built(task: Task, seed: int) -> nn.Module:
    """Return the task's model, built with a fixed seed."""
    from pipeline.training.step.step import checked_model

    with _seeded(seed):
        return checked_model(task.model())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Use fixed random numbers within the block, and restore torch's state."""
    import torch

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield


def _axes(items: Sequence[Any]) -> list[str]:
    """Return the names of the axes along which a reader's arrays lie: `peaks` of `peaks.mz`."""
    arrays = [values for item in items if isinstance(values := getattr(item, "values", None), Mapping)]
    return [name.partition(".")[0] for values in arrays for name in values if "." in name]


def _made_up(task: Task, names: Iterable[str], *, padded: bool) -> dict[str, int]:
    """Return the sizes of a small batch, by the names that `cost` gives."""
    costs = sizes_of(task, {name: np.full(TRIED, ITEM_SIZE, np.int64) for name in names})
    return {ITEMS: TRIED, **{name: int(size_N.max() if padded else size_N.sum()) for name, size_N in costs.items()}}


def _costs(task: Task, names: Iterable[str], items: Sequence[Any]) -> Iterator[str]:
    """Check that `cost` grows with the items (or is equal for all), and that it takes arrays."""
    small = {name: np.ones(2, np.int64) for name in names}  # small, as max_peaks may be low
    large = {name: 2 * ITEM_SIZE * size_N for name, size_N in small.items()}
    before, after = sizes_of(task, small), sizes_of(task, large)
    if before.keys() != after.keys():
        yield f"cost() names {', '.join(before)} of some items and {', '.join(after)} of others"
        return
    if any((after[name] > before[name]).any() for name in before):
        return
    is_same = all((after[name] == before[name]).all() for name in before)
    if not (is_same and _is_enough(task, {name: int(size_N[0]) for name, size_N in after.items()}, items)):
        yield f"cost() is no larger for an item of size {2 * ITEM_SIZE} than for one of size 1"


def _is_enough(task: Task, cost: Mapping[str, int], items: Sequence[Any]) -> bool:
    """Tell whether every item may cost the same because batches hold all items in one size.

    Without items, the cost must be at least the size of the larger item that was tried.
    """
    if not items:
        return max(cost.values()) >= 2 * ITEM_SIZE
    alone = [_bytes(_collated(task, [item], np.random.default_rng(0))) for item in items]
    of_this_cost = _bytes(task.example({**cost, ITEMS: 1})) if isinstance(task, Example) else min(alone)
    return max(alone) <= of_this_cost


def _bytes(batch: Batch) -> int:
    """Return the size of a batch's tensors."""
    from pipeline.device.batch_transfer import map_tensors

    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.nbytes), batch)
    return sum(sizes)


def _models(task: Task, model: nn.Module, seed: int) -> Iterator[str]:
    """Check that `model` depends only on torch's seed: every rank builds its own, and all must be equal."""
    import torch

    first, second = dict(model.named_parameters()), dict(_built(task, seed).named_parameters())
    if first.keys() != second.keys() or any(first[name].shape != second[name].shape for name in first):
        yield "model() returns other parameters each time it is called"
    elif odd := [name for name in first if not torch.equal(first[name], second[name])]:
        yield f"model() draws {odd[0]} from other random numbers than torch's: ranks would begin with different models"
    if isinstance(task, ParameterGroups):
        groups = list(task.parameter_groups(model))
        entries = [entry for group in groups for entry in (group["params"] if isinstance(group, dict) else [group])]
        known = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in known for entry in entries for parameter in _parameters(entry)):
            yield "parameter_groups() returns a parameter that is not the model's"


def _parameters(entry: Any) -> Iterable[Any]:
    """Return the parameters of an entry of a group: a tensor, or several."""
    import torch

    return entry if isinstance(entry, Iterable) and not isinstance(entry, torch.Tensor) else [entry]


def _try_step(task: Task, sizes: Mapping[str, int]) -> None:
    """Make a step on tensors without data: an error here would otherwise come on a GPU hours later."""
    from pipeline.memory.tracing.tracer import CPU as ON_CPU
    from pipeline.memory.tracing.tracer import CannotTrace, Tracer
    from pipeline.training.step.contrastive import make_step
    from pipeline.training.step.optimizers import StepSettings

    assert isinstance(task, Example)
    example = task.example

    def build(choice: MemoryChoice, watch: Recorder, model: nn.Module | None) -> Step:
        return make_step(task, StepSettings(precision=choice.precision), watch=watch, model=model)

    try:
        Tracer(build, task.model, example, dict(sizes), ON_CPU).micro(MemoryChoice(), dict(sizes))
    except CannotTrace:  # fake tensors do not work here
        make_step(task, StepSettings()).run([example(sizes)])


def _careless(task: Task, model: nn.Module, items: Sequence[Any]) -> Iterator[str]:
    """Check what reading ahead requires: `collate` draws only from the items, and `loss` does not change a batch."""
    from pipeline.device.accelerator import RngState
    from pipeline.device.batch_transfer import map_tensors
    from pipeline.training.step.optimizers import evaluated_terms

    before = RngState.capture(CPU)
    batch = _collated(task, items, np.random.default_rng(0))
    if RngState.capture(CPU) != before:
        yield (
            "collate() uses the global random numbers of torch, numpy or Python, which other threads use, too:"
            " use the rng that collate() receives, or item.rng"
        )
    versions: list[list[int]] = []
    for _ in range(2):
        versions.append([])
        map_tensors(lambda tensor: versions[-1].append(tensor._version), batch)  # noqa: SLF001 - no other name counts changes in place
        evaluated_terms(task, model, batch)
    if versions[0] != versions[1]:
        yield "loss() changes its batch in place, which may be kept for a second pass: change a copy"


def _with_data(task: Task, model: nn.Module, items: Sequence[Any]) -> Iterator[str]:
    """Check what micro-batches require: a batch's sums are those of its items, and `weights` agrees with `loss`."""
    import torch

    from pipeline.training.step.optimizers import evaluated_terms

    rng = np.random.default_rng(0)
    model.eval()
    whole = evaluated_terms(task, model, _collated(task, items, rng))
    parts = [evaluated_terms(task, model, _collated(task, [item], rng)) for item in items]
    with torch.no_grad():
        weights = task.weights(_collated(task, items, rng)) if isinstance(task, Weights) else None
    for name, (total, weight) in whole.items():
        summed = math.fsum(float(part[name][0]) for part in parts if name in part)
        weighed = math.fsum(float(part[name][1]) for part in parts if name in part)
        if not math.isfinite(float(total)):
            yield f"the sum of {name!r} over {len(items)} items is {float(total)}: nothing can be learned from it"
        elif not (isinstance(task, Contrastive) or math.isclose(summed, float(total), rel_tol=CLOSE, abs_tol=1e-6)):
            problem = f"the sum of {name!r} over {len(items)} items is {float(total):.6g}, and {summed:.6g} one by one"
            problem += ": micro-batches would train another model (a mean in place of a sum? a batch norm?"
            yield f"{problem} {IN_BATCH})"
        if not math.isclose(weighed, float(weight), rel_tol=CLOSE, abs_tol=1e-6):
            yield f"the weight of {name!r} over {len(items)} items is {float(weight):.6g}, and {weighed:.6g} one by one"
        if weights is not None and name not in weights:
            yield f"weights() does not name {name!r}, which loss() returns"
        elif weights is not None and not math.isclose(float(weights[name]), float(weight), rel_tol=CLOSE, abs_tol=1e-6):
            yield f"weights() says {float(weights[name]):.6g} of {name!r}, and loss() {float(weight):.6g}"
    if isinstance(task, Contrastive):
        yield from _embedded(task, model, items)
    if isinstance(task, Outputs):
        yield from _outputs(task, model, items)


def _collated(task: Task, items: Sequence[Any], rng: np.random.Generator) -> Batch:
    """Collate copies of items with fresh random generators."""
    return task.collate([replace(item) for item in items], rng)


def _embedded(task: Contrastive, model: nn.Module, items: Sequence[Any]) -> Iterator[str]:
    """Check that each item has the same row alone as in a batch."""
    import torch

    rng = np.random.default_rng(0)
    with torch.no_grad():
        whole = task.embed(model, _collated(cast("Task", task), items, rng))
        parts = [task.embed(model, _collated(cast("Task", task), [item], rng)) for item in items]
    for name, rows in whole.items():
        alone = torch.cat([part[name] for part in parts])
        if alone.shape != rows.shape:
            yield f"embed(): {name!r} has {len(rows)} rows for {len(items)} items, and {len(alone)} one by one"
        elif not torch.allclose(rows, alone, rtol=CLOSE, atol=CLOSE):
            yield f"embed(): {name!r} of an item is another in a batch than alone: it must not see other items"


def _outputs(task: Outputs, model: nn.Module, items: Sequence[Any]) -> Iterator[str]:
    """Check that predictions have an entry for each item."""
    import torch

    from pipeline.training.evaluating.outputs import returned_values

    with torch.no_grad():
        outputs = task.outputs(model, _collated(cast("Task", task), items, np.random.default_rng(0)))
    for name, entries in returned_values("outputs", outputs).items():
        if len(entries) != len(items):
            yield f"outputs(): {name!r} has {len(entries)} entries for {len(items)} items"
