"""The planner against a card: predicted memory beside what torch reserves, epochs under limits, allocator histories.

    python benchmarks/gpu_memory.py [--only compare,plan,history] [--members NAMES] [--out FILE] [--fixtures DIR]
    python benchmarks/gpu_memory.py --dry       # the CPU stands in for the card: proves that the script runs

- compare: for every model of tests/zoo, in fp32, bf16 and fp16, one step size on a card of 24, one of 40 and one of
  80 GB, played by `set_per_process_memory_fraction`: the zoo's sizes, with so many more items that they fill the
  share of SHARES. Predicted are reserved memory, cuBLAS's workspaces and the context; measured are
  `max_memory_reserved` and what else is in use. The largest of a model's sizes is then recorded as a profile is, and
  corrects the predictions of the others.
- plan: for every model and card, a data set is planned and an epoch of it is trained as planned.
- history: what torch's allocator was asked, as plain tapes (`--fixtures`), and what our simulator makes of each.

Each case runs in a process of its own; those of `compare` have the card to themselves. What is not begun after
`--minutes` is left out, and told.

Shapes: E events, S segments.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - the project is found only now

from benchmarks.circumstances import write  # noqa: E402
from pipeline.errors import ConfigError  # noqa: E402
from pipeline.memory.allocator import Allocator, SimulatedOutOfMemory  # noqa: E402
from pipeline.memory.devices import Device, device  # noqa: E402
from pipeline.memory.footprint import Choice, Tape  # noqa: E402
from pipeline.memory.margins import REPEATED, margin_of  # noqa: E402
from pipeline.memory.peaks import Peak, Peaks, sizes_text, torch_version  # noqa: E402
from pipeline.memory.request import Card  # noqa: E402
from pipeline.memory.reserving import SETTINGS, reserve  # noqa: E402
from pipeline.protocol import ITEMS  # noqa: E402

PARTS, PRECISIONS = ("compare", "plan", "history"), ("fp32", "bf16", "fp16")
SOLD = {"24 GB": "rtx-3090", "40 GB": "a100-40gb", "80 GB": "a100-80gb-sxm"}  # cards that are played
SHARES = (0.85, 0.25, 0.5)  # of them that the three sizes fill: 20, 9 and 39 GB
PLANNED = dict(zip(SOLD, PRECISIONS, strict=True))  # the precision of the plan for each
PLANNED_DRY = dict(zip(SOLD, ("fp32", "bf16", "bf16"), strict=True))  # a CPU takes minutes in fp16
FIRST, PROFILED = 0.08, 0.02  # to reach
STEPS, MICROS = 4, 2  # as a probe: the first makes the optimizer's state
BATCHES, CUTS, MOST_ITEMS = 2, 2.5, 8192  # steps of an epoch, micro-batches that a step needs about, items in it
HISTORIES = ("mlp", "gnn", "transformer_pre")
HISTORY_ITEMS, HISTORY_BATCH = 96, 8
FIXTURE_BYTES, MOST_EVENTS = 400_000, 1 << 20
SHRINK = 256  # cards are so many times smaller with --dry
SLOW = ("recurrent_depth", "equivariant")  # to trace; begun first
CPU_S, CARD_S, EPOCH_S = 480.0, 90.0, 30.0  # a process may take
DRY_S, LATE_S, LEAST_S = 240.0, 40.0, 10.0  # on the CPU; beyond the time that there is; whatever that is
MIB = 1 << 20


# ---- processes ----


class TimeOver(RuntimeError):
    """The benchmark's time was over before a case began."""


class Room:
    """The card's memory, which cases take in the order in which they come."""

    def __init__(self, total_bytes: int, until: float) -> None:
        self._free, self._total, self._until = total_bytes, total_bytes, until
        self._turns: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, wanted_bytes: int | None) -> Iterator[None]:
        """Have so much of it, or all."""
        size, turn = min(wanted_bytes or self._total, self._total), object()
        with self._changed:
            self._turns.append(turn)
            is_mine = self._changed.wait_for(
                lambda: self._turns[0] is turn and self._free >= size, self._until - time.monotonic()
            )
            self._turns.remove(turn)
            self._free -= size if is_mine else 0
            self._changed.notify_all()
        if not is_mine:
            raise TimeOver
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


@dataclass(frozen=True)
class Bench:
    """What all cases have alike."""

    card: Device
    gpu: str
    driver: str
    total_bytes: int
    dry: bool
    until: float
    room: Room
    context_bytes: int = 0  # that were in use when a process had only begun

    def ask(self, case: Mapping[str, Any], *, on_card: bool = False, room_bytes: int | None = None) -> dict[str, Any]:
        """Run a case in a new process; return what it said, or why it said nothing."""
        try:
            return self._asked(case, on_card=on_card, room_bytes=room_bytes)
        except TimeOver:
            return {"error": "left out: the time was over"}

    def _asked(self, case: Mapping[str, Any], *, on_card: bool, room_bytes: int | None) -> dict[str, Any]:
        if time.monotonic() > self.until:
            raise TimeOver
        with tempfile.TemporaryFile("w+") as log, Child(case, on_card and not self.dry, log) as child:
            said = child.line(min(CPU_S, max(1.0, self.until - time.monotonic())))
            if said == "ready":
                with self.room.taken(room_bytes):
                    child.go()
                    said = child.line(
                        DRY_S if self.dry else min(CARD_S, max(LEAST_S, self.until + LATE_S - time.monotonic()))
                    )
                    child.ended()  # then its context is gone, too
            if said:
                return dict(json.loads(said))
            log.seek(0)
            last = ([line for line in log.read().splitlines() if line.strip()] or [""])[-1]
            return {"error": f"{'it took too long' if child.late else 'its process ended'}: {last[-200:]}"}


class Child:
    """A process that reads a case, gets ready, waits to be told to go, and says what came of it."""

    def __init__(self, case: Mapping[str, Any], on_card: bool, log: Any) -> None:  # noqa: FBT001
        settings = str(case.get("allocator", ""))
        environment = {**os.environ, "OMP_NUM_THREADS": "2" if on_card else "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTORCH_ALLOC_CONF", None)
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}
        if not on_card:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # a trace must not touch the card
        command = [sys.executable, "-W", "ignore", __file__, "--child"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        self._case, self.late = case, False

    def __enter__(self) -> Child:
        self._write(json.dumps(self._case))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def line(self, limit_s: float) -> str:
        """Return the next line; empty: it ended, or was ended for being late."""
        timer = threading.Timer(limit_s, self._end)
        timer.start()
        try:
            assert self._process.stdout is not None
            return self._process.stdout.readline().strip()
        finally:
            timer.cancel()

    def go(self) -> None:
        """Let it begin."""
        self._write("go")

    def ended(self) -> None:
        """Wait until it is gone."""
        self._process.wait(CARD_S)

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: that is said when its line is read

    def _end(self) -> None:
        self.late = True
        self._process.kill()


def child() -> None:
    """Do what the first line says, and say what came of it in one line."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    case = json.loads(sys.stdin.readline())

    def ready() -> None:
        print("ready", file=told, flush=True)
        sys.stdin.readline()

    try:
        said = KINDS[case["kind"]](case, ready)
    except Exception as error:  # noqa: BLE001 - a failing member is a row
        said = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    print(json.dumps(said), file=told, flush=True)
    os._exit(0)  # the card is free sooner


# ---- what is predicted, without the card ----


def work_for(case: Mapping[str, Any]) -> Any:
    """Return a member of the zoo as it is trained on a card."""
    from tests.memory.planned import work_of
    from tests.zoo import ZOO

    return replace(work_of(ZOO[case["member"]]), device="cpu" if case["dry"] else "cuda")


def member_of(case: Mapping[str, Any]) -> Any:
    from tests.zoo import ZOO

    return ZOO[case["member"]]


def choice_of(case: Mapping[str, Any]) -> Choice:
    checkpointing = bool(member_of(case).settings.get("checkpointing"))
    return Choice(precision=case["precision"], checkpointing=checkpointing)


def target_for(case: Mapping[str, Any]) -> Any:
    """Return what is traced: the card's way, or with --dry that of the CPU which stands in for it."""
    from pipeline.runs.planning import target_of

    return target_of(None if case["dry"] else tuple(case["capability"]))


def predicted(case: Mapping[str, Any], _: Callable[[], None]) -> dict[str, Any]:
    """Predict a model's three sizes, each grown until it fills its share of its card."""
    from pipeline.runs.probe import model_name

    work, member, choice = work_for(case), member_of(case), choice_of(case)
    least = min(member.sizes, key=lambda sizes: sizes[ITEMS])
    oracle = work.oracle(least, target_for(case), padded=member.padded)
    model, rows = model_name(work, choice), []
    for sizes, (card, target_bytes) in zip(member.sizes, case["targets"], strict=False):
        start = time.perf_counter()
        try:
            row = grown(oracle, choice, sizes, target_bytes, padded=member.padded)
        except Exception as error:  # noqa: BLE001 - the other sizes may do
            row = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        rows.append({"card": card, "predicted_s": round(time.perf_counter() - start, 1), **row})
    return {"model": model, "choice": asdict(choice), "rows": rows}


def grown(oracle: Any, choice: Choice, sizes: Mapping[str, int], target_bytes: int, *, padded: bool) -> dict[str, Any]:
    """Return the prediction for so many times the items that about the target is reserved, not more."""
    standing = oracle.standing(choice)
    known: dict[int, dict[str, Any]] = {}

    def ask(times: int) -> int:
        larger = {name: size * (times if name == ITEMS or not padded else 1) for name, size in sizes.items()}
        micro = oracle.micro(choice, larger)
        held = reserve(standing, [[micro] * MICROS] * STEPS)
        live = max(live_of(standing, micro, first=first) for first in (True, False))
        known[times] = {
            "sizes": larger,
            "times": times,
            "origin": micro.origin.value,
            "reserve_bytes": held.bytes,
            "live_bytes": live,
            "allocator": held.settings,
            "notes": list(micro.notes),
        }
        return held.bytes

    low, low_bytes = 1, ask(1)
    high = max(2, min(16, target_bytes // max(1, low_bytes)))
    for _ in range(4 if low_bytes < target_bytes else 0):
        high_bytes = ask(high)
        slope = max(1.0, (high_bytes - low_bytes) / (high - low))
        guess = max(1, int(high + (0.98 * target_bytes - high_bytes) / slope))
        if 0.93 * target_bytes <= high_bytes <= target_bytes or guess in known:
            break
        low, low_bytes, high = high, high_bytes, guess
    fitting = [times for times, row in known.items() if row["reserve_bytes"] <= target_bytes]
    return known[max(fitting, default=1)]


def live_of(standing: Any, micro: Any, *, first: bool) -> int:
    """Return what is live at most in a step, the first or a later one."""
    from pipeline.memory.footprint import Step

    before = standing.setup.left_bytes if first else standing.bytes
    return Step.of(standing, [micro] * MICROS, first=first).peak_bytes(before)


def planned(case: Mapping[str, Any], _: Callable[[], None]) -> dict[str, Any]:
    """Plan a data set whose steps need several micro-batches on a card."""
    from pipeline.config.schema import Train
    from pipeline.runs.planning import Work, least_of, plan_training, request_of

    @dataclass(frozen=True)
    class Remembering(Work):
        """Asked twice, it answers from one trace."""

        made: list[Any] = field(default_factory=list)

        def oracle(self, least: Any, target: Any, *, padded: bool) -> Any:
            """Return the one oracle."""
            self.made or self.made.append(super().oracle(least, target, padded=padded))
            return self.made[0]

    given, member, choice, target = work_for(case), member_of(case), choice_of(case), target_for(case)
    work = Remembering(given.task, given.settings, given.device)
    card = Card.of(Device(**{**case["device"], "capability": tuple(case["capability"])}), 1)
    some = member.items(256, np.random.default_rng(0))
    oracle = work.oracle(least_of(some), target, padded=member.padded)
    batch = batch_for(oracle, choice, some, card.budget_bytes, padded=member.padded)
    sizes = member.items(BATCHES * batch, np.random.default_rng(0))
    train = Train(
        effective_batch=batch,
        batching="padded" if member.padded else "concatenated",
        precision=case["precision"],
        checkpointing=choice.checkpointing,
        offload=False,
        oversize="skip",
    )
    made, _oracle = plan_training(work, train, sizes, [card], target, request_of(train, 1))
    if made.oversize:
        return {"error": f"{len(made.oversize)} items are too large for this card: {made.oversize[0].remedy}"}
    return {
        "choice": asdict(made.choice),
        "cost": made.cost(sizes).tolist(),
        "budget": made.budget["cost"],
        "batch": batch,
        "items": BATCHES * batch,
        "micros": made.micros,
        "items_median": made.items_median,
        "allocator": made.allocator.settings,
        "origin": made.total.origin.value,
        "predicted_used": made.used,
        "filled": made.filled.value,
        "remedies": list(made.remedies),
        "every_order": made.every_order,
        "total_bytes": int(made.total.value),
        "limit_bytes": made.limit_bytes,
    }


def batch_for(oracle: Any, choice: Choice, items: Mapping[str, Any], budget_bytes: int, *, padded: bool) -> int:
    """Return the items of a step that needs several micro-batches."""
    mean = {name: max(1, int(values_N.mean())) for name, values_N in items.items()}

    def live(count: int) -> int:
        sizes = {ITEMS: count} | {name: size * (1 if padded else count) for name, size in mean.items()}
        return live_of(oracle.standing(choice), oracle.micro(choice, sizes), first=False)

    few, many = 4, 20
    each = max(1.0, (live(many) - live(few)) / (many - few))
    return int(np.clip(CUTS * budget_bytes / each, 16, MOST_ITEMS))


# ---- what is measured, on the card or its stand-in ----


class OnCard:
    """The card, of which torch may have a share."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        from pipeline.runs.gauges import CardGauge

        self._gauge = CardGauge()
        self._start = self._gauge.start(0)
        import torch

        self.limit_bytes = case["limit_bytes"] or case["usable_bytes"] - self._start.taken_bytes
        share = self.limit_bytes / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        if case.get("history"):
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_EVENTS)  # noqa: SLF001

    def __enter__(self) -> OnCard:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, work: Any, choice: Choice) -> Any:
        """Build a training step on it."""
        return work.step(choice, device="cuda")

    def wait(self) -> None:
        """Wait until it has done what it was told."""
        self._gauge.wait()

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        import torch

        self.wait()
        reading, stats = self._gauge.read(), torch.cuda.memory_stats()
        return {
            "reserved_bytes": reading.bytes,
            "allocated_bytes": reading.live_bytes,
            "outside_bytes": reading.outside_bytes,
            "taken_before_bytes": self._start.taken_bytes,
            "limit_bytes": self.limit_bytes,
            "retries": stats.get("num_alloc_retries", 0),
        }

    def history(self) -> list[dict[str, Any]]:
        """Return what its allocator was asked and did."""
        import torch

        snapshot: Any = torch.cuda.memory._snapshot()  # noqa: SLF001 - the one way to it
        return list(snapshot["device_traces"][torch.cuda.current_device()])


class StandIn:
    """The CPU, whose memory is given out by our simulator of the card's allocator."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        from tests.limited.device import LimitedDevice

        self.limit_bytes = case["limit_bytes"] or case["usable_bytes"]
        self._settings = settings_of(case["allocator"])
        self._allocator = Allocator(self._settings, self.limit_bytes, is_fraction=True)
        self._device = LimitedDevice(record=bool(case.get("history")), through=self._allocator)

    def __enter__(self) -> StandIn:
        gc.collect()
        self._device.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._device.__exit__(*raised)

    def step(self, work: Any, choice: Choice) -> Any:
        """Build a training step whose batches are copied to it."""
        from tests.limited.device import HostCarrier
        from tests.memory.planned import OnDevice

        given = {name: getattr(choice, name) for name in ("precision", "checkpointing", "offload")}
        step = OnDevice(work.task, replace(work.settings, **given))
        step.carrier = HostCarrier(self._device)
        return step

    def wait(self) -> None:
        """Return at once."""

    def read(self) -> dict[str, Any]:
        """Return what was taken of it."""
        return {
            "reserved_bytes": self._allocator.peak_reserved_bytes,
            "allocated_bytes": max(self._device.peak_bytes, self._allocator.peak_allocated_bytes),
            "outside_bytes": 0,
            "taken_before_bytes": 0,
            "limit_bytes": self.limit_bytes,
            "retries": self._allocator.retries,
        }

    def history(self) -> list[dict[str, Any]]:
        """Return what was recorded, in the words of torch's snapshots."""
        tape, entries = self._device.tape(), []
        again = Allocator(self._settings, self.limit_bytes, is_fraction=True)
        for number, size in zip(tape.block_E.tolist(), tape.bytes_E.tolist(), strict=True):
            before = again.reserved_bytes
            again.allocate(number, size) if size > 0 else again.release(number)
            grown_bytes = again.reserved_bytes - before
            if grown_bytes:
                action = "segment_alloc" if grown_bytes > 0 else "segment_free"
                entries.append({"action": action, "addr": 0, "size": abs(grown_bytes)})
            entries.append({"action": "alloc" if size > 0 else "free_completed", "addr": number, "size": abs(size)})
        return entries


def settings_of(text: str) -> Any:
    """Return the allocator's settings by their text."""
    return next(one.settings for one in SETTINGS if one.settings.text == text)


def opened(case: Mapping[str, Any]) -> Any:
    return StandIn(case) if case["dry"] else OnCard(case)


def card_facts(_: Mapping[str, Any], __: Callable[[], None]) -> dict[str, Any]:
    """Return what the card says of itself."""
    import torch

    from pipeline.runs.gauges import CardGauge

    if not torch.cuda.is_available():
        return {"error": "no CUDA card here"}
    start = CardGauge().start(0)
    return {
        "name": torch.cuda.get_device_name(),
        "gpu": start.gpu,
        "driver": start.driver,
        "capability": torch.cuda.get_device_capability(),
        "total_bytes": torch.cuda.mem_get_info()[1],
        "taken_bytes": start.taken_bytes,
    }


def compared(case: Mapping[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Run steps of one size, as a probe does, and measure them."""
    import torch

    torch.manual_seed(0)
    work, choice = work_for(case), Choice(**case["choice"])
    batch = work.example(case["sizes"])
    ready()
    began, died = time.perf_counter(), ""
    with opened(case) as card:
        try:
            step = card.step(work, choice)
            for _ in range(STEPS):
                start = time.perf_counter()
                step.run([batch] * MICROS)
                card.wait()
        except torch.OutOfMemoryError as error:
            died = str(error).partition("\n")[0]
        found = card.read()
        step = None
    last_s = time.perf_counter() - start
    return {**found, "step_s": round(last_s, 3), "wall_s": round(time.perf_counter() - began, 2), "died": died}


class Epoch(Sequence[Any]):
    """The batches of a step, each made when its turn comes."""

    def __init__(self, member: Any, task: Any, sizes: Mapping[str, Any], micros: Sequence[Any]) -> None:
        self._member, self._task, self._sizes, self._micros = member, task, sizes, micros

    def __len__(self) -> int:
        return len(self._micros)

    def __getitem__(self, place: Any) -> Any:
        items = [{name: int(values[item]) for name, values in self._sizes.items()} for item in self._micros[place]]
        return self._task.collate(items, np.random.default_rng(place))


def trained(case: Mapping[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Train an epoch as planned; count the steps that ran out of memory."""
    import torch

    from pipeline.training.prepared import COST, LIKENESS, likeness, sampling
    from pipeline.training.sampler import Sampler

    torch.manual_seed(0)
    work, member = work_for(case), member_of(case)
    sizes = member.items(case["items"], np.random.default_rng(0))
    settings = sampling(case["batch"], case["budget"], padded=member.padded)
    costs = {COST: np.array(case["cost"], np.int64), LIKENESS: likeness(sizes)}
    sampler = Sampler(costs, settings)
    steps = [[micro.items for micro in sampler.micros(0, step)] for step in range(sampler.steps)]
    ready()
    began, ooms, done = time.perf_counter(), 0, 0
    with opened(case) as card:
        step = card.step(work, Choice(**case["choice"]))
        for cuts in steps:
            if time.perf_counter() - began > EPOCH_S:
                break
            ooms += not survived(step, Epoch(member, step.task, sizes, cuts))
            done += 1
        found = card.read()
        step = None
    found.pop("outside_bytes")  # other cases are on the card meanwhile
    micros = sum(len(cuts) for cuts in steps[:done])
    wall_s = round(time.perf_counter() - began, 2)
    return {**found, "ooms": ooms, "steps": done, "steps_planned": len(steps), "micros": micros, "wall_s": wall_s}


def survived(step: Any, batches: Sequence[Any]) -> bool:
    """Make a step; tell whether it had enough memory."""
    import torch

    try:
        step.run(batches)
    except torch.OutOfMemoryError:
        is_done = False
    else:
        return True
    step.release()  # here, where no traceback holds tensors any more
    return is_done


def recorded(case: Mapping[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Train on batches of many sizes, and write down what the allocator was asked."""
    import torch

    torch.manual_seed(0)
    work, member = work_for(case), member_of(case)
    sizes = member.items(HISTORY_ITEMS, np.random.default_rng(0))
    cuts = np.arange(HISTORY_ITEMS).reshape(-1, 2, HISTORY_BATCH // 2)  # two micro-batches a step
    ready()
    with opened(case) as card:
        step = card.step(work, choice_of(case))
        ooms = sum(not survived(step, Epoch(member, step.task, sizes, list(micros))) for micros in cuts)
        found, entries = card.read(), card.history()
        step = None
    tape = History.of(entries)
    about = {**{name: case[name] for name in ("member", "precision", "allocator")}, **case["about"], **found}
    path = Path(case["path"])
    kept = tape.written(path, about)
    return {**found, "ooms": ooms, "events": len(tape.tape.bytes_E), **kept.judged(case["allocator"], about)}


@dataclass(frozen=True, eq=False)
class History:
    """What an allocator was asked, as a tape of requested sizes, and what it asked of the driver meanwhile."""

    tape: Tape
    before_S: Any  # how many events of the tape were over
    bytes_S: Any  # above 0: taken of the driver; below: given back
    refused_E: Any  # events of the tape before which a request was refused

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]]) -> History:
        """Reduce the entries of a snapshot's trace; blocks from before the recording are passed over."""
        live: dict[int, tuple[int, int]] = {}
        events: list[tuple[int, int]] = []
        segments: list[tuple[int, int]] = []
        refused: list[int] = []
        made = 0
        for entry in entries:
            action, size = entry["action"], int(entry["size"])
            if action == "alloc":
                live[entry["addr"]] = made, size
                events.append((made, size))
                made += 1
            elif action == "free_completed" and entry["addr"] in live:
                number, size = live.pop(entry["addr"])
                events.append((number, -size))
            elif action in ("segment_alloc", "segment_map"):
                segments.append((len(events), size))
            elif action in ("segment_free", "segment_unmap"):
                segments.append((len(events), -size))
            elif action == "oom":
                refused.append(len(events))
        block_E, bytes_E = np.array(events, np.int64).reshape(-1, 2).T
        before_S, bytes_S = np.array(segments, np.int64).reshape(-1, 2).T
        return cls(Tape(block_E, bytes_E), before_S, bytes_S, np.array(refused, np.int64))

    def first(self, events: int) -> History:
        """Return the beginning of it."""
        keep_S, keep_E = self.before_S < events, self.refused_E < events
        tape = Tape(self.tape.block_E[:events], self.tape.bytes_E[:events])
        return History(tape, self.before_S[keep_S], self.bytes_S[keep_S], self.refused_E[keep_E])

    def written(self, path: Path, about: Mapping[str, Any]) -> History:
        """Write as much of it as a small file holds, and return that."""
        kept = self
        while True:
            arrays = {"block_E": kept.tape.block_E, "bytes_E": kept.tape.bytes_E, "before_S": kept.before_S}
            arrays |= {"bytes_S": kept.bytes_S, "refused_E": kept.refused_E, "about": np.array(json.dumps(about))}
            np.savez_compressed(path, **arrays)
            if path.stat().st_size <= FIXTURE_BYTES:
                return kept
            kept = kept.first(len(kept.tape.bytes_E) * 2 // 3)

    def judged(self, allocator: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """Play it to our simulator; return what both reserved, and from which event on they differ."""
        simulator = Allocator(settings_of(allocator), about["limit_bytes"], is_fraction=True)
        ends_E = np.searchsorted(self.before_S, np.arange(len(self.tape.bytes_E)), side="right")
        real_E = np.concatenate(([0], np.cumsum(self.bytes_S)))[ends_E]
        differs, failed = -1, ""
        events = zip(self.tape.block_E.tolist(), self.tape.bytes_E.tolist(), real_E.tolist(), strict=True)
        for place, (number, size, real) in enumerate(events):
            try:
                simulator.allocate(number, size) if size > 0 else simulator.release(number)
            except SimulatedOutOfMemory as error:
                failed = str(error)
                break
            if differs < 0 and simulator.reserved_bytes != real:
                differs = place
        return {
            "kept_events": len(self.tape.bytes_E),
            "history_reserved_bytes": int(real_E.max(initial=0)),
            "simulated_reserved_bytes": simulator.peak_reserved_bytes,
            "differs_from_event": differs,
            "refused": len(self.refused_E),
            "simulated_failure": failed,
        }


KINDS: dict[str, Callable[[Mapping[str, Any], Callable[[], None]], dict[str, Any]]] = {
    "card": card_facts,
    "predict": predicted,
    "plan": planned,
    "compare": compared,
    "train": trained,
    "history": recorded,
}


# ---- the benchmark ----


def played(bench: Bench) -> dict[str, Device]:
    """Return the cards that this one can play."""
    card, found = bench.card, {}
    for name, sold in SOLD.items():
        like = device(sold)
        if bench.dry:
            usable, reserved = like.usable_bytes // SHRINK + card.workspace_bytes, 0
            found[name] = replace(card, name=name, usable_bytes=usable, reserve_bytes=reserved, context_bytes=0)
        elif like.usable_bytes <= bench.total_bytes:
            found[name] = replace(card, name=name, usable_bytes=like.usable_bytes, reserve_bytes=like.reserve_bytes)
    return found


def common(bench: Bench, member: str, precision: str) -> dict[str, Any]:
    """Return what every case says."""
    capability = list(bench.card.capability)
    return {"member": member, "precision": precision, "dry": bench.dry, "capability": capability, "limit_bytes": 0}


def compare_cases(bench: Bench, member: str, precision: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Predict the sizes of a model, then yield what measures each."""
    cards, case = played(bench), common(bench, member, precision)
    targets = [(name, int(share * Card.of(card, 1).budget_bytes)) for share, (name, card) in _shared(cards)]
    told = bench.ask({**case, "kind": "predict", "targets": targets})
    failed = [{"card": "", "error": told["error"]}] if "error" in told else []
    for one in told.get("rows", failed):
        row = {"part": "compare", "member": member, "precision": precision, "model": told.get("model", ""), **one}
        yield lambda row=row: _compared(bench, cards, case, told, row)


def _shared(cards: Mapping[str, Device]) -> Iterator[tuple[float, tuple[str, Device]]]:
    return zip(SHARES, (list(cards.items()) * len(SHARES))[: len(SHARES)], strict=True)


def _compared(
    bench: Bench, cards: Mapping[str, Device], case: Mapping[str, Any], told: Mapping[str, Any], row: dict[str, Any]
) -> dict[str, Any]:
    if "error" in row:
        return row
    card = cards[row["card"]]
    workspace = 0 if bench.dry else card.workspace_bytes
    usable = card.usable_bytes - (card.workspace_bytes if bench.dry else 0)
    more = {"kind": "compare", "choice": told["choice"], "sizes": row["sizes"], "allocator": row["allocator"]}
    found = bench.ask({**case, **more, "usable_bytes": usable}, on_card=True)
    row |= {"workspace_bytes": workspace, "context_bytes": card.context_bytes}
    row["predicted_bytes"] = row["reserve_bytes"] + workspace + card.context_bytes
    if "error" in found:
        return row | found
    row |= found
    row["measured_bytes"] = row["reserved_bytes"] + row["outside_bytes"]
    row["first"] = round(row["predicted_bytes"] / row["measured_bytes"] - 1, 4)
    row["live"] = round((row["live_bytes"] + workspace) / max(1, row["allocated_bytes"]) - 1, 4)
    if row["died"]:
        row["error"] = f"out of memory: {row['died']}"
    return row


def plan_cases(bench: Bench, member: str, card: Device) -> Iterator[Callable[[], dict[str, Any]]]:
    """Plan for a card, then yield what trains as planned."""
    case = common(bench, member, (PLANNED_DRY if bench.dry else PLANNED)[card.name])
    row = {"part": "plan", "member": member, "card": card.name, "precision": case["precision"]}
    start = time.perf_counter()
    told = bench.ask({**case, "kind": "plan", "device": asdict(card)})
    row |= {name: value for name, value in told.items() if name != "cost"}
    row["planned_s"] = round(time.perf_counter() - start, 1)
    limit = card.usable_bytes - (card.workspace_bytes if bench.dry else bench.context_bytes)

    def run() -> dict[str, Any]:
        if "error" in told:
            return row
        asked = {**case, **told, "kind": "train", "limit_bytes": limit}
        found = bench.ask(asked, on_card=True, room_bytes=card.usable_bytes)
        if "error" in found:
            return row | found
        return row | found | {"used": round(found["reserved_bytes"] / found["limit_bytes"], 4)}

    yield run


def history_cases(bench: Bench, member: str, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield what records a model under both settings, and one whose limit makes torch give its cache back."""
    case = common(bench, member, "fp32")
    about = {"gpu": bench.gpu, "driver": bench.driver, "torch": torch_version(), "dry": bench.dry}

    def run(text: str, limit_bytes: int = 0) -> dict[str, Any]:
        name = f"{member}_{'expandable' if text else 'default'}{'_tight' if limit_bytes else ''}.npz"
        asked = {**case, "kind": "history", "history": True, "allocator": text, "about": about}
        asked |= {"path": str(folder / name), "limit_bytes": limit_bytes, "usable_bytes": bench.total_bytes}
        found = bench.ask(asked, on_card=True)
        return {"part": "history", "member": member, "file": name, **found}

    def tight() -> dict[str, Any]:
        free = run("")
        if "error" in free:
            return free
        between = (free["allocated_bytes"] + free["reserved_bytes"]) // 2
        return run("", between)

    if member == HISTORIES[-1]:
        yield tight
    for one in SETTINGS:
        yield lambda text=one.settings.text: run(text)


def judge_compare(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Correct each model's predictions by its largest size, recorded as a profile; return the figures in short."""
    measured = [row for row in rows if "measured_bytes" in row and not row["died"]]
    with tempfile.TemporaryDirectory() as folder:
        peaks = Peaks(Path(folder))
        for key in dict.fromkeys((row["member"], row["precision"]) for row in measured):
            group = [row for row in measured if (row["member"], row["precision"]) == key]
            _corrected(bench, peaks, group)
    surest = [row for row in measured if row["origin"] == "traced"]
    profiled = [row for row in measured if "profiled" in row]
    return {
        "reach": f"total within {FIRST:.0%} at first contact, {PROFILED:.0%} after one profile",
        "cases": len(rows),
        "measured": len(measured),
        "died": [_name(row) for row in rows if row.get("died")],
        "failed": [[_name(row), row["error"]] for row in rows if "error" in row and not row.get("died")],
        "worst_first": max((abs(row["first"]) for row in surest), default=None),
        "most_below_first": min((row["first"] for row in surest), default=None),
        "missed_first": [[_name(row), row["first"]] for row in surest if abs(row["first"]) > FIRST],
        "not_traced": [[_name(row), row["origin"], row["first"]] for row in measured if row["origin"] != "traced"],
        "worst_profiled": max((abs(row["profiled"]) for row in profiled), default=None),
        "missed_profiled": [[_name(row), row["profiled"]] for row in profiled if abs(row["profiled"]) > PROFILED],
    }


def _corrected(bench: Bench, peaks: Peaks, group: Sequence[dict[str, Any]]) -> None:
    profile = max(group, key=lambda row: row["measured_bytes"])
    for row in group:
        row["is_profile"] = row is profile
    asked_bytes = profile["reserve_bytes"] + profile["workspace_bytes"]  # what `max_memory_reserved` is of
    peak = Peak(
        model=profile["model"],
        card=profile["card"],
        gpu=bench.gpu,
        torch=torch_version(),
        driver=bench.driver,
        allocator=profile["allocator"],
        sizes=f"{MICROS} x {sizes_text(profile['sizes'])}",
        predicted_bytes=asked_bytes,
        measured_bytes=profile["reserved_bytes"],
        died=False,
        outside_bytes=profile["outside_bytes"],
        predicted_s=0.0,
        step_s=profile["step_s"],
        at=time.time(),
    )
    peaks.record("benchmark", f"{profile['member']}-{profile['precision']}", [peak])
    ratios = peaks.ratios(profile["model"], bench.gpu)
    factor = margin_of(_origin(profile), ratios).factor / (1 + REPEATED)  # as plans are corrected, without their margin
    for row in group:
        if row is not profile:
            corrected = factor * (row["reserve_bytes"] + row["workspace_bytes"]) + profile["outside_bytes"]
            row["profiled"] = round(corrected / row["measured_bytes"] - 1, 4)


def _origin(row: Mapping[str, Any]) -> Any:
    from pipeline.memory.footprint import Origin

    return Origin(row["origin"])


def _name(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("member", "precision", "card") if row.get(key))


def judge_plan(_: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the trained epochs in short."""
    done = [row for row in rows if "used" in row]
    return {
        "reach": "no OOM",
        "cases": len(rows),
        "trained": len(done),
        "ooms": sum(row["ooms"] for row in done),
        "with_ooms": [_name(row) for row in done if row["ooms"]],
        "with_retries": [[_name(row), row["retries"]] for row in done if row["retries"]],
        "not_whole": [_name(row) for row in done if row["steps"] < row["steps_planned"]],
        "used_least": min((row["used"] for row in done), default=None),
        "used_median": float(np.median([row["used"] for row in done])) if done else None,
        "failed": [[_name(row), row["error"]] for row in rows if "error" in row],
    }


def judge_history(_: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return in short how our simulator did on what was recorded."""
    done = [row for row in rows if "events" in row]
    ratio = [row["simulated_reserved_bytes"] / max(1, row["history_reserved_bytes"]) - 1 for row in done]
    return {
        "files": [row["file"] for row in done],
        "worst": max(map(abs, ratio), default=None),
        "equal_throughout": sum(row["differs_from_event"] < 0 for row in done),
        "failed": [[row["file"], row["error"]] for row in rows if "error" in row],
    }


JUDGES = {"compare": judge_compare, "plan": judge_plan, "history": judge_history}


def told_of(row: Mapping[str, Any]) -> str:
    """Return a row as a line."""
    name = f"{row['part']:8}{row['member']:25}{row.get('precision', ''):6}{row.get('card', ''):7}"
    if "error" in row:
        return f"{name}{row['error']}"
    if row["part"] == "compare":
        sizes = f"predicted {row['predicted_bytes'] / MIB:9,.0f}  measured {row['measured_bytes'] / MIB:9,.0f} MiB"
        return f"{name}{sizes}  {row['first']:+7.2%}  live {row['live']:+7.2%}  {row['origin']}, {row['wall_s']} s"
    if row["part"] == "plan":
        done = f"{row['steps']}/{row['steps_planned']} steps, {row['micros']} micro-batches"
        used = f"used {row['used']:6.1%} (predicted {row['predicted_used']:6.1%})"
        return f"{name}{row['ooms']} OOMs  {used}  {row['retries']} retries  {done}, {row['wall_s']} s; {row['filled']}"
    both = (
        f"{row['history_reserved_bytes'] / MIB:,.0f} reserved, {row['simulated_reserved_bytes'] / MIB:,.0f} simulated"
    )
    return f"{name}{row['file']}: {row['kept_events']:,} of {row['events']:,} events; MiB: {both}"


def profiled_table(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print what one profile makes of the other sizes."""
    print(f"\n{'member':25}{'precision':10}{'card':7}{'first':>9}{'profiled':>10}")
    for row in rows:
        if "first" in row:
            after = f"{row['profiled']:+.2%}" if "profiled" in row else "profile" if row.get("is_profile") else ""
            print(f"{row['member']:25}{row['precision']:10}{row['card']:7}{row['first']:>+9.2%}{after:>10}")


def work_list(bench: Bench, typed: argparse.Namespace) -> Iterator[Iterator[Callable[[], dict[str, Any]]]]:
    """Yield what predicts, the slowest first; each yields what measures."""
    members = sorted(typed.members, key=lambda name: name not in SLOW)
    if "history" in typed.only:
        typed.fixtures.mkdir(parents=True, exist_ok=True)
        yield from (history_cases(bench, name, typed.fixtures) for name in HISTORIES if name in members)
    for names in ([one for one in members if one in SLOW], [one for one in members if one not in SLOW]):
        if "compare" in typed.only:
            yield from (compare_cases(bench, name, kind) for kind in typed.precisions for name in names)
        if "plan" in typed.only:
            yield from (plan_cases(bench, name, card) for card in played(bench).values() for name in names)


def run_all(bench: Bench, typed: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Predict on many cores, measure as predictions come, and keep every row at once."""
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        thinkers = stack.enter_context(ThreadPoolExecutor(max(1, cores - 4)))
        runners = stack.enter_context(ThreadPoolExecutor(max(1, min(6, cores // 2))))
        thoughts = [thinkers.submit(list, cases) for cases in work_list(bench, typed)]
        runs: list[Future[dict[str, Any]]] = []
        taken = threading.Lock()

        def done(future: Future[dict[str, Any]]) -> None:
            with taken:
                rows.append(future.result())
                print(f"{time.monotonic() - typed.began:5.0f} s  {told_of(rows[-1])}", flush=True)
                keep(rows)

        for thought in as_completed(thoughts):
            for run in thought.result():
                runs.append(runners.submit(run))
                runs[-1].add_done_callback(done)


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--members", default="", help="models of the zoo, with commas between; all unless told")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further case begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fixtures", type=Path, help="folder for allocator histories; without it none is recorded")
    parser.add_argument("--dry", action="store_true", help="the CPU stands in for the card; nothing is measured")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    typed = parser.parse_args()
    typed.began, typed.only, typed.precisions = time.monotonic(), typed.only.split(","), typed.precisions.split(",")
    if unknown := (set(typed.only) - set(PARTS)) | (set(typed.precisions) - set(PRECISIONS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if typed.fixtures is None and "history" in typed.only:
        typed.only.remove("history")
    return typed


def bench_of(typed: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """Look at the card, or take an H200 for one that the CPU stands in for."""
    until = typed.began + 60 * typed.minutes
    if typed.dry:
        card = device("h200-141gb-sxm")
        total = card.usable_bytes // SHRINK
        return Bench(card, "cpu", "", total, dry=True, until=until, room=Room(total, until)), {
            "card": "the CPU in its place"
        }
    nobody = Bench(device("24GiB"), "", "", 0, dry=False, until=until, room=Room(1, until))
    facts = nobody.ask({"kind": "card"}, on_card=True)
    if "error" in facts:
        return nobody, facts
    try:
        card = device(facts["name"])
    except ConfigError:
        card = device(f"{facts['total_bytes'] >> 20}MiB")
    card = replace(card, capability=tuple(facts["capability"]))
    total = facts["total_bytes"] - 2 * facts["taken_bytes"]
    about = {"card": facts["name"], "driver": facts["driver"], "context_bytes": facts["taken_bytes"]}
    room, whole = Room(total, until), facts["total_bytes"]
    return Bench(card, facts["gpu"], facts["driver"], whole, False, until, room, facts["taken_bytes"]), about  # noqa: FBT003


def main() -> int:
    """Measure, print as it goes, write all figures; fail where nothing ran on a card."""
    typed = options()
    warnings.simplefilter("ignore")
    if typed.child:
        child()
    from tests.zoo import ZOO

    typed.members = typed.members.split(",") if typed.members else list(ZOO)
    if unknown := set(typed.members) - set(ZOO):
        print(f"the zoo has no {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    bench, about = bench_of(typed)
    if "error" in about:
        print(f"{about['error']}: nothing was measured (--dry lets the CPU stand in)", file=sys.stderr)
        return 2
    about |= {"torch": torch_version(), "dry": typed.dry}
    result: dict[str, Any] = {"card": about}

    def keep(rows: list[dict[str, Any]]) -> None:
        for part in typed.only:
            result[part] = {"rows": [row for row in rows if row["part"] == part]}
        write(None if typed.dry else typed.out, result)

    print(json.dumps(about), flush=True)
    keep([])
    run_all(bench, typed, keep)
    for part in typed.only:
        result[part] |= JUDGES[part](bench, result[part]["rows"])
    if "compare" in typed.only:
        profiled_table(sorted(result["compare"]["rows"], key=lambda row: (row["member"], row["precision"])))
    about["took_s"] = round(time.monotonic() - typed.began, 1)
    brief = {part: {name: value for name, value in result[part].items() if name != "rows"} for part in typed.only}
    print(json.dumps(brief, indent=1))
    if typed.dry:
        print("dry: the script runs; these figures are of the CPU in a card's place, and --out was not written")
        return 0
    write(typed.out, result)
    ran = {"compare": "measured_bytes", "plan": "used", "history": "events"}
    return 0 if all(any(ran[part] in row for row in result[part]["rows"]) for part in typed.only) else 1


if __name__ == "__main__":
    sys.exit(main())
