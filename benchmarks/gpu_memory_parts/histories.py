"""What torch's allocator was asked, as plain tapes, and what our simulator makes of each.

Shapes: E events, S segments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_memory_parts.cards import opened, settings_of
from benchmarks.gpu_memory_parts.measuring import Epoch, survived
from benchmarks.gpu_memory_parts.predicting import choice_of, member_of, work_for
from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.caching_allocator import Allocator, SimulatedOutOfMemory

HISTORY_ITEMS, HISTORY_BATCH = 96, 8
FIXTURE_BYTES = 400_000


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
