"""Training on a card: steps a second against the seeds' settings, memory over 30 epochs, an OOM forced and survived.

    python benchmarks/training/gpu_train.py [--minutes M] [--out FILE]
    python benchmarks/training/gpu_train.py --dry        # the CPU stands in for the card: proves that the script runs

Made complexes of every size, the interface model, one plan for a card of 24 GB (a larger one is lent that share), and
the loop that `pipeline submit --stage train` runs:

- speed: as planned; then with the cache emptied after every micro-batch, under the allocator's settings of the five
  guides: expandable segments with max_split_size_mb, and max_split_size_mb alone. They take turns; ratios are of
  neighbours, without the first epoch.
- epochs: 30 of them, each in another order; what is reserved at the end of each and at most, beside the plan.
- oom: in the second epoch, torch may suddenly have only SHARE of what it has reserved. Every step and every complex
  must be trained nevertheless.

Each case is a process of its own. What is not begun after `--minutes` is left out, and told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.train_parts.ours import TASK, cache_of, items_of, prepared_of, table_of, work_of  # noqa: E402
from benchmarks.training.loader import ENCODER, generate  # noqa: E402

PLAYED = "24GiB"
LARGE_MODEL = {"embedding_dim": 1280}
LARGE: dict[str, Any] = {"complexes": 384, "batch": 64, "epochs": 30, "timed": 4, "rounds": 3, "options": LARGE_MODEL}
SMALL_MODEL = {"embedding_dim": 1280, "width": 8, "layers": 1, "pair_width": 4, "pair_layers": 0}
SMALL: dict[str, Any] = {"complexes": 12, "batch": 6, "epochs": 3, "timed": 2, "rounds": 1, "options": SMALL_MODEL}
SHARE = 0.6  # of what was reserved, that is left when memory is made to end
HOST_BYTES = 2 << 30  # of the process that stands in
GUIDES: dict[str, dict[str, Any]] = {
    "planned": {"allocator": None, "every": None},
    "expandable_and_max_split": {
        "allocator": "expandable_segments:True,max_split_size_mb:128",
        "every": 1,
    },
    "max_split": {"allocator": "max_split_size_mb:128", "every": 1},
}
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CASE_S, DRY_S = 150.0, 400.0
REACH = {"speed": "as fast as the seeds' settings at least", "epochs": "flat", "oom": "no step and no complex lost"}


# ---- one case, in a process of its own ----


def settings(case: Mapping[str, Any]) -> Any:
    """Return what a configuration would say."""
    from pipeline.config.schema_train import TrainSection, ValidationSection

    return TrainSection(
        task=TASK,
        options=case["options"],
        effective_batch=case["batch"],
        epochs=case["epochs"],
        split=None,
        validation=ValidationSection(split=None),
        empty_cache_every=case.get("every"),
        memory_fraction=case["fraction"],
    )


def facts(_: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card says of itself."""
    import torch

    if not torch.cuda.is_available():
        return {"error": "no CUDA card here"}
    return {
        "name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "total_bytes": torch.cuda.mem_get_info()[1],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def made(case: Mapping[str, Any]) -> dict[str, Any]:
    """Make the data set; return the key of its table."""
    return {"key": generate(Path(case["root"]), case["complexes"], case["complexes"]).hex()}


def planned(case: Mapping[str, Any]) -> dict[str, Any]:
    """Plan the training as it is done before a submission."""
    from dataclasses import replace

    from pipeline.memory.hardware.gpus import device
    from pipeline.memory.planning.memory_plan import CardSpec
    from pipeline.runs.model.training_work import host_card, request_of, sizes_of, target_of
    from tests.remembering_plan import plan_with_oracle

    train, on_card = settings(case), case["device"] == "cuda"
    work = replace(work_of(train), device=case["device"])
    sizes = sizes_of(work.task, table_of(Path(case["root"]), bytes.fromhex(case["key"])).sizes)
    card = CardSpec.of(device(PLAYED), 1) if on_card else host_card(HOST_BYTES)
    target = target_of(tuple(case["capability"])) if on_card else target_of(None)
    plan, _ = plan_with_oracle(work, train, sizes, [card], target, request_of(train, 1))
    prepared = prepared_of(plan, case["key"], case["epochs"], 1)
    return {"prepared": prepared, "micros": plan.micros, "remedies": list(plan.remedies)}


def job_of(case: Mapping[str, Any]) -> tuple[Any, int]:
    """Return a case's training, and the complexes of an epoch."""
    from dataclasses import replace

    from pipeline.memory.footprint import MemoryChoice
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
    work = replace(work_of(settings(case)), device=case["device"])
    choice = MemoryChoice(prepared.precision, prepared.checkpointing, prepared.offload)
    folder = ModelFolder(Path(case["folder"]))
    folder.path.mkdir(parents=True)
    job = Job(
        train=settings(case),
        prepared=prepared,
        folder=folder,
        make_step=lambda begin: work.begun(choice, device=case["device"], begin=begin),
        source=lambda one: CachedGraphs(stores.kind("graph"), one),
        embeddings=lambda: Embeddings(stores.kind("embed"), ENCODER),
        stretches=[(prepared.stretches[0], items_of(table, work, prepared))],
        validation=None,
        ranks=SingleRank(),
        tell=TaskContext(lambda *_: None),
        say=lambda line: print(line, file=sys.stderr),
        measure=work.task.cost,
    )
    return job, len(table)


def trained(case: Mapping[str, Any]) -> dict[str, Any]:
    """Train; return how fast, and what was reserved."""
    from pipeline.stages.train import train
    from pipeline.training.loop.metrics_log import read_epochs

    job, complexes = job_of(case)
    prepared = job.prepared
    steps = -(-complexes // case["batch"])
    marks: list[float] = []
    with memory(case["device"]) as card:
        for done in train(job):
            marks.append(time.perf_counter())  # the loss was read, so the card has done the step
            assert done is None, done
            if case.get("squeeze") and len(marks) == steps + 1:
                card.squeeze(SHARE)
        found = card.read()
    epochs = read_epochs(job.folder.path)
    seconds = marks[-1] - marks[steps - 1]
    return {
        **found,
        "steps": len(marks),
        "steps_wanted": steps * case["epochs"],
        "steps_per_s": (len(marks) - steps) / seconds if len(marks) > steps else None,
        "complexes": [one.items for one in epochs],
        "complexes_wanted": complexes,
        "reserved_bytes": [one.reserved_bytes for one in epochs],
        "peak_bytes": [one.peak_bytes for one in epochs],
        "allocated_bytes": [one.allocated_bytes for one in epochs],
        "ooms": sum(one.ooms for one in epochs),
        "skipped": sum(one.more["skipped_items"] or 0 for one in epochs),
        "micro_batches": [one.micro_batches for one in epochs],
        "wait_share": max(one.wait_share for one in epochs),
        "loss": [dict(one.loss) for one in (epochs[0], epochs[-1])],
        "planned_reserved_bytes": prepared.stretches[0].reserved_bytes,
        "planned_live_bytes": prepared.stretches[0].live_bytes,
        "limit_bytes": prepared.limit_bytes,
    }


class CardMemory:
    """The card's memory."""

    def squeeze(self, share: float) -> None:
        """Let torch have only so much of what it has reserved at most so far."""
        import torch

        most = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()  # what is cached needs no permission
        torch.cuda.set_per_process_memory_fraction(share * most / torch.cuda.mem_get_info()[1])

    def read(self) -> dict[str, Any]:
        """Return what the allocator has counted."""
        import torch

        stats = torch.cuda.memory_stats()
        return {"retries": stats.get("num_alloc_retries", 0), "refused": stats.get("num_ooms", 0)}


class StandIn:
    """The CPU's memory, of which some is refused."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def squeeze(self, share: float) -> None:
        """Let torch have so much of what it has taken at most so far."""
        self._device.limit_bytes = int(share * self._device.peak_bytes)

    def read(self) -> dict[str, Any]:
        """Return what was counted."""
        return {"retries": 0, "refused": self._device.refused}


@contextmanager
def memory(device: str) -> Iterator[CardMemory | StandIn]:
    """Yield what can be squeezed."""
    if device == "cuda":
        yield CardMemory()
        return
    from tests.limited.device import LimitedDevice

    with LimitedDevice() as limited:
        yield StandIn(limited)


KINDS = {"facts": facts, "made": made, "planned": planned, "trained": trained}


def child(case: Mapping[str, Any]) -> None:
    """Do a case, and say what came of it in one line."""
    try:
        said = KINDS[case["kind"]](case)
    except Exception as error:  # noqa: BLE001 - a failing case is a row
        import traceback

        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    print(json.dumps(said), flush=True)


# ---- all cases ----


class Bench:
    """What all cases have alike."""

    def __init__(self, scratch: Path, common: Mapping[str, Any], until: float) -> None:
        self.common: dict[str, Any] = dict(common)
        self._scratch, self._until, self._count = scratch, until, 0

    def ask(self, kind: str, *, allocator: str | None = None, **given: Any) -> dict[str, Any]:
        """Run a case in a new process; return what it said, or why it said nothing."""
        if time.monotonic() > self._until:
            return {"error": "left out: the time was over"}
        self._count += 1
        folder = self._scratch / f"model-{self._count}"
        case = {**self.common, "kind": kind, "folder": str(folder), **given}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTORCH_ALLOC_CONF", None)
        environment.pop(ALLOCATOR, None)
        environment |= {ALLOCATOR: allocator} if allocator else {}
        if kind in ("made", "planned"):
            environment["CUDA_VISIBLE_DEVICES"] = ""  # a trace must not touch the card
        command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(case)]
        limit_s = DRY_S if self.common["device"] == "cpu" else CASE_S
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {limit_s:.0f} s"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        lines = done.stdout.splitlines()
        if not lines:
            return {"error": f"its process ended with {done.returncode}: {done.stderr[-500:]}"}
        found: dict[str, Any] = json.loads(lines[-1])
        if "error" in found:
            print(done.stderr[-3000:], file=sys.stderr)
        return found


def measure(bench: Bench, size: Mapping[str, Any]) -> dict[str, Any]:
    """Run all cases."""
    bench.common |= bench.ask("made")
    plan = bench.ask("planned")
    if "error" in plan:
        return {"plan": plan}
    prepared: dict[str, Any] = plan.pop("prepared")
    bench.common["prepared"] = prepared
    own = prepared["allocator"] or None
    told("planned", plan)
    rounds = []
    for _ in range(size["rounds"]):
        rounds.append(
            {
                name: bench.ask("trained", epochs=size["timed"], allocator=one["allocator"] or own, every=one["every"])
                for name, one in GUIDES.items()
            }
        )
        for name, one in rounds[-1].items():
            told(name, one)
    epochs = bench.ask("trained", epochs=size["epochs"], allocator=own)
    told("epochs", epochs)
    oom = bench.ask("trained", epochs=max(3, size["timed"]), allocator=own, squeeze=True)
    told("oom", oom)
    return {
        "plan": {**plan, "allocator": own, "reserved_bytes": prepared["stretches"][0]["reserved_bytes"]},
        "speed": {"rounds": rounds, **speed(rounds)},
        "epochs": {**epochs, **flatness(epochs)},
        "oom": {**oom, "survived": survived(oom)},
    }


def told(name: str, found: Mapping[str, Any]) -> None:
    """Say that a case is over."""
    shown = {key: found[key] for key in ("error", "steps", "steps_per_s", "ooms", "micros") if key in found}
    print(f"{name}: {json.dumps(shown)}", file=sys.stderr, flush=True)


def speed(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return steps a second, and how many times those of each of the guides' settings ours are."""
    whole = [one for one in rounds if all("steps_per_s" in each for each in one.values())]
    if not whole:
        return {}
    pace = {name: statistics.median(one[name]["steps_per_s"] for one in whole) for name in GUIDES}
    ratio = {
        name: statistics.median(one["planned"]["steps_per_s"] / one[name]["steps_per_s"] for one in whole)
        for name in list(GUIDES)[1:]
    }
    return {"steps_per_s": pace, "ratio": ratio}


def flatness(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much more was reserved at the end than after a third, and at most beside the plan."""
    if "error" in found:
        return {}
    reserved = found["reserved_bytes"]
    return {
        "last_to_third": reserved[-1] / reserved[len(reserved) // 3],
        "most_to_planned": max(found["peak_bytes"]) / found["planned_reserved_bytes"],
    }


def survived(found: Mapping[str, Any]) -> bool:
    """Tell whether memory ended and nothing was lost."""
    return (
        "error" not in found
        and found["ooms"] > 0
        and found["skipped"] == 0
        and found["steps"] == found["steps_wanted"]
        and all(items == found["complexes_wanted"] for items in found["complexes"])
        and all(math.isfinite(value) for terms in found["loss"] for value in terms.values())
    )


def table(result: Mapping[str, Any]) -> str:
    """Return the figures for people."""
    lines = [f"{result['card'].get('name', 'the CPU in place of a card')}"]
    for name, pace in result["speed"].get("steps_per_s", {}).items():
        ratio = result["speed"]["ratio"].get(name)
        lines.append(f"{name:28}{pace:8.2f} steps/s" + (f"   ours is {ratio:.2f}x as fast" if ratio else ""))
    epochs = result["epochs"]
    if "last_to_third" in epochs:
        lines.append(
            f"{len(epochs['reserved_bytes'])} epochs: reserved at the end {epochs['reserved_bytes'][-1] >> 20:,} MiB,"
            f" {epochs['last_to_third']:.3f}x of that after a third; at most {max(epochs['peak_bytes']) >> 20:,} MiB,"
            f" {epochs['most_to_planned']:.3f}x of the plan; {epochs['ooms']} OOMs, {epochs['retries']} retries"
        )
    oom = result["oom"]
    if "error" not in oom:
        lines.append(
            f"memory cut to {SHARE:.0%}: {oom['ooms']} OOMs, {oom['steps']} of {oom['steps_wanted']} steps made,"
            f" {oom['skipped']:.0f} complexes lost; micro-batches an epoch {oom['micro_batches']}"
        )
    lines += [f"{part}: {result[part]['error']}" for part in ("plan", "epochs", "oom") if "error" in result[part]]
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no further case begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true", help="the CPU stands in for the card; nothing is measured")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(typed: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Look at the card, and measure."""
    size = SMALL if typed.dry else LARGE
    until = time.monotonic() + 60 * (60 if typed.dry else typed.minutes)
    common = {**size, "root": str(scratch / "cache"), "device": "cpu" if typed.dry else "cuda", "fraction": None}
    bench = Bench(scratch, common, until)
    card = {} if typed.dry else bench.ask("facts")
    if "error" in card:
        return {"card": card}
    if not typed.dry:
        from pipeline.memory.hardware.gpus import device

        bench.common["capability"] = card["capability"]
        bench.common["fraction"] = min(1.0, device(PLAYED).usable_bytes / card["total_bytes"])
    started = time.monotonic()
    card |= {"dry": typed.dry, "fraction": bench.common["fraction"]}
    result = {"card": card, "reach": REACH, "size": dict(size), **measure(bench, size)}
    card["took_s"] = round(time.monotonic() - started)
    return result


def main() -> int:
    """Measure, print, write; fail where nothing ran."""
    typed = options()
    if typed.child:
        child(typed.child)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="gpu-train-"))
    try:
        result = run(typed, scratch)
    finally:
        shutil.rmtree(scratch)
    text = json.dumps(result, indent=1)
    if "speed" not in result:
        print(text)
        print("nothing was measured (--dry lets the CPU stand in)", file=sys.stderr)
        return 2
    print(text)
    print(table(result))
    whole = bool(result["speed"].get("ratio")) and "last_to_third" in result["epochs"] and result["oom"]["survived"]
    if typed.dry:
        print("dry: the script runs; these figures are of the CPU in a card's place, and --out was not written")
    else:
        write(typed.out, result)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
