"""A model is run over items whatever memory there is and whenever it is ended: the same figures, nothing done twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.config.schema_train import TrainSection
from pipeline.errors import ConfigError
from pipeline.records import Reason, TaskContext
from pipeline.training.checkpoints.checkpoint import Application, CheckpointFolder, State, choose_checkpoint
from pipeline.training.checkpoints.keeper import model_key, model_state
from pipeline.training.checkpoints.trained_weights import load_checkpoint
from pipeline.training.evaluating.evaluator import ApplyJob, ApplyResult, apply_model
from pipeline.training.evaluating.outputs import GatheredOutputs
from pipeline.training.evaluating.results import _merged_over_tasks
from pipeline.training.items.item_table import ItemTable, table_digest
from pipeline.training.prepared import ModelFolder, PhasePlan, RowShare, cut_rows
from pipeline.training.ranks import Ranks
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.testkit.limited.device import LimitedDevice
from tests.training.checkpoints.saved import checkpoints
from tests.training.items.content import graph_of
from tests.training.loop.loops import Memory, prepared_of, table_of
from tests.training.ranks.crews import crew

ITEMS = 9


class Mute:
    """A number for each residue of the receptor; says nothing of its items."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(12, 1).double()

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": item["nodes"]}

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
        sides = [item.sides["receptor"] for item in items]
        return {
            "x": torch.cat([side.nodes["pos"].reshape(-1, 12).double() for side in sides]),
            "y": torch.cat([side.nodes["type"].double() for side in sides]),
            "sizes": [len(side.nodes["type"]) for side in sides],
        }

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
        error_N = model(batch["x"]).squeeze(-1) - batch["y"]
        return {
            "squares": (error_N.square().sum(), float(len(error_N))),
            "of.items": (torch.stack([one.mean() for one in error_N.split(batch["sizes"])]).sum(), len(batch["sizes"])),
        }


class Speaking(Mute):
    """Says a value of each residue, and their mean."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before

    def outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        self.before()
        values = list(model(batch["x"]).squeeze(-1).split(batch["sizes"]))
        return {"value": values, "mean": [one.mean() for one in values]}

    def metrics(self, outputs: Mapping[str, Any]) -> dict[str, float]:
        assert set(outputs) == {"value", "mean"}
        return {"largest": max(float(np.max(one)) for one in outputs["value"])}


def step_of(task: Any, device: str = "cpu") -> Step:
    return make_step(task, StepSettings(way="loop"), device=device)


def save(folder: Path, *figures: float | None) -> CheckpointFolder:
    """Save a checkpoint for each figure, of steps 1, 2 …, whose parameters are the step."""
    kept = checkpoints(folder, last=9, best=9, identity=identity())
    for number, figure in enumerate(figures, 1):
        model = Mute().model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        kept.save(State(weights_of(model), {}), number, metric=figure)
    return kept


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights under the names that they have in a checkpoint."""
    return {f"model.{name}": tensor for name, tensor in model_state(model).items()}


def identity() -> dict[str, Any]:
    return {"model": model_key(Mute().model()), "recipe": "made"}


def job(
    folder: Path,
    task: Any,
    *,
    budget: int = 90,
    ranks: Ranks | None = None,
    source: Any = Memory,
    ending: Callable[[], int] = lambda: 0,
    refused: list[tuple[str, Reason]] | None = None,
    said: list[str] | None = None,
    known: Sequence[int] = (),
    left_out: Mapping[str, tuple[Reason, str]] | None = None,
    **train: Any,
) -> ApplyJob:
    table = table_of(ITEMS)
    most = max(budget, int(table.sizes["nodes"].max()))
    plan = prepared_of([PhasePlan("all", 1, most, 0, most, most, {"nodes": 1.0})])
    made = ModelFolder(folder / "model")
    if not made.checkpoints.exists():
        save(made.checkpoints, 0.5)
    refused, said = [] if refused is None else refused, [] if said is None else said

    def selected(without: Any) -> Any:
        found = choose_checkpoint(made.checkpoints, "best", without)
        assert found is not None
        return found

    return ApplyJob(
        train=TrainSection.model_validate({"checkpoints": {"minutes": 1e-6}, **train}),
        applied=Application(
            plan, selected(()), None, table_digest(table), ITEMS, "", [(one, one + 1) for one in known]
        ),
        table=table,
        cost_N=plan.phases[0].cost({"nodes": table.sizes["nodes"]}),
        make_step=lambda: step_of(task),
        source=source,
        embeddings=lambda: None,
        choose=selected,
        parts=lambda _: folder / "parts",
        ranks=ranks or Ranks(),
        context=TaskContext(refuse=lambda key, reason, _: refused.append((key, reason)), ending=ending),
        say=said.append,
        left_out=left_out or {},
    )


def run(one: ApplyJob) -> tuple[list[Reason | None], ApplyResult | None]:
    """Apply a model; return what was yielded and what came of it."""
    yielded: list[Reason | None] = []
    applying = apply_model(one)
    while True:
        try:
            yielded.append(next(applying))
        except StopIteration as end:
            return yielded, end.value


def figures(applied: ApplyResult | None) -> dict[str, float]:
    assert applied is not None
    return applied.evaluation.results()


def wanted(number: int = 1) -> dict[str, float]:
    """Return the figures of the model whose parameters are a number, item by item, without any of our code."""
    squares, means, values = [], [], []
    for item in range(ITEMS):
        part = graph_of(item).parts[0]
        value_N = part.nodes["pos"].reshape(-1, 12).astype(np.float64).sum(1) * number + number
        error_N = value_N - part.nodes["type"]
        squares += (error_N**2).tolist()
        means.append(float(error_N.mean()))
        values.append(float(value_N.max()))
    terms = {"loss.squares": math.fsum(squares) / len(squares), "loss.of.items": math.fsum(means) / ITEMS}
    return {"loss": math.fsum(terms.values()), **terms, "largest": max(values)}


def test_figures_are_those_of_all_items_however_they_are_cut(tmp_path: Path) -> None:
    for budget in (1, 90, 10_000):
        yielded, applied = run(job(tmp_path / str(budget), Speaking(), budget=budget))
        assert yielded == [None] * ITEMS
        assert figures(applied) == pytest.approx(wanted(), rel=1e-12)


def test_metrics_that_are_no_numbers_are_refused_as_the_task_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, returned in enumerate((None, {"largest": "high"}, {"largest": torch.ones(2)})):
        monkeypatch.setattr(Speaking, "metrics", lambda *_, returned=returned: returned)
        with pytest.raises(ConfigError) as refused:
            figures(run(job(tmp_path / str(number), Speaking()))[1])
        assert refused.value.where == "train.task"


@pytest.mark.parametrize("task", [Mute, Speaking])
def test_one_that_was_ended_goes_on_with_the_rest_and_has_the_same_loss(tmp_path: Path, task: Any) -> None:
    asked = iter(range(3))
    ended = job(tmp_path, task(), budget=1, ending=lambda: 0 if next(asked, None) is not None else 15)
    yielded, applied = run(ended)
    assert applied is None
    assert ended.context.report.ended_by == 15
    assert ended.context.report.moved
    done = len(yielded)
    assert 0 < done < ITEMS
    later = job(tmp_path, task(), known=())
    yielded, applied = run(later)
    assert yielded == [None] * ITEMS  # those of an attempt before are told, and not done
    assert figures(applied)["loss"] == pytest.approx(wanted()["loss"], rel=1e-12)
    seen: list[str] = []
    begun = job(tmp_path, task(), known=range(ITEMS))
    begun = replace(begun, context=replace(begun.context, on=lambda names: seen.extend(names)))
    assert run(begun)[0] == []  # all was done before the run
    assert not seen


def test_items_of_another_checkpoint_are_not_taken_for_ours(tmp_path: Path) -> None:
    first = job(tmp_path, Speaking())
    run(first)
    save(tmp_path / "model" / "checkpoints", 0.1)
    with pytest.raises(Exception, match="these outputs belong to"):
        run(job(tmp_path, Speaking()))


def _rank(group: Any, folder: str) -> dict[str, Any]:
    yielded, applied = run(job(Path(folder), Speaking(), ranks=group))
    return {"yielded": len(yielded), "figures": figures(applied)}


@pytest.mark.nightly
def test_two_ranks_share_the_items_and_agree_on_the_figures_of_all(tmp_path: Path) -> None:
    save(tmp_path / "model" / "checkpoints", 0.5)
    results = crew(tmp_path / "crew", 2, _rank, str(tmp_path)).results()
    assert sum(one["yielded"] for one in results) == ITEMS
    assert min(one["yielded"] for one in results) > 0
    for one in results:
        assert one["figures"] == pytest.approx(wanted(), rel=1e-12)


class Refusing:
    """Has no graph for one item."""

    def __init__(self, table: ItemTable) -> None:
        self._memory = Memory(table)

    def read(self, numbers: Sequence[int]) -> Any:
        from pipeline.records import Rejection

        for found in self._memory.read(numbers):
            yield Rejection(found.id, Reason.NO_EDGES, "made so") if found.id == "item4" else found


def test_items_without_a_graph_and_those_that_killed_their_task_are_counted_with_reasons(tmp_path: Path) -> None:
    refused: list[tuple[str, Reason]] = []
    killers = {"item7": (Reason.KILLED_ITS_TASK, "it died twice")}
    yielded, applied = run(job(tmp_path, Speaking(), source=Refusing, refused=refused, left_out=killers))
    assert applied is not None
    assert applied.rejected == {"no_edges": 1, "killed_its_task": 1}
    assert applied.examples == {"no_edges": "item4: made so", "killed_its_task": "item7: it died twice"}
    assert sorted(refused) == [("item4", Reason.NO_EDGES), ("item7", Reason.KILLED_ITS_TASK)]
    assert len(yielded) == ITEMS
    assert len(GatheredOutputs(applied.parts, of=applied.of).numbers) == ITEMS - 2


class Hungry(Speaking):
    """Takes so many bytes for each residue of a batch at once, and more for one item."""

    PER_RESIDUE = 20 << 20  # never written to; beside them the loader's few megabytes count as well
    LARGE, MORE = "item3", 20

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
        more = self.MORE * any(item.id == self.LARGE for item in items)
        return super().collate(items, rng) | {"more": more}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
        torch.empty(self.PER_RESIDUE * (len(batch["x"]) + batch["more"]), dtype=torch.uint8)
        return super().loss(model, batch)


def limit_for(residues: int) -> int:
    return Hungry.PER_RESIDUE * residues + Hungry.PER_RESIDUE // 2


def receptors() -> list[int]:
    return [len(graph_of(item).parts[0].nodes["type"]) for item in range(ITEMS)]


def test_what_does_not_fit_is_halved_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    with LimitedDevice(limit_for(max(receptors()) + Hungry.MORE)) as device:
        yielded, applied = run(job(tmp_path, Hungry(), budget=10_000))
        found = figures(applied)
    assert device.refused > 0
    assert yielded == [None] * ITEMS
    assert found == pytest.approx(wanted(), rel=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["skip", "cpu"])
def test_an_item_that_fits_nowhere_is_left_out_with_a_record(tmp_path: Path, policy: str) -> None:
    refused: list[tuple[str, Reason]] = []
    with LimitedDevice(limit_for(max(receptors()))):
        yielded, applied = run(job(tmp_path, Hungry(), budget=10_000, refused=refused, too_large=policy))
    assert applied is not None
    assert applied.rejected == {"does_not_fit": 1}
    assert refused == [(Hungry.LARGE, Reason.DOES_NOT_FIT)]
    assert sorted(map(str, yielded)) == sorted([*["None"] * (ITEMS - 1), str(Reason.DOES_NOT_FIT)])


# Which checkpoint


def test_the_best_is_chosen_and_where_none_has_a_figure_the_last_which_is_said(tmp_path: Path) -> None:
    save(tmp_path / "a", 0.5, 0.1, 0.3)
    save(tmp_path / "b", None, None)
    best, last, fallen = (
        choose_checkpoint(tmp_path / "a", "best"),
        choose_checkpoint(tmp_path / "a", "last"),
        choose_checkpoint(tmp_path / "b", "best"),
    )
    assert best is not None
    assert last is not None
    assert fallen is not None
    assert (best.step, best.note, best.model) == (2, "", "made")
    assert last.step == 3
    assert (fallen.step, "using the last one" in fallen.note) == (2, True)
    assert choose_checkpoint(tmp_path / "nothing", "best") is None


def test_a_checkpoint_can_be_named_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 0.5, 0.1)
    by_name, by_path = (
        choose_checkpoint(tmp_path / "a", "step-00000001"),
        choose_checkpoint(tmp_path / "b", str(tmp_path / "a/step-00000001")),
    )
    assert by_name == by_path
    assert by_name is not None
    assert by_name.step == 1
    with pytest.raises(ConfigError, match="step-7"):
        choose_checkpoint(tmp_path / "a", "step-7")


@pytest.mark.parametrize("harm", ["removed", "damaged"])
def test_a_checkpoint_that_goes_while_it_is_read_is_passed_over_and_said_so(tmp_path: Path, harm: str) -> None:
    kept = save(tmp_path, 0.5, 0.1, 0.3)
    said: list[str] = []

    def selected(without: Any) -> Any:
        found = choose_checkpoint(tmp_path, "best", without)
        assert found is not None
        if not without:
            state = found.path / "state.safetensors"
            content = state.read_bytes()
            state.unlink()
            if harm == "removed":
                (found.path / "manifest.json").unlink()
            else:
                state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return found

    step = step_of(Mute())
    chosen = load_checkpoint(step, Ranks(), selected, said.append)
    assert kept.folder == tmp_path
    assert chosen.step == 3
    assert all(bool((one == 3).all()) for one in step.model.parameters())
    assert "step-00000002 is skipped" in said[0]


def test_moving_averages_are_what_is_used_where_there_are_any(tmp_path: Path) -> None:
    model = Mute().model()
    tensors = weights_of(model)
    tensors |= {f"ema.{name}": torch.full_like(one, 5.0) for name, one in model.named_parameters()}
    checkpoints(tmp_path, identity=identity()).save(State(tensors, {}), 1)
    step = step_of(Mute())
    load_checkpoint(step, Ranks(), lambda without: choose_checkpoint(tmp_path, "last", without), [].append)  # type: ignore[arg-type,return-value]
    assert all(bool((one == 5).all()) for one in step.model.parameters())


# Tasks that share the rows of a prediction


@given(st.data(), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))
def test_every_row_is_of_one_task_and_an_items_rows_stay_together(
    data: st.DataObject, items: int, step: int, tasks: int
) -> None:
    rows = items * step
    done = data.draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1))
    shares = cut_rows(np.array(sorted(done), np.int64), rows, step, tasks)
    assert [row for first, stop in shares for row in range(first, stop)] == list(range(rows))
    assert all(first % step == 0 for first, _ in shares)
    left = [sum(row not in done for row in range(first, stop)) for first, stop in shares]
    assert 1 <= len(shares) <= tasks
    assert max(left) <= (rows - len(done)) / len(shares) + 2 * step or len(shares) == 1


def finished(folder: Path, task: int, run: str = "run") -> ApplyResult | None:
    """Return what a task that has done its rows is to write."""
    said: list[str] = []
    job: Any = SimpleNamespace(share=RowShare(0, 1, task, 3, run), say=said.append)
    rejected, examples = {"parse_error": task}, {"parse_error": f"item {task}"}
    evaluation: Any = None
    chosen: Any = None
    return _merged_over_tasks(job, ApplyResult(evaluation, chosen, folder, "of", rejected, examples))


def test_the_last_of_the_tasks_writes_what_all_of_them_gave(tmp_path: Path) -> None:
    assert finished(tmp_path, 2) is None
    assert finished(tmp_path, 1) is None
    whole = finished(tmp_path, 0)
    assert whole is not None
    assert whole.rejected == {"parse_error": 3}
    assert whole.examples == {"parse_error": "item 0"}
