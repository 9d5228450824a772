"""Live peaks of each recipe's steps at its own sizes: planned without running them, and counted byte by byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.recipes_parts.bench import NAMES, Bench, train
from pipeline.memory.footprint import MemoryChoice, Oracle
from pipeline.memory.planning.oracle_cache import OracleCache

RECIPES = NAMES
REACH = 0.01
STEPS = 2


@dataclass(frozen=True)
class Case:
    """A way to run a recipe, and the items of three micro-batches."""

    label: str
    sets: Sequence[str]
    what: Any  # see `made_items`
    micros: Sequence[Sequence[int]]
    precision: str = "fp32"


COMPLEXES, POCKETS = [(100, 80), (225, 200), (400, 300)], [13, 27, 46]
SINGLES = [[0], [1], [2]]
SPECTRA = [list(range(count)) for count in (2, 8, 16)]
PEPTIDES = [list(range(count)) for count in (2, 4, 8)]
PAIRS = [list(range(count)) for count in (4, 8, 16)]
CASES = {
    "complex_docking": (
        Case("as it is", (), COMPLEXES, [*SINGLES[:2], [0, 1]]),
        Case("2 noises of each", ("train.options.multiplicity=2",), COMPLEXES, SINGLES[:2]),
    ),
    "rna_ligand": (Case("as it is", (), POCKETS, SINGLES),),
    "spectra_finetune": (
        Case("as it is: 4 of 7 layers frozen", (), 16, SPECTRA),
        Case("nothing frozen", ("train.frozen=[]",), 16, SPECTRA),
    ),
    "denovo_recursive": (Case("as it is: bf16", (), 8, PEPTIDES, "bf16"),),
    "contrastive_pair": (Case("as it is: ViT-B/32", (), 16, PAIRS),),
}


def measured(recipe: str) -> Iterator[dict[str, Any]]:
    """Yield every figure, and print it."""
    for case in CASES[recipe]:
        yield from rows_of(recipe, case)


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to."""
    wanted = {(name, case.label): 2 * len(case.micros) for name, cases in CASES.items() for case in cases}
    for row in rows:
        wanted[row["recipe"], row["case"]] -= 1
    return {
        "what": f"planned live peak of {STEPS} real steps over the one that a byte-accurate CPU allocator counted, the "
        "making of the model included; batches are collated from made items and lie in the host's memory until their "
        "turn; models at the sizes of configs/recipes; bytes",
        "reach": f"within {REACH:.0%}",
        "cases": len(rows),
        "not_run": [[*case, left] for case, left in wanted.items() if left],
        "worst": max(round(abs(row["ratio"] - 1), 5) for row in rows),
        "missed": [
            [row["recipe"], row["case"], row["sizes"], row["ratio"]] for row in rows if abs(row["ratio"] - 1) > REACH
        ],
    }


def rows_of(recipe: str, case: Case) -> Iterator[dict[str, Any]]:
    """Compare a case at its sizes."""
    bench = Bench.of(recipe, case.sets, case.what)
    choice = MemoryChoice(precision=case.precision)
    oracle = None if bench.work.is_contrastive else bench.oracle()
    for numbers in case.micros:
        for micros in (1, 2):
            asked = oracle or _of_step(bench, len(numbers) * micros).oracle()
            yield _row(bench, case, choice, numbers, micros, asked)


def _of_step(bench: Bench, items: int) -> Bench:
    """Return a recipe that compares so many items in a step."""
    return replace(bench, work=replace(bench.work, settings=replace(bench.work.settings, batch=items)))


def _row(
    bench: Bench, case: Case, choice: MemoryChoice, numbers: Sequence[int], micros: int, oracle: Oracle
) -> dict[str, Any]:
    if bench.work.is_contrastive:
        bench = _of_step(bench, len(numbers) * micros)
    start, sizes = time.perf_counter(), bench.batch_sizes(numbers)
    questions = OracleCache(oracle, tuple(sizes))
    planned = questions.peak_bytes(choice, tuple(sizes.values()), accumulate=micros > 1)
    asked_s = round(time.perf_counter() - start, 2)
    start = time.perf_counter()
    real = train(bench, choice, [[numbers] * micros] * STEPS).peak_bytes
    origin = questions.micro(choice, tuple(sizes.values())).origin.value
    print(
        f"{bench.name:18}{case.label:32}{micros:3}{planned:15,}{real:15,}{planned / real:10.5f}  {origin}  "
        f"{' '.join(f'{name} {size:,}' for name, size in sizes.items())}",
        flush=True,
    )
    return {
        "case": case.label,
        "sizes": sizes,
        "micro_batches": micros,
        "planned": planned,
        "real": real,
        "ratio": round(planned / real, 5),
        "origin": origin,
        "asked_s": asked_s,
        "trained_s": round(time.perf_counter() - start, 2),
    }
