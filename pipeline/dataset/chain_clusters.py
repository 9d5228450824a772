"""Clusters of chains as other programs write them, a line `representative<TAB>member`: read, or made by them."""

from __future__ import annotations

import os
import shutil
import subprocess
from array import array
from bisect import bisect_left
from contextlib import closing
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset.item_splits import text_digest
from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.structures.sources.source_rows import text_lines
from pipeline.structures.sources.table_sources import split_suffix
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COVERAGE = "0.8"  # of both chains, that an alignment must have for them to be in one cluster
LAST_LINES = 5  # of what a program said, in an error
BETWEEN = ("_", ":", ".", "-", "|")  # file or id, and chain, in the tables of common programs


class ClusterTable:
    """The clusters of one table, by the names of their members: 16 bytes a line."""

    def __init__(self, path: Path) -> None:
        members, clusters = array("Q"), array("Q")
        self.path, self.example = path, ""
        with closing(text_lines(path)) as lines:
            for number, line in enumerate(lines, 1):
                names = [name.strip() for name in line.split("\t")]
                if not any(names):
                    continue
                if len(names) != 2 or not all(names):
                    raise _no_table(path, number, line)
                self.example = self.example or names[1]
                clusters.append(text_digest(names[0]))
                members.append(text_digest(names[1]))
        order = np.argsort(np.array(members, np.uint64), kind="stable")
        self._members, self._clusters = (
            array("Q", np.array(column, np.uint64)[order].tobytes()) for column in (members, clusters)
        )

    def __len__(self) -> int:
        return len(self._members)

    def clusters_of(self, names: Iterable[str]) -> list[int]:
        """Return the clusters of the first of these names that is a member; more than one where it stands twice."""
        for name in names:
            if found := self.of_member(text_digest(name)):
                return found
        return []

    def of_member(self, member: int) -> list[int]:
        """Return the clusters of a member, by the digest of its name."""
        first = last = bisect_left(self._members, member)
        while last < len(self._members) and self._members[last] == member:
            last += 1
        return list(self._clusters[first:last])


def _no_table(path: Path, number: int, line: str) -> DataError:
    what = f"not two tab-separated names: {printable_text(line.strip()[:80])!r}"
    hint = "   (mmseqs and foldseek call it …_cluster.tsv; of others, make one: representative<TAB>member)"
    return DataError(what, where=f"{path}:{number}", remedy=f"sed -n {number}p {quote(str(path))}{hint}")


def chain_names(item: str, path: str, chain: str, model: int | None, *, alone: bool) -> Iterator[str]:
    """Yield what programs may call a chain: by the item's id or the file, and alone by those where it is the only one.

    mmseqs takes a name's part between bars; foldseek keeps a file's ending or not, and names the models of several.
    """
    file = Path(path).name
    stem = split_suffix(file)[0]
    files = list(dict.fromkeys((item, stem, file, stem.lower(), stem.upper()))) if file else [item]
    for between in BETWEEN if chain else ():
        yield from (f"{name}{between}{chain}" for name in files)
    if chain:
        yield from (f"{name}_MODEL_{model or 1}_{chain}" for name in files)
    if alone:
        yield from files
        yield from item.split("|")[1:2]


def run_mmseqs(fasta: Path, folder: Path, min_identity: float) -> ClusterTable:
    """Cluster sequences by identity with mmseqs, which must be installed."""
    remedy = Command.of("data split --write-fasta chains.fasta", then="   (cluster it elsewhere; then --by clusters)")
    if (program := shutil.which("mmseqs")) is None:
        what = "mmseqs is not installed here, or not on the path"
        raise ConfigError(what, where=f"PATH={os.environ.get('PATH', '')}", remedy=remedy)
    threads = str(len(os.sched_getaffinity(0)))
    words = [program, "easy-cluster", str(fasta), str(folder / "found"), str(folder / "tmp")]
    words += ["--min-seq-id", f"{min_identity:g}", "-c", COVERAGE, "--cov-mode", "0", "--threads", threads]
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    table = folder / "found_cluster.tsv"
    if ended.returncode or not table.exists():
        said = "\n  ".join(ended.stdout.strip().splitlines()[-LAST_LINES:])
        raise JobFailed(f"mmseqs ended with {ended.returncode}:\n  {said}", where=join(words[:2]), remedy=remedy)
    return ClusterTable(table)
