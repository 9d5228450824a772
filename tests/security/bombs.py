"""Small files that stand for gigabytes, and what reads each; every one is read in a process that may not grow.

`python -m tests.security.bombs FOLDER` writes and reads them all, and says in a line of JSON of each how it ended, how
many MiB the process grew, and how many CPU seconds reading took.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import resource
import struct
import sys
import tarfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import h5py
import msgpack
import numpy as np
import torch

from pipeline.encoder.esm_checkpoint import (
    FAIR,
    Architecture,
    digest_weights,
    load_esm_checkpoint,
    shapes,
)
from pipeline.encoder.published_weights import read_pt, read_safetensors
from pipeline.errors import PipelineError
from pipeline.files import file_digest
from pipeline.readers import hdf5
from pipeline.readers.byte_pairs import BytePairs
from pipeline.readers.captions import Captions
from pipeline.readers.pairs import Pairs
from pipeline.readers.spectra import Spectra
from pipeline.records import Reason, Rejection
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import format_of, read_file
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from pipeline.training.checkpoints.sealed_folder import WrittenFile, unseal, write_manifest
from pipeline.training.checkpoints.trained_weights import stored_weights
from tests.structures.parsing.amber_text import complex_files

GIB = 1 << 30
ALLOWED_BYTES = 3 * GIB  # of address space beyond what there is: a bomb that goes off ends as MemoryError
MOST_FILE_BYTES = 16 << 20
ALARM_S, CPU_S = 600, 60  # a process that takes more CPU time is ended; the alarm is for one that does nothing


@dataclass(frozen=True)
class Ending:
    """How reading a bomb ended."""

    name: str
    told: str  # of a refusal; empty where there was none
    grown_mib: int
    cpu_s: float
    trouble: str = ""  # what should never come out


Bomb = Callable[[Path], object]
Given, Made = ParamSpec("Given"), TypeVar("Made")
BOMBS: dict[str, Bomb] = {}
TOLD: dict[str, str] = {}


def bomb(told: str) -> Callable[[Bomb], Bomb]:
    """Name a bomb after its function; `told` is part of what its refusal says."""

    def named(make: Bomb) -> Bomb:
        BOMBS[make.__name__], TOLD[make.__name__] = make, told
        return make

    return named


class Making:
    """The CPU time that helpers took to make bombs, for they are not part of reading them."""

    s = 0.0

    def __call__(self, make: Callable[Given, Made]) -> Callable[Given, Made]:
        """Count the time of a helper."""

        @wraps(make)
        def counted(*args: Given.args, **options: Given.kwargs) -> Made:
            begun_s = time.process_time()
            made = make(*args, **options)
            self.s += time.process_time() - begun_s
            return made

        return counted


making = Making()


def structure(path: Path) -> object:
    """Read a structure as the scan does."""
    return parse_structure(read_file(path, MOST_FILE_BYTES), format_of(path), FileReading())


def entries(source: str, path: Path) -> list[object]:
    """List a data set as the scan does."""
    return rejected(items(SourceSpec(source=source, path=path)))


@making
def packed(text: bytes, times: int) -> bytes:
    """Return a gzip file of a text again and again, made without writing it out."""
    return gzip.compress(text) * times


@bomb("unfolds beyond structures.max_file_bytes")
def pdb_packed(folder: Path) -> object:
    (path := folder / "a.pdb.gz").write_bytes(packed(b"REMARK 1 " * (1 << 20), 200))
    return structure(path)


@bomb("an assembly of 1,000,000,000 operations, more than 100,000")
def mmcif_operations(folder: Path) -> object:
    """An assembly of a billion operations, which gemmi writes out."""
    path = folder / "a.cif"
    path.write_text(MMCIF.format(expression="1-1000000000"))
    return structure(path)


@bomb("operations, more than 100,000")
def mmcif_operations_multiplied(folder: Path) -> object:
    path = folder / "a.cif"
    path.write_text(MMCIF.format(expression="(1-9999)(1-9999)(1-9999)"))
    return structure(path)


@bomb("unfolds to 8,000,000,000 characters, more than")
def bcif_runs(folder: Path) -> object:
    """One run of a billion equal numbers."""
    return binary(folder, column(np.array([7, 10**9], "<i4").tobytes(), [run_length(10**9), integers()]))


@bomb("unfolds to 8,000,000,032 characters, more than")
def bcif_run_in_a_mask(folder: Path) -> object:
    mask = {"data": np.array([1, 10**9], "<i4").tobytes(), "encoding": [run_length(10**9), integers()]}
    return binary(folder, column(b"\x01\0\0\0", [integers()]) | {"mask": mask})


@bomb("unfolds to 100,001,000,000 characters, more than")
def bcif_wide_texts(folder: Path) -> object:
    """A long word that a million rows name: numpy would give each row its width."""
    words = {
        "kind": "StringArray",
        "stringData": "x" * 100_000,
        "offsets": np.array([0, 100_000], "<i4").tobytes(),
        "offsetEncoding": [integers()],
        "dataEncoding": [run_length(10**6), integers()],
    }
    return binary(folder, column(np.array([0, 10**6], "<i4").tobytes(), [words]))


@bomb("a SEQRES of 30,000 residues; structures.max_residues is")
def mmcif_sequence(folder: Path) -> object:
    """A sequence and a chain of 30,000 residues, whose alignment takes a byte for each pair of them."""
    names = [("ALA", "GLY")[number * number % 7 % 2] for number in range(30_000)]
    atoms = (f"ATOM {at} C CA {name} A . {at} . {at % 999} 0 0" for at, name in enumerate(reversed(names), 1))
    text = (
        "data_x\n"
        + loop("entity", "id type", "1 polymer")
        + loop("entity_poly", "entity_id type", "1 polypeptide(L)")
        + loop("entity_poly_seq", "entity_id num mon_id", *(f"1 {at} {name}" for at, name in enumerate(names, 1)))
        + loop("struct_asym", "id entity_id", "A 1")
        + loop("atom_site", ATOMS.replace("Cartn_x", "auth_seq_id label_alt_id Cartn_x"), *atoms)
    )
    (path := folder / "a.cif.gz").write_bytes(gzip.compress(text.encode()))
    return parse_structure(read_file(path, MOST_FILE_BYTES), "mmcif", FileReading(seqres=True), 10_000)


@bomb("RDKit finds no complete molecule in the file")
def sdf_counts(folder: Path) -> object:
    counts = "x\n\n\n  0  0  0  0  0  0            999 V3000\nM  V30 BEGIN CTAB\nM  V30 COUNTS 2000000000 0 0 0 0\n"
    (path := folder / "a.sdf").write_text(counts + "M  V30 BEGIN ATOM\nM  V30 1 C 0 0 0 0\nM  V30 END ATOM\nM  END\n")
    return structure(path)


@bomb("the molecule declares 2000000000 atoms but has 0")
def mol2_counts(folder: Path) -> object:
    (path := folder / "a.mol2").write_text("@<TRIPOS>MOLECULE\nx\n 2000000000 2000000000 1\nSMALL\nNO_CHARGES\n")
    return structure(path)


@bomb("%FLAG ATOM_NAME holds 56 values, but POINTERS say")
def amber_counts(folder: Path) -> object:
    first, _, rest = complex_files()[0].decode("latin-1").partition("%FLAG POINTERS")
    lines = rest.splitlines(keepends=True)
    lines[2] = f"{2_000_000_000:8d}"[:8] + lines[2][8:]
    (folder / "a.prmtop").write_text(first + "%FLAG POINTERS" + "".join(lines))
    (folder / "a.inpcrd").write_text("x\n2000000000\n")
    data = (folder / "a.prmtop").read_bytes()
    return parse_structure(data, "amber", FileReading(), beside=(folder / "a.inpcrd").read_bytes())


@bomb("%FLAG ATOM_NAME needs a plain %FORMAT")
def amber_width_of_nothing(folder: Path) -> object:
    """A column that is no character wide never ends."""
    text = complex_files()[0].decode("latin-1").replace("%FORMAT(20a4)", "%FORMAT(20a0)")
    return parse_structure(text.encode("latin-1"), "amber", FileReading(), beside=b"x\n1\n")


@bomb("the coordinates are of 1 atoms, the topology of 56")
def amber_most_columns(folder: Path) -> object:
    text = complex_files()[0].decode("latin-1").replace("%FORMAT(20a4)", "%FORMAT(2000000000a4)")
    return parse_structure(text.encode("latin-1"), "amber", FileReading(), beside=b"x\n1\n")


@bomb("unfolds to more than 200 times its size")
def manifest_packed(folder: Path) -> object:
    (path := folder / "m.csv.gz").write_bytes(gzip.compress(b"id,path\n") + packed(b" " * (1 << 20) + b"\n", 400))
    return entries("manifest", path)


@bomb("a line is longer than 4 MiB")
def manifest_of_one_line(folder: Path) -> object:
    return entries("manifest", hollow(folder / "m.csv", b"id,path\n"))


@bomb("not a JSON object on one line")
def json_lines_nested(folder: Path) -> object:
    (path := folder / "m.jsonl").write_text("[" * 1_000_000 + "\n")
    return entries("manifest", path)


@bomb("a line is longer than 4 MiB")
def fasta_of_one_line(folder: Path) -> object:
    return entries("fasta", hollow(folder / "m.fasta", b">a\n"))


@bomb("no END IONS before the next spectrum or the end of the file")
def spectrum_without_an_end(folder: Path) -> object:
    return rejected(Spectra(hollow(folder / "a.mgf", b"BEGIN IONS\nTITLE=x\nPEPMASS=1\n")).entries())


@bomb("unpacks to more than 200 times its size")
def spectra_packed(folder: Path) -> object:
    (path := folder / "a.mgf.gz").write_bytes(packed(b" " * (1 << 20) + b"\n", 400))
    return rejected(Spectra(path).entries())


@bomb("more than 100,000 elements")
def spectrum_of_empty_elements(folder: Path) -> object:
    with (path := folder / "a.mzML").open("wb") as file:
        file.writelines([b"<spectrum>", *[b"<a/>" * 1024] * 4096, b"</spectrum>"])
    return rejected(Spectra(path).entries())


@bomb("the text has 1,073,741,824 bytes, at most 1,048,576")
def tar_of_hollow_text(folder: Path) -> object:
    """A tar in a file with holes: of its image there is a byte, of its text there are gibibytes that nothing wrote."""
    (image := tarfile.TarInfo("a.png")).size, (text := tarfile.TarInfo("a.txt")).size = 1, GIB
    return rejected(Captions(hollow(folder / "a.tar", image.tobuf() + bytes(512) + text.tobuf(), 2 * GIB)).entries())


@bomb("a header of 1,073,741,824 bytes")
def tar_of_hollow_header(folder: Path) -> object:
    (member := tarfile.TarInfo("a.png")).size, member.type = GIB, tarfile.XHDTYPE
    return rejected(Captions(hollow(folder / "a.tar", member.tobuf(), size=2 * GIB)).entries())


@bomb("is not a merges file: it has more than 64 MiB")
def merges_packed(folder: Path) -> object:
    (path := folder / "merges.txt.gz").write_bytes(packed(b" " * (1 << 20) + b"\n", 400))
    return BytePairs.read(path, where="data.options.merges")


@bomb("a row of more than 1,048,576 bytes")
def pair_of_one_line(folder: Path) -> object:
    return rejected(Pairs(hollow(folder / "a.tsv", b"left\tright\n")).entries())


@bomb("is 4,096 MiB, more than 64")
def hdf5_long_rows(folder: Path) -> object:
    with h5py.File(path := folder / "a.h5", "w") as file:
        file.create_dataset("left", (1, 1 << 15, 1 << 15), "f4", chunks=(1, 64, 64), compression="gzip")
        file.create_dataset("right", (1, 1, 1), "f4")
    return rejected(Pairs(path).entries())


@bomb("a chunk of 'left' (65537, 1, 1024) is 256 MiB, more than 256")
def hdf5_large_chunks(folder: Path) -> object:
    """Rows that are small, in a chunk that is not: all of it is unpacked for any of them."""
    with h5py.File(path := folder / "a.h5", "w") as file:
        chunk = (hdf5.MOST_CHUNK_BYTES // 4096 + 1, 1, 1024)
        file.create_dataset("left", (2, 1, 1024), "f4", maxshape=(None, 1, 1024), chunks=chunk, compression="gzip")
        file.create_dataset("right", data=np.zeros((2, 1, 1), "f4"))
    return rejected(Pairs(path).entries())


@bomb("damaged: 1,000,000,000,000 rows in a file of")
def hdf5_more_rows_than_bytes(folder: Path) -> object:
    with h5py.File(path := folder / "a.h5", "w") as file:
        for name in ("left", "right"):
            file.create_dataset(name, (10**12, 1, 1), "f4", chunks=(1 << 20, 1, 1), compression="gzip")
    return rejected(Pairs(path).entries())


@bomb("header too large")
def weights_header(folder: Path) -> object:
    """A header of safetensors that says that it is 2 GiB long, in a file that is."""
    return read_safetensors([hollow(folder / "a.safetensors", struct.pack("<Q", 2 * GIB - 16), size=2 * GIB)])


@bomb("is truncated: its end is missing")
def weights_tensor(folder: Path) -> object:
    """A tensor that says that it has a tebibyte."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    (path := folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return read_safetensors([path])


def sealed_by_hand(folder: Path, content: bytes) -> object:
    """Open a sealed folder whose digests are right and whose tensors are not."""
    (folder / "a.safetensors").write_bytes(content)
    files = {"a.safetensors": WrittenFile(len(content), file_digest(folder / "a.safetensors"))}
    write_manifest(folder / "manifest.json", files, {}, {}, Disk())
    return unseal(folder).tensors("a")


@bomb("cannot be read")
def checkpoint_header(folder: Path) -> object:
    return sealed_by_hand(folder, struct.pack("<Q", 2 * GIB - 16) + bytes(1000))


@bomb("cannot be read")
def checkpoint_shape(folder: Path) -> object:
    header = b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'
    return sealed_by_hand(folder, struct.pack("<Q", len(header)) + header + bytes(4))


@bomb("is a compressed archive")
def checkpoint_packed(folder: Path) -> object:
    """A .pt whose members are compressed: torch stores them plain, and takes nothing else."""
    return read_pt(zipped(folder / "a.pt", "a/version"))


@bomb("is truncated: its end is missing")
def checkpoint_that_torch_alone_reads(folder: Path) -> object:
    return read_pt(zipped(folder / "a.pt", "a/version", version=99))


@bomb("is not a checkpoint that torch can read")
def script_below_its_code(folder: Path) -> object:
    """An archive of TorchScript whose code, which may be compressed, seems to be another archive."""
    small = ("a/code/constants.pkl", "a/constants.pkl")
    return stored_weights(zipped(folder / "a.pt", *small, large="a/code/data.pkl"))


@bomb("is not a checkpoint that torch can read")
def script_far_memo(folder: Path) -> object:
    return stored_weights(script(folder / "a.pt", b"r" + struct.pack("<I", 0x10000000)))


@bomb("read in little memory")
def script_of_one_storage(folder: Path) -> object:
    """A thousand tensors that are all of the same mebibyte."""
    tensor = b"(X\7\0\0\0storagectorch\nByteStorage\nX\1\0\0\0000X\3\0\0\0cpuJ\0\0\x10\0tQ"
    members = b"".join(b"X\4\0\0\0%04d" % number + tensor for number in range(1000))
    assert len(stored_weights(script(folder / "a.pt", b"(" + members + b"u"))) == 1000
    raise UnusableInput(Reason.BAD_ENTRY, "read in little memory")


@bomb("its tensors overlap: 140 bytes stand for")
def esm_overlapping(folder: Path) -> object:
    """An ESM-2 of which each tensor is one number again and again."""
    settings = {"encoder_layers": 2, "encoder_embed_dim": 8192, "encoder_attention_heads": 2, "token_dropout": True}
    names = shapes(Architecture(2, 8192, 2, token_dropout=True))
    state = FAIR.write({name: torch.zeros(1).expand(shape) for name, shape in names.items()})
    torch.save({"cfg": {"model": settings}, "model": state}, path := folder / "a.pt")
    return digest_weights(load_esm_checkpoint(path))


@bomb("is not in the cache")
def shard_table(folder: Path) -> object:
    """A shard whose trailer says that it has more records than there are bytes."""
    store = CacheFolder(folder / "cache").kind("graph")
    with store.writer() as writer:
        writer.put(b"sixteen bytes...", {"a": np.zeros(3)})
    (path,) = store.layout.shards.iterdir()
    content = bytearray(path.read_bytes())
    for place in range(len(content) - 64, len(content) - 8, 8):
        content[place : place + 8] = struct.pack("<Q", 1 << 60)
    path.unlink()
    path.write_bytes(content)
    (store.layout.folder / "index.bin").unlink(missing_ok=True)
    if CacheFolder(folder / "cache").kind("graph").get(b"sixteen bytes...") is None:
        raise UnusableInput(None, "absent")  # type: ignore[arg-type]
    return None


@making
def hollow(path: Path, start: bytes, size: int = GIB) -> Path:
    """Write a file of so many bytes that takes no room on the disk: nothing but zeros follows its start."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path


@making
def zipped(path: Path, *small: str, large: str = "a/data.pkl", version: int = 20) -> Path:
    """Write an archive of small members, and a pickle that unfolds to half a gibibyte."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in small:
            archive.writestr(name, b"3\n", zipfile.ZIP_STORED)
        with archive.open(large, "w") as member:
            member.write(b"\x80\x02}.")
            member.writelines([bytes(1 << 20)] * 512)
        for info in archive.filelist:
            info.extract_version = version
    return path


@making
def script(path: Path, state: bytes) -> Path:
    """Write an archive of TorchScript whose module has the state that these opcodes of a pickle fill."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/constants.pkl", b"")
        archive.writestr("a/data/0", bytes(1 << 20))
        archive.writestr("a/data.pkl", b"\x80\x02c__torch__\nM\n)\x81}" + state + b"b.")
    return path


def rejected(found: Iterator[object]) -> list[object]:
    """Read all entries; the first rejection is what is told."""
    for one in found:
        if isinstance(one, Rejection):
            raise UnusableInput(one.reason, one.detail)
    return []


def binary(folder: Path, one: dict[str, object]) -> object:
    """Read a BinaryCIF file of one column of atoms."""
    category = {"name": "_atom_site", "rowCount": 1, "columns": [one]}
    content = {"encoder": "x", "version": "0.3.0", "dataBlocks": [{"header": "A", "categories": [category]}]}
    (path := folder / "a.bcif").write_bytes(msgpack.packb(content))
    return structure(path)


def column(data: bytes, encodings: list[dict[str, object]]) -> dict[str, object]:
    return {"name": "id", "data": {"data": data, "encoding": encodings}, "mask": None}


def run_length(size: int) -> dict[str, object]:
    return {"kind": "RunLength", "srcType": 3, "srcSize": size}


def integers() -> dict[str, object]:
    return {"kind": "ByteArray", "type": 3}


@making
def loop(category: str, names: str, *rows: str) -> str:
    """Return a category of an mmCIF file."""
    return "\n".join(["loop_", *(f"_{category}.{name}" for name in names.split()), *rows, ""])


ATOMS = "group_PDB id type_symbol label_atom_id label_comp_id label_asym_id label_seq_id Cartn_x Cartn_y Cartn_z"
MMCIF = (
    "data_x\n"
    + loop("atom_site", ATOMS, "ATOM 1 C CA ALA A 1 0 0 0")
    + loop("pdbx_struct_assembly", "id details", "1 x")
    + loop("pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", "1 '{expression}' A")
    + loop("pdbx_struct_oper_list", "id matrix[1][1]", "1 1")
)


def read_in_a_child(name: str, folder: Path) -> Ending:
    """Read one bomb where its going off is heard and does no harm."""
    context = multiprocessing.get_context("fork")
    told: multiprocessing.Queue[Ending] = context.Queue()
    child = context.Process(target=lambda: told.put(_ended(name, folder)))
    child.start()
    child.join(ALARM_S)
    if child.is_alive() or child.exitcode:
        child.kill()
        return Ending(name, "", 0, 0.0, f"ended with {child.exitcode}; None: it does not end")
    return told.get(timeout=ALARM_S)


def _ended(name: str, folder: Path) -> Ending:
    folder.mkdir()
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ALLOWED_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    before, begun_s, told, trouble = peak_kib(), time.process_time(), "", ""
    making.s = 0.0
    try:
        BOMBS[name](folder)
    except (PipelineError, UnusableInput) as error:
        told = str(error)
    except BaseException:  # noqa: BLE001 - which is what is looked for
        trouble = traceback.format_exc()
    cpu_s = time.process_time() - begun_s - making.s
    return Ending(name, told, (peak_kib() - before) >> 10, round(cpu_s, 3), trouble)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    for name in sys.argv[2:] or BOMBS:
        sys.stdout.write(json.dumps(asdict(read_in_a_child(name, Path(sys.argv[1]) / name))) + "\n")
