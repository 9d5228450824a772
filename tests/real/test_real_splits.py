"""Splits of 20,000 real proteins with the real mmseqs, by the commands of docs/how-to/data_splits.md."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.real.packages import fetched
from tests.testkit.project import LOCAL, PIPELINE, Project, write_config

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

PROTEINS = 20_000
KINDS = ("avx2", "avx", "sse4_1", "ssse3")  # as the kernel calls what a processor has, best first
EVERY = 20  # of the proteins is searched for: all of them take 400 CPU-seconds
PAGE = (ROOT / "docs/how-to/data_splits.md").read_text()
FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}


@dataclass(frozen=True)
class Mmseqs:
    """The program, in a folder with the table of clusters that it made."""

    program: Path
    folder: Path

    def types(self, *words: str) -> None:
        """Type a command; it must succeed."""
        done = subprocess.run([self.program, *words], cwd=self.folder, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def proteins(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of 20,000 proteins, scanned, with their sequences in chains.fasta."""
    folder = tmp_path_factory.mktemp("proteins")
    packed = fetched("apt:mmseqs2-examples") / "usr/share/doc/mmseqs2/example-data/DB.fasta.gz"
    write_config(folder, data__source="fasta", data__path=str(packed), data__max_rejected_fraction=1, **LOCAL)
    project = Project(folder, limit_s=900)
    project.finishes("scan")
    assert project.types("data", "split", "--write-fasta", "chains.fasta").code == 0
    return project


@pytest.fixture(scope="module")
def mmseqs(proteins: Project) -> Mmseqs:
    """Make clusters of the chains as the page tells."""
    program = proteins.folder / "mmseqs"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    folder, library = fetched("apt:mmseqs2"), fetched("apt:libgzstream0")
    built = [folder / f"usr/bin/mmseqs-{kind.replace('_', '.')}" for kind in KINDS if kind in flags]
    best = next((path for path in built if path.exists()), None)
    if best is None:
        pytest.skip("apt:mmseqs2: no program for this processor")
    libraries = next(library.rglob("libgzstream.so.0")).parent
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {best} "$@"\n')
    program.chmod(0o755)
    started = subprocess.run([program, "version"], capture_output=True, text=True)
    if started.returncode:
        pytest.skip(f"apt:mmseqs2: cannot start: {started.stderr.strip()}")
    made = Mmseqs(program, proteins.folder)
    made.types(*typed("easy-cluster"))
    return made


def typed(command: str) -> list[str]:
    """Return the words of a command of mmseqs on the page."""
    return next(line.split()[2:] for line in PAGE.splitlines() if line.startswith(f"$ mmseqs {command} "))


# A small process starts the command: what a child takes is never less than what its parent had.
MEASURE = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, {"cpu_s": used.ru_utime + used.ru_stime, "MiB": used.ru_maxrss / 1024}]))
"""


def measured(project: Project, *words: str) -> tuple[int, dict[str, float]]:
    """Type a command; return its exit code, its CPU time and its largest memory in MiB."""
    environment = {**os.environ, "PATH": f"{PIPELINE.parent}:{project.programs}"}
    command = [sys.executable, "-c", MEASURE, PIPELINE, *words]
    done = subprocess.run(command, cwd=project.folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    code, cost = json.loads(done.stdout)
    return code, cost


def splits_of(path: Path) -> dict[str, str]:
    """Return the split of each protein, by the name that mmseqs gives to it."""
    with path.open(newline="") as file:
        return {mmseqs_name(row["id"]): row["split"] for row in csv.DictReader(file)}


def mmseqs_name(text: str) -> str:
    """Return what mmseqs calls a protein: of `tr|W0FSK4|…` the part between the bars."""
    return text.split("|")[1] if "|" in text else text


def pairs_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a table of clusters, or of alignments."""
    with path.open() as file:
        for line in file:
            one, other, *_ = line.rstrip("\n").split("\t")
            yield mmseqs_name(one), mmseqs_name(other)


def shares(splits: dict[str, str]) -> dict[str, float]:
    return {name: sum(split == name for split in splits.values()) / len(splits) for name in FRACTIONS}


@pytest.fixture(scope="module")
def similar(mmseqs: Mmseqs) -> set[tuple[str, str]]:
    """Return the pairs above the limit that a search finds for some of the proteins."""
    folder = mmseqs.folder
    records = (folder / "chains.fasta").read_text().split("\n>")
    (folder / "some.fasta").write_text("\n>".join(records[::EVERY]) + "\n")
    command, _, *words = typed("easy-search")
    mmseqs.types(command, "some.fasta", *words)
    found = {(min(pair), max(pair)) for pair in pairs_in(folder / "pairs.m8") if pair[0] != pair[1]}
    (folder / "pairs.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in found))
    return found


def test_no_cluster_of_mmseqs_is_in_two_splits(proteins: Project, mmseqs: Mmseqs, record_property: Any) -> None:
    tables = [path.name for path in proteins.folder.glob("found_*.tsv")]
    assert len(tables) == 1
    words = ("data", "split", "--by", "clusters", "--clusters", *tables)
    code, cost = measured(proteins, *words, "--out", "divided.csv")
    record_property("split", cost)
    assert code == 0
    assert cost["MiB"] < 500
    splits = splits_of(proteins.folder / "divided.csv")
    assert len(splits) == PROTEINS
    places = defaultdict(set)
    for representative, member in pairs_in(proteins.folder / tables[0]):
        places[representative].add(splits[member])
    assert len(places) > 1000
    assert {len(found) for found in places.values()} == {1}
    assert shares(splits) == pytest.approx(FRACTIONS, abs=0.001)
    checked = proteins.types(*words, "--check", "--set", "data.splits=divided.csv", "--json")
    assert (checked.code, checked.json()["shared"]) == (0, [])


def test_what_a_search_finds_between_splits(
    proteins: Project, similar: set[tuple[str, str]], record_property: Any
) -> None:
    assert len(similar) > 1000
    clusters = ("--by", "clusters", "--clusters", "found_cluster.tsv")
    across = {}
    for name, words in {"sequence": (), "clusters": clusters, "pairs": (*clusters, "--clusters", "pairs.tsv")}.items():
        assert measured(proteins, "data", "split", *words, "--out", f"{name}.csv")[0] == 0
        splits = splits_of(proteins.folder / f"{name}.csv")
        across[name] = sum(splits[one] != splits[other] for one, other in similar) / len(similar)
    record_property("across", across)
    assert across["sequence"] > 0.2
    assert across["clusters"] < 0.02
    assert across["pairs"] == 0
