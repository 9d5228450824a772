"""Twenty thousand sequences are divided by the command: all of them, copies together, in the asked shares."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipeline.structures.synthetic import draw_sequence
from tests.testkit.project import Project, write_config

SEQUENCES, SHARES = 20_000, {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_twenty_thousand_sequences_are_divided_with_copies_together(tmp_path: Path) -> None:
    rng, known = np.random.default_rng(0), {}
    for number in range(SEQUENCES):  # each pair of neighbours has one sequence
        text = known[f"s{number - 1}"] if number % 2 else draw_sequence(rng, 60 + number % 200)
        known[f"s{number}"] = text
    (tmp_path / "s.fasta").write_text("".join(f">{name}\n{text}\n" for name, text in known.items()))
    write_config(tmp_path, data__source="fasta", data__path="s.fasta")
    project = Project(tmp_path)
    assert project.submits("scan").code == 0
    assert project.types("split", "--out", "new.csv", "--json").code == 0
    rows = list(csv.DictReader((tmp_path / "new.csv").read_text().splitlines()))
    splits = {row["id"]: row["split"] for row in rows}
    assert splits.keys() == known.keys()
    of_text = defaultdict(set)
    for name, text in known.items():
        of_text[text].add(splits[name])
    assert [text for text, found in of_text.items() if len(found) > 1] == []
    counts = Counter(splits.values())
    assert {name: round(counts[name] / SEQUENCES, 2) for name in counts} == SHARES
