"""A small file that stands for gigabytes is refused with its reason, in little memory and CPU time, whatever reads it.

`bombs.py` makes them. Each is read in a process that would end, were it to take 3 GiB or a minute.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.encoder.published_weights import read_pt
from pipeline.errors import WeightsUnusable
from pipeline.memory.runtime.recovery import Cut, Governor
from pipeline.readers import mzml
from pipeline.readers.byte_pairs import BytePairs
from pipeline.readers.captions import class_names
from pipeline.structures.parsing import structure_files
from pipeline.structures.parsing.structure_files import HAS_BIOTITE
from pipeline.training.checkpoints.trained_weights import renamed
from tests.conftest import ROOT
from tests.security.bombs import TOLD

MOST_GROWN_MIB, MOST_CPU_S = 200, 1.0
READ_AT_LENGTH = {"manifest_packed", "spectra_packed", "pair_of_one_line"}  # 100 MiB to 1 GiB, which is allowed


@pytest.mark.nightly
def test_every_bomb_is_refused_with_its_reason_in_little_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.security.bombs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    endings = {told["name"]: told for told in map(json.loads, done.stdout.splitlines())}
    absent = set() if HAS_BIOTITE else {name for name in TOLD if name.startswith("bcif")}
    assert set(endings) - absent == set(TOLD) - absent
    assert {name: one["trouble"] for name, one in endings.items() if one["trouble"]} == {}
    found = {name: one["told"] for name, one in endings.items() if name not in absent}
    assert {name: told for name, told in found.items() if TOLD[name] not in told} == {}
    assert {name: one for name, one in endings.items() if one["grown_mib"] > MOST_GROWN_MIB} == {}
    slow = {name: one for name, one in endings.items() if one["cpu_s"] > MOST_CPU_S}
    assert slow.keys() - READ_AT_LENGTH == set()


LEVEL = b'accession="MS:1000511"'
MINUTES: dict[str, Callable[[Path], object]] = {
    "renamed": lambda _: renamed(".".join(["1"] * 64), {"a.*.*": "b"}),
    "classes": lambda _: class_names([*map(str, range(300_000))], where=""),
    "operations": lambda _: structure_files._operations("1" * 1_000_000),
    "members": lambda _: structure_files.gunzip(gzip.compress(b"") * 100_000, 1),
    "merges": lambda path: BytePairs.read(filled(path, gzip.compress(b"") * 100_000), where=""),
    "survey": lambda path: [*mzml.mzml_blocks(filled(path, b"<spectrum ", LEVEL * 100_000, b"</spectrum>"))],
    "groups": lambda path: mzml.groups(filled(path, b"<referenceableParamGroup " * 200_000)),
    "cuts": lambda _: cuts_after_a_failure([10**6 + number * 997 % 10**5 for number in range(8000)]),
}


@pytest.mark.parametrize("name", MINUTES)
def test_what_took_seconds_or_for_ever_ends_within_one(name: str, tmp_path: Path) -> None:
    begun_s = time.process_time()
    MINUTES[name](tmp_path / "a.mzML")
    assert time.process_time() - begun_s < MOST_CPU_S


def cuts_after_a_failure(costs: list[int]) -> list[Cut]:
    governor = Governor()
    governor.failed(costs)
    return governor.cuts(costs)


def filled(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def test_assemblies_of_the_pdb_are_counted_as_what_they_are() -> None:
    counts = {"1": 1, "1,2,5": 3, "1-60": 60, "(1-60)(61-88)": 1680, "'(1-60)'": 60, "P": 1, "(X0)(1-5,7)": 6}
    assert {expression: structure_files._operations(expression) for expression in counts} == counts


def test_a_checkpoint_that_somebody_compressed_is_refused_where_torch_would_read_noise(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, plain := tmp_path / "plain.pt")
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for member in archive.infolist():
            packed.writestr(member.filename, archive.read(member))
    noise = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)["a"]
    assert not torch.equal(noise, torch.zeros(4))  # what was read in silence
    with pytest.raises(WeightsUnusable, match="is a compressed archive"):
        read_pt(tmp_path / "a.pt")
    assert torch.equal(read_pt(plain)["a"], torch.zeros(4))


def test_parts_of_an_archive_that_lie_on_each_other_are_refused(tmp_path: Path) -> None:
    """Of an archive whose directory names the same bytes a hundred times, nothing is compressed."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\0." + b"\0" * 100_000)
        archive.filelist.extend([archive.filelist[0]] * 100)
    with pytest.raises(WeightsUnusable, match="is a compressed archive"):
        read_pt(tmp_path / "a.pt")
