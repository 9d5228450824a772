"""A step of two ranks that adds gradients up while its last backward runs, beside one that does so after it.

    python benchmarks/training/overlap.py [--rounds N] [--widths W ...] [--out FILE]

Two processes of one thread each talk over gloo on this machine, on the CPU and, where a compiler is installed, on
simulated cards. Each round makes three steps in changing order: with overlap, without, and without again; the last two
say how far apart the same step is from itself. A step's time is that of its slower rank.

There is no card here that computes while the host sums. Ranks and their sums share the processor, so this tells what
overlap costs where nothing is idle; its gain is to be measured on GPUs. In trainings it is on on cards only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - the project is found only now
from torch import nn  # noqa: E402

from benchmarks.circumstances import write  # noqa: E402
from pipeline.device.accelerator import computing  # noqa: E402
from pipeline.device.kinds import CPU  # noqa: E402
from pipeline.training.ranks.gradient_sums import GradientSums  # noqa: E402
from pipeline.training.ranks.process_group import ProcessGroup  # noqa: E402
from tests.card import card  # noqa: E402
from tests.training.ranks.crews import crew  # noqa: E402

LAYERS, ROWS, WARM = 12, 256, 2
WITHIN_S = 1800.0  # of all rounds: a pass of 0.4 s of computing was seen to take 2 s on a machine that others use
WAYS = ("with", "without", "again")


def rounds_of(group: ProcessGroup, device: str, width: int, rounds: int) -> list[dict[str, Any]]:
    """Make steps in all ways, in turns; return for each round how long they took on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
    trained = list(model.parameters())
    sums = GradientSums(trained, group, device, overlaps=True)
    sums.expect(range(len(trained)))
    x_NW = torch.randn(ROWS, width).to(device)
    found = []
    for number in range(WARM + rounds):
        turn = (number + 1) % len(WAYS)  # the first is without: it makes the buffers
        found.append({way: step_s(group, sums, model, x_NW, way) for way in (*WAYS[turn:], *WAYS[:turn])})
    return found[WARM:]


def step_s(group: ProcessGroup, sums: GradientSums, model: nn.Module, x_NW: torch.Tensor, way: str) -> list[float]:
    """Return the seconds of forward, backward and sums, and of these the ones after the backward."""
    model.zero_grad()
    sums.begin_step(overlaps=way == "with")
    group.exchange({})  # both begin together
    begin = time.perf_counter()
    with sums.within():
        model(x_NW).square().mean().backward()
    computing(x_NW.device).synchronize()
    backward_ended = time.perf_counter()
    if way != "with":
        sums.reserve()
    sums.add_up()
    computing(x_NW.device).synchronize()
    end = time.perf_counter()
    return [end - begin, end - backward_ended]


def measure(folder: Path, device: str, width: int, rounds: int) -> dict[str, float]:
    """Let two ranks make all rounds; return what they say of overlap."""
    made = crew(folder / f"{device}-{width}", 2, rounds_of, device, width, rounds, device=device)
    codes = made.wait(WITHIN_S)
    if codes != [0, 0]:
        raise RuntimeError(f"ranks ended with {codes}: {made.err(0)}{made.err(1)}")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    shares = []
    for both in zip(made.result(0), made.result(1), strict=True):
        for way in WAYS:
            seconds[way].append(max(one[way][0] for one in both))
        shares += [one["without"][1] / one["without"][0] for one in both]
    return {
        **spread("ratio", quotients(seconds["with"], seconds["without"])),
        **spread("noise", quotients(seconds["again"], seconds["without"])),
        "sums_share": round(statistics.median(shares), 3),
        "step_s": round(statistics.median(seconds["without"]), 3),
        "gradient_bytes": 4 * LAYERS * (width + 1) * width,
        "rounds": rounds,
    }


def quotients(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [above / below for above, below in zip(one, other, strict=True)]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {f"{name}_{what}": round(value, 3) for what, value in found.items()}


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = [CPU]
    if reason := card.why_not():
        print(f"no simulated cards: {reason}", file=sys.stderr)
    else:
        card.library()  # built once, not by each rank
        os.environ |= card.environment(card.Cards())
        devices.append(card.NAME)
    result: dict[str, Any] = {"what": f"steps of two ranks with overlap, {LAYERS} layers, {ROWS} rows, gloo"}
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        for device in devices:
            result[device] = {str(one): measure(Path(folder), device, one, options.rounds) for one in options.widths}
    result["load"] = round(os.getloadavg()[1], 1)  # of these minutes; two of it are these ranks
    print(json.dumps(result, indent=2))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
