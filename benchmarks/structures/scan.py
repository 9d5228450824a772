"""Scan against Biopython: complexes per second and core, real PDB files, the same arrays, in one run.

    python benchmarks/structures/scan.py [FOLDER] [--runs N] [--out FILE]

Both sides read each file from disk and end with the same arrays, which are compared before anything is timed. Ours also
digests the bytes and makes the inventory that the scan stage stores; Biopython's side does neither.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.circumstances import write
from pipeline.keys import content_digest
from pipeline.records import Item, Part, Role
from pipeline.structures.atoms import name_text
from pipeline.structures.inventory import ScanRecipe, take
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.policy import Policy, apply_policy

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "structures" / "complexes"
LIMIT = 512 << 20
REACH = 20.0


@dataclass(frozen=True)
class Arrays:
    """What both parsers must deliver."""

    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.str_]
    element_A: NDArray[np.str_]
    residue_A: NDArray[np.int64]
    resname_R: NDArray[np.str_]
    number_R: NDArray[np.int64]
    icode_R: NDArray[np.str_]
    chain_R: NDArray[np.str_]
    sequences: tuple[str, ...]


def by_biopython(path: Path) -> Arrays:
    """Parse with Biopython and collect the arrays as a careful user would."""
    from Bio.PDB import PDBParser
    from Bio.PDB.Polypeptide import protein_letters_3to1_extended as letters

    model = PDBParser(QUIET=True).get_structure("x", str(path))[0]
    pos, names, elements, residues = [], [], [], []
    resnames, numbers, icodes, chains, sequences = [], [], [], [], []
    for chain in model:
        sequence = []
        for residue in chain:
            if residue.id[0] != " ":
                continue
            for atom in residue:
                pos.append(atom.coord)
                names.append(atom.name)
                elements.append(atom.element)
                residues.append(len(resnames))
            resnames.append(residue.resname)
            numbers.append(residue.id[1])
            icodes.append(residue.id[2])
            chains.append(chain.id)
            sequence.append(letters.get(residue.resname.title(), letters.get(residue.resname, "X")))
        sequences.append("".join(sequence))
    return Arrays(
        np.array(pos, dtype=np.float64), np.array(names), np.array(elements), np.array(residues), np.array(resnames),
        np.array(numbers), np.array(icodes), np.array(chains), tuple(sequences),
    )  # fmt: skip


def ours_as_arrays(path: Path) -> Arrays:
    """Return our structure in the shape of the other side, to compare them; not timed."""
    structure = apply_policy(parse_structure(read_file(path, LIMIT), "pdb", FileReading()), Policy())
    import gemmi

    return Arrays(
        structure.pos_A3,
        np.array([name_text(name) for name in structure.name_A]),
        np.array([gemmi.Element(int(one)).name.upper() for one in structure.element_A]),
        structure.residue_A,
        np.array([name_text(name) for name in structure.name_R]),
        structure.number_R.astype(np.int64),
        np.array([chr(one) for one in structure.icode_R]),
        np.array([chain.name for chain in structure.chains for _ in range(chain.first, chain.last)]),
        tuple(chain.sequence for chain in structure.chains),
    )


def by_scan(path: Path) -> None:
    """Do what the scan stage does with a file, but for the write to the store."""
    data = read_file(path, LIMIT)
    item = Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),))
    inventory, _ = take(item, {str(path): File(data, content_digest(data).hex())}, ScanRecipe())
    assert inventory.reason is None, inventory


def check_equal(path: Path) -> None:
    """Stop unless both sides deliver the same arrays."""
    ours, theirs = ours_as_arrays(path), by_biopython(path)
    np.testing.assert_allclose(ours.pos_A3, theirs.pos_A3, atol=1e-3, err_msg=path.name)
    for name in ("name_A", "element_A", "residue_A", "resname_R", "number_R", "icode_R", "chain_R"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=f"{path.name} {name}")
    assert ours.sequences == theirs.sequences, path.name


def seconds(work: Callable[[Path], object], files: list[Path]) -> float:
    """Return the CPU seconds that this process spends on all files."""
    gc.collect()
    start = time.process_time()
    for path in files:
        work(path)
    return time.process_time() - start


def main() -> int:
    """Compare, time in turns, and say the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.pdb"))
    if not files:
        print(f"no PDB files in {options.folder}: nothing was measured", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    for path in files:
        check_equal(path)
    rounds = [(seconds(by_scan, files), seconds(by_biopython, files)) for _ in range(options.runs)]
    ours, theirs = (statistics.median(column) / len(files) for column in zip(*rounds, strict=True))
    ratios = [other / mine for mine, other in rounds]
    result = {
        "what": "scan of real PDB complexes against Biopython to the same arrays, CPU time of one core",
        "files": len(files),
        "runs": options.runs,
        "ours_per_core_s": round(1 / ours, 1),
        "biopython_per_core_s": round(1 / theirs, 1),
        "ratio_median": round(statistics.median(ratios), 1),
        "ratio_min": round(min(ratios), 1),
        "reach": REACH,
    }
    print(f"{len(files)} files, {options.runs} runs: the same arrays")
    print(f"{'':12}{'complexes/s/core':>18}\n{'pipeline':12}{1 / ours:>18.0f}\n{'Biopython':12}{1 / theirs:>18.1f}")
    print(f"ratio {result['ratio_median']}x (lowest {result['ratio_min']}x), to reach {REACH:.0f}x")
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
