"""What stage predict leaves of pairs: which right sides are nearest to each left one, and the other way.

nearest_right.csv    a line an item: its classes where they are told, and the nearest right sides, each with its cosine
nearest_left.csv     the same the other way
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from pipeline.files import replacing
from pipeline.tasks.pairs.nearest import nearest_sides

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TOLD = 5  # of the nearest


def write_nearest(
    folder: Path, outputs: Mapping[str, Any], sides: tuple[str, str], names: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Write a table for each side; `names` are those of the classes that the first side tells, by output."""
    return [
        _write(folder / f"nearest_{other}.csv", outputs, (side, other), names if side == sides[0] else {})
        for side, other in (sides, sides[::-1])
    ]


def _write(path: Path, outputs: Mapping[str, Any], way: tuple[str, str], names: Mapping[str, Sequence[str]]) -> Path:
    side, other = way
    most = min(TOLD, len(outputs[other]))
    columns = [column for rank in range(1, 1 + most) for column in (f"nearest_{rank}", f"cosine_{rank}")]
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "own_cosine", *names, *columns])
        for place, (numbers, cosines) in enumerate(nearest_sides(outputs[side], outputs[other], most)):
            found = [
                cell
                for number, cosine in zip(numbers.tolist(), cosines.tolist(), strict=True)
                for cell in (outputs[other].id(number), f"{cosine:.4f}")
            ]
            classes = [of[int(outputs[name][place])] for name, of in names.items()]
            rows.writerow([outputs[side].id(place), f"{float(outputs['similarity'][place]):.4f}", *classes, *found])
    return path
