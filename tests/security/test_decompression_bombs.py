"""A small file that stands for gigabytes is refused with its reason, in little memory and CPU time, whatever reads it.

`bombs.py` makes them. Each is read in a process that would end, were it to take 3 GiB or a minute.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gemmi
import pytest
import torch

from pipeline.encoder.checkpoints.weight_containers import read_pt
from pipeline.errors import WeightsUnusable
from pipeline.readers.images import class_names
from pipeline.readers.spectrum_files import mzml
from pipeline.structures.parsing import structure_files
from pipeline.structures.parsing.structure_files import HAS_BIOTITE
from pipeline.training.checkpoints.published_names import renamed
from tests.conftest import ROOT

MOST_GROWN_MIB = 200
TOLD = {
    "pdb_packed": "unfolds beyond structures.max_file_bytes",
    "mmcif_packed": "unfolds beyond structures.max_file_bytes",
    "mmcif_operations": "an assembly of 1,000,000,000 operations, more than 100,000",
    "mmcif_operations_multiplied": "operations, more than 100,000",
    "bcif_runs": "unfolds to 8,000,000,000 characters, more than",
    "bcif_run_in_a_mask": "unfolds to 8,000,000,032 characters, more than",
    "bcif_wide_texts": "unfolds to 100,001,000,000 characters, more than",
    "mmcif_sequence": "a SEQRES of 30,000 residues; structures.max_residues is",
    "sdf_counts": "RDKit finds no whole molecule in the file",
    "mol2_counts": "the molecule says 2000000000 atoms and has 0",
    "amber_counts": "%FLAG ATOM_NAME holds 56 values, and POINTERS say",
    "amber_width_of_nothing": "%FLAG ATOM_NAME: ",
    "amber_most_columns": "the coordinates are of 1 atoms, the topology of 56",
    "manifest_packed": "unfolds to more than 200 times its size",
    "manifest_of_one_line": "a line is longer than 4 MiB",
    "json_lines_of_one_line": "a line is longer than 4 MiB",
    "json_lines_nested": "not a JSON object on one line",
    "fasta_of_one_line": "a line is longer than 4 MiB",
    "spectrum_without_an_end": "no END IONS before the next spectrum or the end of the file",
    "spectra_packed": "unpacks to more than 200 times its size",
    "spectrum_of_empty_elements": "more than 100,000 elements",
    "tar_of_hollow_text": "the text has 1,073,741,824 bytes, and",
    "tar_of_hollow_header": "a header of 1,073,741,824 bytes",
    "pair_of_one_line": "a row of more than 1,048,576 bytes",
    "hdf5_long_rows": "is 4,096 MiB, more than 64",
    "hdf5_large_chunks": "a chunk of 'left' (65537, 1, 1024) is 256 MiB, more than 256",
    "hdf5_more_rows_than_bytes": "damaged: 1,000,000,000,000 rows in a file of",
    "weights_header": "header too large",
    "weights_tensor": "is truncated: its end is missing",
    "checkpoint_header": "its header is damaged",
    "checkpoint_shape": "its header is damaged",
    "checkpoint_packed": "is a compressed archive",
    "checkpoint_that_torch_alone_reads": "is truncated: its end is missing",
    "script_below_its_code": "is not a checkpoint that torch can read",
    "script_far_memo": "is not a checkpoint that torch can read",
    "script_of_one_storage": "read in little memory",
    "esm_overlapping": "its tensors overlap: 140 bytes stand for",
    "shard_table": "is not in the cache",
}


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


LEVEL = b'accession="MS:1000511"'
MINUTES: dict[str, Callable[[Path], object]] = {
    "renamed": lambda _: renamed(".".join(["1"] * 64), {"a.*.*": "b"}),
    "classes": lambda _: class_names([*map(str, range(300_000))], where=""),
    "operations": lambda _: structure_files._operations("1" * 1_000_000),
    "members": lambda _: structure_files.gunzip(gzip.compress(b"") * 300_000, 1),
    "survey": lambda path: [*mzml.mzml_blocks(filled(path, b"<spectrum ", LEVEL * 100_000, b"</spectrum>"))],
    "groups": lambda path: mzml.groups(filled(path, b"<referenceableParamGroup " * 200_000)),
}


@pytest.mark.parametrize("name", MINUTES)
def test_what_took_minutes_or_for_ever_ends(name: str, tmp_path: Path) -> None:
    MINUTES[name](tmp_path / "a.mzML")


def filled(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def test_a_range_of_operations_is_written_out_by_the_parser_which_is_why_it_is_counted_before() -> None:
    """A million names already take a moment and tens of MB: a billion would take hours and tens of GB."""
    block = gemmi.cif.read_string("data_x\n_pdbx_struct_assembly_gen.oper_expression 1-1000000\n")[0]
    with pytest.raises(Exception, match="1,000,000 operations"):
        structure_files.check_operations(block.find_values("_pdbx_struct_assembly_gen.oper_expression"))


def test_assemblies_of_the_pdb_are_counted_as_what_they_are() -> None:
    counts = {"1": 1, "1,2,5": 3, "1-60": 60, "(1-60)(61-88)": 1680, "'(1-60)'": 60, "P": 1, "(X0)(1-5,7)": 6}
    assert {expression: structure_files._operations(expression) for expression in counts} == counts


@pytest.mark.skipif(not HAS_BIOTITE, reason="BinaryCIF needs the extra bcif")
def test_a_structure_of_the_pdb_is_far_from_what_is_refused(structures: Path) -> None:
    import msgpack

    content = msgpack.unpackb(gzip.decompress((structures / "varied/1aki.bcif.gz").read_bytes()))
    parts = list(structure_files._parts(content, {"atom_site"}))
    assert len(parts) >= 21  # the columns of its atoms
    assert 0 < sum(map(structure_files._characters, parts)) < structure_files.MOST_CHARACTERS / 50


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
