"""Trainings on the card, by the loop that a job runs: through a forced OOM, for 30 epochs, beside the predicted time.

Made complexes of every size, the interface model, one plan for a card of 24 GB (a larger one is lent that share).

- oom: in the second epoch, torch may suddenly have only SHARE of what was live at most. Every step and every complex
  must be trained nevertheless, and the weights be those of a training that nothing disturbed.
- epochs: 30 of them, each in another order; what is reserved at the end of each and at most, beside the plan.
- time: an epoch as planned for this very card, and the steps of the part `memory`: predicted and measured seconds.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.cards import described, opened, planned_for, target_for
from benchmarks.gpu_parts.day import Asking, Cases, Part, Row
from benchmarks.train_parts.ours import TASK, cache_of, items_of, prepared_of, table_of, work_of
from benchmarks.training.loader import ENCODER, generate
from pipeline.memory.footprint import MemoryChoice

PLAYED = "24GiB"
LARGE_MODEL = {"embedding_dim": 1280}
LARGE: dict[str, Any] = {"complexes": 384, "batch": 64, "epochs": 30, "timed": 4, "rounds": 3, "options": LARGE_MODEL}
SMALL_MODEL = {"embedding_dim": 1280, "width": 8, "layers": 1, "pair_width": 4, "pair_layers": 0}
SMALL: dict[str, Any] = {"complexes": 8, "batch": 4, "epochs": 30, "timed": 2, "rounds": 1, "options": SMALL_MODEL}
HOST_BYTES = 2 << 30  # of the process that stands in
SHARE = 0.6  # of what was live, that is left when memory is made to end
CASE_S, PLAN_S = 180.0, 400.0


# ---- one case, in a process of its own ----


def settings(case: Mapping[str, Any]) -> Any:
    """Return what a configuration would say."""
    from pipeline.config.schema_train import TrainSection, ValidationSection

    return TrainSection(
        task=TASK,
        options=case["options"],
        effective_batch=case["batch"],
        epochs=case["epochs"],
        optimizer=case.get("optimizer", "adamw"),
        precision=case.get("precision", "auto"),
        split=None,
        validation=ValidationSection(split=None),
        empty_cache_every=case.get("every"),
        memory_fraction=case["fraction"],
    )


def made(case: Mapping[str, Any]) -> dict[str, Any]:
    """Make the data set; return the key of its table."""
    return {"key": generate(Path(case["root"]), case["complexes"], case["complexes"]).hex()}


def planned(case: Mapping[str, Any]) -> dict[str, Any]:
    """Plan the training as it is done before a submission."""
    from pipeline.memory.hardware.gpus import device
    from pipeline.memory.planning.memory_plan import CardSpec
    from pipeline.runs.model.training_work import host_card, request_of, sizes_of
    from tests.testkit.remembering_plan import plan_with_oracle

    train = settings(case)
    work = replace(work_of(train), device=planned_for(case["device"]))
    sizes = sizes_of(work.task, table_of(Path(case["root"]), bytes.fromhex(case["key"])).sizes)
    here = described(case["about"]) if case["whole"] else device(PLAYED)
    card = CardSpec.of(here, 1) if case["about"]["capability"] else host_card(HOST_BYTES)
    plan, _ = plan_with_oracle(work, train, sizes, [card], target_for(case["about"]), request_of(train, 1))
    prepared = prepared_of(plan, case["key"], case["epochs"], 1)
    return {"prepared": prepared, "micros": plan.micros, "remedies": list(plan.remedies)}


def job_of(case: Mapping[str, Any], made_steps: list[Any]) -> tuple[Any, int]:
    """Return a case's training, and the complexes of an epoch; the step that it makes is added to a list."""
    from pipeline.records import TaskContext
    from pipeline.stages.train import Job
    from pipeline.training.items.item_source import CachedGraphs
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.prepared import ModelFolder, Prepared
    from pipeline.training.ranks.rank_protocol import SingleRank

    root = Path(case["root"])
    table, stores = table_of(root, bytes.fromhex(case["key"])), cache_of(root)
    prepared = Prepared.from_json(case["prepared"])
    prepared = replace(prepared, stretches=(replace(prepared.stretches[0], epochs=case["epochs"]),))
    work = replace(work_of(settings(case)), device=planned_for(case["device"]))
    choice = MemoryChoice(prepared.precision, prepared.checkpointing, prepared.offload)
    folder = ModelFolder(Path(case["folder"]))
    folder.path.mkdir(parents=True)

    def step(begin: Any) -> Any:
        made_steps.append(work.begun(choice, device=case["device"], begin=begin))
        return made_steps[-1]

    job = Job(
        train=settings(case),
        prepared=prepared,
        folder=folder,
        make_step=step,
        source=lambda one: CachedGraphs(stores.kind("graph"), one),
        embeddings=lambda: Embeddings(stores.kind("embed"), ENCODER),
        stretches=[(prepared.stretches[0], items_of(table, work, prepared))],
        validation=None,
        ranks=SingleRank(),
        tell=TaskContext(lambda *_: None),
        say=lambda line: print(line, file=sys.stderr),
        task=work.task,
    )
    return job, len(table)


def trained(case: Mapping[str, Any]) -> dict[str, Any]:
    """Train; return how fast, and what was reserved."""
    from safetensors.torch import save_file

    from pipeline.stages.train import train
    from pipeline.training.loop.metrics_log import read_epochs

    made_steps: list[Any] = []
    job, complexes = job_of(case, made_steps)
    steps = -(-complexes // case["batch"])
    marks: list[float] = []
    with opened(case["device"]) as card:
        for done in train(job):
            marks.append(time.perf_counter())  # the loss was read, so the card has done the step
            assert done is None, done
            if case.get("squeeze") and len(marks) == steps + 1:
                card.squeeze(SHARE)
        found = card.read()
        if "weights" in case:
            save_file({name: one.cpu() for name, one in made_steps[0].model.state_dict().items()}, case["weights"])
    epochs, prepared = read_epochs(job.folder.path), job.prepared
    seconds = marks[-1] - marks[steps - 1]
    return {
        "retries": found["retries"],
        "refused": found["refused"],
        "steps": len(marks),
        "steps_wanted": steps * case["epochs"],
        "steps_per_s": (len(marks) - steps) / seconds if len(marks) > steps else None,
        "complexes": [one.items for one in epochs],
        "complexes_wanted": complexes,
        "reserved_bytes": [one.reserved_bytes for one in epochs],
        "peak_bytes": [one.peak_bytes for one in epochs],
        "ooms": sum(one.ooms for one in epochs),
        "skipped": sum(one.more["skipped_items"] or 0 for one in epochs),
        "micro_batches": [one.micro_batches for one in epochs],
        "wait_share": max(one.wait_share for one in epochs),
        "loss": [dict(one.loss) for one in (epochs[0], epochs[-1])],
        "planned_reserved_bytes": prepared.stretches[0].reserved_bytes,
        "planned_step_s": prepared.step_s,
    }


def weights_apart(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return how far the weights of two trainings are apart: the norm of their difference, as a share of their own."""
    import torch
    from safetensors.torch import load_file

    first, second = (load_file(case[name]) for name in ("first", "second"))
    flat = [torch.cat([one[name].double().flatten() for name in sorted(first)]) for one in (first, second)]
    return {"apart": float((flat[0] - flat[1]).norm() / flat[0].norm()), "bitwise": bool(torch.equal(*flat))}


# ---- the parts ----


class Ground:
    """The data set and the plan of a training, made when they are first needed."""

    def __init__(self, asking: Asking, **changes: Any) -> None:
        about = asking.about
        self.size = {**(SMALL if asking.rehearsal else LARGE), **changes}
        lent = 1.0 if self.size.get("whole") else min(1.0, _played_bytes() / about["total_bytes"])
        fraction = lent if about["capability"] else None
        root = asking.day.scratch / "cache"
        self.common: dict[str, Any] = {"whole": False, **self.size, "root": str(root), "fraction": fraction}
        self._asking, self._count = asking, 0
        self.own = None

    def plan(self) -> Row:
        """Make the data set if nobody has, and plan; return what was planned, or an error."""
        known = self._asking.day.scratch / "key"
        if not known.exists():
            found = self._asking.ask("data", f"{__name__}:made", PLAN_S, on_card=False, keep=False, **self.common)
            if "error" in found:
                return found
            known.write_text(found["key"])
        self.common["key"] = known.read_text()
        plan = self._asking.ask("plan", f"{__name__}:planned", PLAN_S, on_card=False, keep=False, **self.common)
        if "error" not in plan:
            self.common["prepared"] = plan["prepared"]
            self.own = plan["prepared"]["allocator"] or None
        return plan

    def train(self, name: str, *, allocator: str | None = None, **given: Any) -> Row:
        """Train; return what was measured."""
        self._count += 1
        folder = self._asking.day.scratch / f"{self._asking.part.name}-{self._count}"
        asked = {**self.common, "folder": str(folder), **given}
        return self._asking.ask(name, f"{__name__}:trained", CASE_S, allocator=allocator or self.own or "", **asked)


def _played_bytes() -> int:
    from pipeline.memory.hardware.gpus import device

    return device(PLAYED).usable_bytes


def run_oom(asking: Asking) -> None:
    """Train twice alike, and let memory end in one of them."""
    names = ("undisturbed", "squeezed")
    if asking.known("weights") and all(map(asking.known, names)):
        return
    # By plain gradients in full precision: Adam would blow a difference in the last bit up to a whole step.
    ground = Ground(asking, precision="fp32", optimizer="sgd")
    if "error" in ground.plan():
        return
    files = {name: str(asking.day.scratch / f"{name}.safetensors") for name in names}
    for name in names:
        asking.cases.pop(name, None)  # their weights are gone
        ground.train(name, epochs=3, squeeze=name == "squeezed", weights=files[name])
    if all(map(asking.known, names)):
        asking.ask(
            "weights", f"{__name__}:weights_apart", CASE_S, on_card=False, first=files[names[0]], second=files[names[1]]
        )


def oom(cases: Cases) -> dict[str, Any]:
    """Tell whether memory ended and nothing was lost."""
    if "squeezed" not in cases:
        return {}
    found = cases["squeezed"]
    lost = found["steps_wanted"] - found["steps"] + found["skipped"]
    lost += sum(found["complexes_wanted"] - items for items in found["complexes"])
    finite = all(math.isfinite(value) for terms in found["loss"] for value in terms.values())
    forced = bool(found["ooms"])  # else nothing was survived
    return {"ooms": found["ooms"], "lost": lost if forced else None, "finite": finite, **cases.get("weights", {})}


def run_epochs(asking: Asking) -> None:
    """Train for 30 epochs."""
    ground = Ground(asking)
    if not asking.known("epochs") and "error" not in ground.plan():
        ground.train("epochs")


def flatness(cases: Cases) -> dict[str, Any]:
    """Return how much more was reserved at the end than after a third, and at most beside the plan."""
    if "epochs" not in cases:
        return {}
    found = cases["epochs"]
    reserved = found["reserved_bytes"]
    return {
        "epochs": len(reserved),
        "ooms": found["ooms"],
        "retries": found["retries"],
        "last_to_third": reserved[-1] / reserved[len(reserved) // 3],
        "most_to_planned": max(found["peak_bytes"]) / found["planned_reserved_bytes"],
    }


def run_time(asking: Asking) -> None:
    """Train an epoch as planned for this card, and take what the part `memory` has measured of steps."""
    ground = Ground(asking, whole=True)
    if not asking.known("epoch") and "error" not in ground.plan():
        ground.train("epoch", epochs=ground.size["timed"])
    models = asking.day.read("memory").get("figures", {}).get("models", {})
    steps = {label: one for label, one in models.items() if "step_s" in one}
    if not steps:
        asking.lacks.append("time: no steps were measured by the part memory: they are left out")
        return
    kept = ("predicted_s", "step_s", "probed_s")
    asking.cases["steps"] = {
        "steps": {label: {name: one[name] for name in kept if name in one} for label, one in steps.items()}
    }


def times(cases: Cases) -> dict[str, Any]:
    """Return predicted over measured seconds."""
    found: dict[str, Any] = {}
    if "epoch" in cases and cases["epoch"]["planned_step_s"]:
        found["epoch"] = cases["epoch"]["planned_step_s"] * cases["epoch"]["steps_per_s"]
    steps = cases.get("steps", {}).get("steps", {})
    if steps:
        found["first"] = {label: one["predicted_s"] / one["step_s"] for label, one in steps.items()}
        found["first_median"] = statistics.median(found["first"].values())
    after = {label: one["probed_s"] / one["step_s"] - 1 for label, one in steps.items() if "probed_s" in one}
    if after:
        found["probed"] = after
        found["worst_probed"] = max(map(abs, after.values()))
    return found


PARTS = (
    Part("oom", "memory made to end in a training", 0.05, run_oom, oom),
    Part("epochs", "30 epochs, each in another order", 0.1, run_epochs, flatness),
    Part("time", "predicted seconds beside measured ones", 0.05, run_time, times),
)
