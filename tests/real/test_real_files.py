"""Real files: the spectra in pymzml's sources, the structures in those of MDAnalysis and Biopython.

Many programs made these files, and some are broken on purpose. Other readers say what is in them.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Rejection
from tests.real.packages import fetched
from tests.testkit.project import LOCAL, Project, settle, write_config

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

# ---- spectra ----

MS2 = 1120  # spectra of BSA1.mzML.gz, as its own text says
ANNOUNCED = 1684  # with those of MS level 1
READER = {"data__source": "reader", "data__reader": "pipeline.readers.spectra:Spectra", **LOCAL}
# Of each spectrum, by its scan: the precursor's m/z and charge, then its peaks.
BY_PYMZML = """
import importlib.metadata, sys, warnings
import numpy as np
importlib.metadata.version = lambda name: "2.6.1"  # it is not installed
import pymzml
warnings.simplefilter("ignore")
found = {}
for spectrum in pymzml.run.Reader(sys.argv[1]):
    if spectrum.ms_level == 2:
        ion = spectrum.selected_precursors[0]
        peaks = np.array(spectrum.peaks("raw"), np.float64).reshape(-1, 2)
        found[f"{spectrum.ID}"] = np.vstack([[[ion["mz"], ion.get("charge", 0) or 0]], peaks])
np.savez(sys.argv[2], **found)
"""


@pytest.fixture(scope="module")
def pymzml() -> Path:
    """The unpacked sources of pymzml."""
    return next(fetched("pymzml==2.6.1 sdist").glob("pymzml-*"))


@pytest.fixture(scope="module")
def bsa(pymzml: Path) -> Path:
    """A run of an LTQ Orbitrap, packed."""
    return pymzml / "tests/data/BSA1.mzML.gz"


@pytest.fixture(scope="module")
def theirs(pymzml: Path, bsa: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What pymzml reads."""
    to = tmp_path_factory.mktemp("pymzml") / "found.npz"
    subprocess.run([sys.executable, "-c", BY_PYMZML, bsa, to], cwd=pymzml, check=True, capture_output=True)
    with np.load(to) as found:
        return dict(found)


def scan_spectra(folder: Path, path: Path, **options: Any) -> Project:
    """Write a project of a file of spectra, or of a folder of such files."""
    write_config(folder, data__path=str(path), data__options=options, data__max_rejected_fraction=1, **READER)
    return Project(folder)


def rejected(project: Project) -> list[dict[str, Any]]:
    """Return what the newest run rejected."""
    return [json.loads(line) for line in project.run.rejected.read_text().splitlines()]


def bits(found: Entry) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in found.arrays.items()}


def test_each_of_the_1120_spectra_of_a_packed_run_is_accepted(bsa: Path, tmp_path: Path) -> None:
    project = scan_spectra(tmp_path, bsa)
    assert project.submits("scan").code == 0
    assert rejected(project) == []
    listed = project.types("data", "items", "--json")
    assert (listed.code, len(listed.json())) == (0, MS2)
    (scan,) = project.types("status", "--json").json()["stages"]
    assert max(task["host_peak_bytes"] for task in scan["figures"].values()) < 256 << 20


def test_their_peaks_are_those_that_pymzml_reads(bsa: Path, theirs: dict[str, Any]) -> None:
    every, usual = Spectra(bsa, max_peaks=5000), Spectra(bsa)
    assert len(theirs) == MS2
    for entry, fewer in zip(every.entries(), usual.entries(), strict=True):
        assert isinstance(entry, Entry)
        assert isinstance(fewer, Entry)
        (mz, charge), *_ = rows = theirs[entry.id.rpartition("-")[2]]
        peaks = rows[1:][rows[1:, 1] > 0]
        assert entry.arrays["precursor_mz"] == np.float32(mz)
        assert entry.arrays["charge"] == charge
        relative = (peaks[:, 1] / peaks[:, 1].max()).astype(np.float32)
        order = np.argsort(peaks[:, 0].astype(np.float32), kind="stable")
        read = every.read(entry.place)
        assert np.array_equal(read["peaks.mz"], peaks[order, 0].astype(np.float32))
        assert np.array_equal(read["peaks.intensity"], relative[order])
        kept = np.sort(np.sort(relative)[::-1][:100])
        assert np.array_equal(np.sort(fewer.arrays["peaks.intensity"]), kept)


def damaged(data: bytes, how: str) -> bytes:
    """Return a packed file with one damage."""
    at = {"flipped": len(data) // 2, "checksum": len(data) - 6, "head": 3}.get(how)
    if at is None:
        return data[: {"half": len(data) // 2, "end": len(data) - 4, "empty": 0}[how]]
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("how", ["half", "end", "flipped", "checksum"])
def test_a_damaged_packed_file_is_refused_by_name(bsa: Path, tmp_path: Path, how: str) -> None:
    path = tmp_path / "data" / "BSA1.mzML.gz"
    path.parent.mkdir()
    path.write_bytes(damaged(bsa.read_bytes(), how))
    settle(path.parent)
    project = scan_spectra(tmp_path, path)
    done = project.submits("scan")
    assert done.code == 3
    assert "BSA1.mzML.gz" in done.err
    assert "gzip -t" in done.err


LEVEL2 = b'name="ms level" value="2"'
SPECTRUM, ITS_END = b"<spectrum ", b"</spectrum>"


def truncated(text: bytes, where: str) -> bytes:
    """Return the first part of a file of spectra: up to one of MS level 1, or up to the 600th of level 2."""
    parts = text.split(LEVEL2)
    if where == "MS1":  # which all come first
        return text[: parts[0].rindex(b"<binary>", 0, len(parts[0]) // 2)]
    end = ITS_END if where == "between" else b"<binary>"
    return LEVEL2.join(parts[:600]) + LEVEL2 + parts[600][: parts[600].index(end) + len(end)]


@pytest.mark.parametrize(("where", "accepted", "broken"), [("MS1", 0, 0), ("MS2", 599, 1), ("between", 600, 0)])
def test_a_truncated_file_loses_no_spectrum_without_a_reason(
    bsa: Path, tmp_path: Path, where: str, accepted: int, broken: int
) -> None:
    path = tmp_path / "data" / "BSA1.mzML"
    path.parent.mkdir()
    path.write_bytes(text := truncated(gzip.decompress(bsa.read_bytes()), where))
    settle(path.parent)
    project = scan_spectra(tmp_path, path)
    assert project.submits("scan").code == (0 if accepted else 3)
    missing = [
        each for each in rejected(project) if each["detail"].startswith(f"{ANNOUNCED - text.count(SPECTRUM):,} ")
    ]
    assert [each["reason"] for each in missing] == ["bad_entry"]
    assert sum(each["id"].startswith("BSA1.mzML-scan-") for each in rejected(project)) == broken
    found = [entry for entry in Spectra(path).entries() if isinstance(entry, Entry)]
    assert len(found) == accepted
    whole = (entry for entry in Spectra(bsa).entries() if isinstance(entry, Entry))
    assert [bits(entry) for entry, _ in zip(whole, found, strict=False)] == [bits(entry) for entry in found]


def test_a_flipped_byte_changes_nothing_but_its_own_spectrum(bsa: Path, tmp_path: Path) -> None:
    """Peaks without a checksum hide a flipped byte; the spectrum may then be another one, but it is the only one."""
    first, *parts = gzip.decompress(bsa.read_bytes()).split(LEVEL2)[:80]
    begin, spectrum = first.index(SPECTRUM), first.rindex(SPECTRUM)
    head = first[:begin].replace(b'count="1684"', f'count="{len(parts)}"'.encode())
    text = LEVEL2.join([head + first[spectrum:], *parts])
    text = text[: text.rindex(SPECTRUM)] + b"</spectrumList></run></mzML>\n"
    path, draw = tmp_path / "x.mzML", random.Random(1)
    path.write_bytes(text)
    whole = [bits(entry) for entry in Spectra(path).entries() if isinstance(entry, Entry)]
    assert len(whole) == len(parts)
    unseen = 0
    for _ in range(100):
        at = draw.randrange(len(head), len(text))
        path.write_bytes(text[:at] + bytes([text[at] ^ 1 << draw.randrange(8)]) + text[at + 1 :])
        found = list(Spectra(path).entries())
        others = [entry for entry in found if isinstance(entry, Rejection) or bits(entry) not in whole]
        assert len(found) - len(others) >= len(whole) - 1
        unseen += len(others) == 1 and isinstance(others[0], Entry)
        assert others or len(found) == len(whole)
    assert 0 < unseen < 60


PEAK_BYTES = """
import resource, sys
from pathlib import Path
from pipeline.readers.spectra import Spectra
spectra = Spectra(Path(sys.argv[1]))
print(sum(1 for _ in spectra.entries()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


def test_memory_does_not_grow_with_the_file(bsa: Path, tmp_path: Path) -> None:
    text = gzip.decompress(bsa.read_bytes())
    first, last = text.index(b"<spectrum "), text.rindex(b"</spectrum>") + len(b"</spectrum>\n")
    peaks = []
    for times in (1, 6):
        path = tmp_path / f"x{times}.mzML.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.writelines([text[:first], *[text[first:last]] * times, text[last:]])
        done = subprocess.run(
            [sys.executable, "-c", PEAK_BYTES, path], capture_output=True, text=True, check=True
        ).stdout.split()
        assert int(done[0]) == times * MS2
        peaks.append(int(done[1]))
    assert peaks[1] - peaks[0] < 16 << 20


# ---- structures ----

FORMS = {
    "pdb": ("**/*.pdb", "**/*.ent"),
    "packed pdb": ("**/*.pdb.gz",),
    "cif": ("**/*.cif",),
    "packed cif": ("**/*.cif.gz",),
    "others": ("**/*.prmtop", "**/*.parm7", "**/*.mol2", "**/*.sdf", "**/*.pdb.bz2", "**/*.mmtf"),
}
UNKNOWN = (".bz2", ".mmtf")
# What is in each file that is refused, as one sees in it or other programs say.
REFUSED = {
    # only waters, lipids, small molecules, ions, or beads
    **dict.fromkeys(
        (
            "mdanalysis/5digitResid.pdb",
            "mdanalysis/RANDOM_WALK_TOPO.pdb",
            "mdanalysis/cryst_then_model.pdb",
            "mdanalysis/fullerene.pdb.gz",
            "mdanalysis/merge/2zmm/ligand.pdb",
            "mdanalysis/merge/2zmm/water.pdb",
            "mdanalysis/model_then_cryst.pdb",
            "mdanalysis/pdbqt_querypdb.pdb",
            "mdanalysis/water_methane_acetic-acid_ammonia.pdb",
            "mdanalysis/xl_serial.pdb",
            "mdanalysis/Amber/ace_mbondi3.error4.parm7",  # a cap without a residue; the wrong line is a comment
            "mdanalysis/Amber/ace_mbondi3.parm7",
            "mdanalysis/Amber/ace_tip3p.parm7",
            "mdanalysis/Amber/chitosan.prmtop",
            "mdanalysis/Amber/parmed_fad.prmtop",
            "biopython/PDB/ions.pdb",
        ),
        "no_polymer",
    ),
    # single atoms of residues, none of them a CA
    **dict.fromkeys(
        (
            "mdanalysis/CONECT2TER.pdb",  # calcium by its column, in a residue of no known name
            "mdanalysis/SINGLECONECT.pdb",
            "mdanalysis/conect_parsing.pdb",
            "mdanalysis/sameresid_diffresname.pdb",
            "biopython/PDB/1SSU_mod.cif",
            "biopython/PDB/1SSU_mod.pdb",
        ),
        "incomplete_residues",
    ),
    # broken
    "mdanalysis/incomplete.pdb": "parse_error",  # two models with one number
    "mdanalysis/varying_occ_tmp.pdb": "parse_error",  # a model without an end
    "mdanalysis/Amber/ace_mbondi3.error1.parm7": "parse_error",  # begins with %ERROR
    "mdanalysis/Amber/ace_mbondi3.error2.parm7": "parse_error",  # ends before its numbers
    "mdanalysis/Amber/ace_mbondi3.error3.parm7": "parse_error",  # a name more than atoms
    "mdanalysis/Amber/ace_mbondi3.negative.parm7": "parse_error",  # atomic number -1
    "mdanalysis/mol2/BrokenMolecule.mol2": "parse_error",
    "mdanalysis/mol2/sodium_ion.mol2": "parse_error",  # one atom, at 0
    "mdanalysis/mol2/test_crysin.mol2": "parse_error",
    "biopython/PDB/a_structure.cif.gz": "parse_error",  # begins without data_
    # no ATOM at all
    **dict.fromkeys(
        (
            "biopython/PDB/1MOM_min.cif",
            "biopython/PDB/4Q9R_min.cif",
            "biopython/PDB/d256ba_.ent",
            "biopython/PDB/header.pdb",
        ),
        "no_atoms",
    ),
    # of another kind than the name says
    "mdanalysis/cryst_then_model.pdb.gz": "unknown_format",  # a tar
    "mdanalysis/model_then_cryst.pdb.gz": "unknown_format",
    # several molecules, of which none is named
    "mdanalysis/mol2/Molecules.mol2": "ambiguous_partners",
    "mdanalysis/mol2/Molecule_comments_header.mol2": "ambiguous_partners",
}
# Where Biopython counts other residues with a CA or C1'.
OTHERWISE = {
    "mdanalysis/1grm_single.pdb": "an ethanolamine at the end of each chain",
    "mdanalysis/capping/maestro_aaqaa_capped.pdb": "a cap, NMA",
    "mdanalysis/capping/nma.pdb": "a cap, NMA",
    "mdanalysis/chainIDrepeat.pdb.gz": "a residue that occurs twice is one",
    "mdanalysis/mmcif/multimodel_warning.cif.gz": "an inhibitor with a CA in each chain",
    "mdanalysis/nucl_res.pdb": "nucleotides of one atom, CA, by many names",
    "biopython/PDB/7CFN.cif.gz": "a palmitic acid with a CA",
    "biopython/PDB/7CFN_aligned.cif.gz": "a palmitic acid with a CA",
}
POINTERS = re.compile(rb"%FLAG POINTERS\s*\n%FORMAT[^\n]*\n(?:%[^\n]*\n)*\s*(\d+)")


@pytest.fixture(scope="module")
def structures(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of the structures in both packages; topologies without coordinates get some that are drawn."""
    folder = tmp_path_factory.mktemp("structures")
    trees = {
        "mdanalysis": next(fetched("mdanalysistests==2.11.0 sdist").glob("*/MDAnalysisTests/data")),
        "biopython": fetched("apt:python-biopython-doc") / "usr/share/doc/python-biopython-doc/Tests",
    }
    for name, tree in trees.items():
        for pattern in (pattern for patterns in (*FORMS.values(), ("**/*.rst7",)) for pattern in patterns):
            for path in tree.glob(pattern):
                copy = folder / "data" / name / path.relative_to(tree)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
                if path.suffix in (".parm7", ".prmtop") and not path.with_suffix(".rst7").exists():
                    write_coordinates(copy)
    settle(folder / "data/mdanalysis")
    structure = {"data__source": "glob", "data__path": "data", "data__partners": "none"}
    write_config(folder, **structure, data__max_rejected_fraction=1, **LOCAL)
    return Project(folder)


def write_coordinates(topology: Path) -> None:
    """Write as many atoms as a topology says to a restart file next to it."""
    found = POINTERS.search(topology.read_bytes())
    numbers = np.random.default_rng(1).uniform(0, 99, 3 * int(found[1] if found else 1))
    lines = ["".join(f"{number:12.7f}" for number in numbers[at : at + 6]) for at in range(0, len(numbers), 6)]
    topology.with_suffix(".inpcrd").write_text("\n".join(["drawn", f"{len(numbers) // 3:6d}", *lines, ""]))


Found = tuple[dict[str, str], dict[str, dict[str, str]]]


def runs(project: Project, stage: str, *words: str) -> Iterator[Found]:
    """Run a stage on the files of each form; yield the reasons and the rows of the inventory, by file."""
    for patterns in FORMS.values():
        done = project.submits(stage, "--set", f"data.pattern={json.dumps(patterns)}", *words)
        with project.run.inventory.open(newline="") as file:
            rows = {row["origin"]: row for row in csv.DictReader(file)}
        assert done.code == (0 if rows else 3), done.err
        yield {each["origin"]: each["reason"] for each in rejected(project)}, rows


@pytest.fixture(scope="module")
def scanned(structures: Project) -> Found:
    """What a scan says of each file."""
    reasons: dict[str, str] = {}
    rows: dict[str, dict[str, str]] = {}
    for some, more in runs(structures, "scan"):
        reasons |= some
        rows |= more
    return reasons, rows


def test_each_file_is_read_or_refused_for_what_is_in_it(structures: Project, scanned: Found) -> None:
    reasons, rows = scanned
    data = structures.folder / "data"
    files = (path for path in data.rglob("*") if path.suffix not in (".inpcrd", ".rst7") and path.is_file())
    known = {str(path.relative_to(data)) for path in files}
    assert {*reasons, *rows} == known
    expected = REFUSED | {name: "unknown_format" for name in known if name.endswith(UNKNOWN)}
    assert {name: reason for name, reason in reasons.items() if expected.get(name) != reason} == {}
    assert {name: reason for name, reason in expected.items() if name in known and name not in reasons} == {}


def test_formats_of_one_id_collide_and_the_first_stays(structures: Project) -> None:
    patterns = [pattern for form in ("pdb", "packed pdb", "cif", "packed cif") for pattern in FORMS[form]]
    done = structures.submits("scan", "--set", f"data.pattern={json.dumps(patterns)}")
    assert done.code == 0
    twice = {each["origin"] for each in rejected(structures) if each["reason"] == "duplicate_id"}
    data, seen = structures.folder / "data", dict[str, str]()
    paths = sorted(str(path.relative_to(data)) for pattern in patterns for path in data.glob(pattern))
    first = [seen.setdefault(re.sub(r"\.(pdb|ent|cif)(\.gz)?$", "", path), path) for path in paths]
    assert twice == {path for path, kept in zip(paths, first, strict=True) if path != kept}
    assert len(twice) > 5


def by_biopython(path: Path) -> dict[str, int]:
    """Return how many residues of each chain of the first model have a CA or a C1'."""
    from Bio.PDB import MMCIFParser, PDBParser

    parser = MMCIFParser(QUIET=True) if ".cif" in path.suffixes else PDBParser(PERMISSIVE=True, QUIET=True)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        model = next(iter(parser.get_structure("x", file)))
    counts = {}
    for chain in model:
        residues = [residue for residue in chain if residue.id[0] != "W" and residue.get_resname().strip() != "CA"]
        if count := sum(any(name in residue for name in ("CA", "C1'", "C1*")) for residue in residues):
            counts[chain.id.strip() or "_"] = count
    return counts


def test_chains_and_residues_are_those_that_biopython_counts(structures: Project, scanned: Found) -> None:
    differ = {}
    for name, row in scanned[1].items():
        if re.search(r"\.(pdb|ent|cif)(\.gz)?$", name):
            theirs = by_biopython(structures.folder / "data" / name)
            ours = ({*row["whole"].split()}, int(row["residues"]) - int(row["left_out"]))
            if ours != ({*theirs}, sum(theirs.values())):
                differ[name] = (ours, theirs)
    assert {name: found for name, found in differ.items() if name not in OTHERWISE} == {}
    assert {name for name in OTHERWISE if name in scanned[1]} == {*differ}


def test_a_file_is_a_complex_if_it_has_two_chains(structures: Project, scanned: Found) -> None:
    complexes = 0
    for reasons, rows in runs(structures, "scan", "--set", "data.partners=auto"):
        for name, row in rows.items():
            complexes += 1
            assert len(scanned[1][name]["whole"].split()) == 2
            assert row["receptor"] != row["ligand"]
        alone = {name for name, reason in reasons.items() if reason == "ambiguous_partners"} - {*REFUSED}
        assert all(len(scanned[1][name]["whole"].split()) != 2 for name in alone)
    assert complexes > 5


ONE_RESIDUE = (
    "biopython/PDB/a_structure.pdb.gz",
    "biopython/PDB/occupancy.pdb",
    "mdanalysis/Amber/capped-ala.prmtop",
    "mdanalysis/align.pdb",
    "mdanalysis/capping/ace.pdb",
    "mdanalysis/capping/nma.pdb",
    "mdanalysis/conect_error.pdb",
    "mdanalysis/elements.pdb",
    "mdanalysis/testENT.ent",
)
NO_PROTEIN = (
    "mdanalysis/analysis/1k5i_c36.pdb.gz",
    "mdanalysis/mol2/Ligand.mol2",
    "mdanalysis/mol2/Molecule.mol2",
    "mdanalysis/mol2/zinc_856218.mol2",
    "mdanalysis/molecule.sdf",
    "mdanalysis/nucl_res.pdb",
)
NO_GRAPH = {
    "residue": {
        **dict.fromkeys(ONE_RESIDUE, "no_edges"),
        **dict.fromkeys(NO_PROTEIN, "no_nodes"),
        "mdanalysis/chainIDrepeat.pdb.gz": "coincident_atoms",  # a residue occurs twice
    },
    "atom": {
        "mdanalysis/align.pdb": "no_edges",  # one atom of a proline
        "mdanalysis/chainIDrepeat.pdb.gz": "coincident_atoms",
        "mdanalysis/nucl_res.pdb": "coincident_atoms",
        # bonds of 90 Å and more, by the coordinates that are drawn
        "mdanalysis/Amber/ache.prmtop": "parse_error",
        "mdanalysis/Amber/bala.prmtop": "parse_error",
        "mdanalysis/Amber/capped-ala.prmtop": "parse_error",
        "mdanalysis/Amber/cpptraj_traj.prmtop": "parse_error",
    },
}


@pytest.mark.parametrize("nodes", [*NO_GRAPH])
def test_graphs_are_made_of_what_a_scan_accepts(structures: Project, scanned: Found, nodes: str) -> None:
    refused: dict[str, str] = {}
    for reasons, _ in runs(structures, "graph", "--set", f"graph.nodes={nodes}"):
        refused |= {name: reason for name, reason in reasons.items() if name in scanned[1]}
    assert refused == {name: reason for name, reason in NO_GRAPH[nodes].items() if name in scanned[1]}
