"""The files of docked complexes that stage predict writes: structures of the best poses, and tables of all poses.

    poses.csv               a line a pose: its rank, confidence and, where the truth is known, its distance from it
    summary.csv             how near the truth the first poses of complexes are, and how many are near it
    pictures.json           the same as curves for the HTML report of the run
    1ABC/rank-01.pdb        the input structure with its ligand moved; mmCIF if any of the input files is
    1ABC/rank-01-way.pdb    the ligand after each step, with `trajectory`

Shapes: P poses of a complex, N atoms of the ligand.
"""

from __future__ import annotations

import json
import logging
import math
import string
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemmi
import numpy as np

from pipeline.errors import DataError
from pipeline.files import write_whole
from pipeline.protocol import PICTURES
from pipeline.records import Reason, Role
from pipeline.structures.atoms import BLANK_CHAIN, UnusableInput
from pipeline.structures.inventory import examine_item
from pipeline.structures.parsing.read_structure import PDB_LINE_LENGTH, PLAIN, FileReading, read_on
from pipeline.structures.parsing.structure_files import format_of, plain_files
from pipeline.structures.sources.item_ids import KIND
from pipeline.tasks.docking.pose_quality import (
    CLASH,
    CONTACT,
    PoseRow,
    docking_truth,
    heavy_positions,
    moved,
    near_counts,
    pose_quality,
    pose_rows,
    ranked,
    summaries,
)
from pipeline.tasks.docking.rigid_diffusion import RMSDS
from pipeline.tasks.task_parts import task_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Item, Part
    from pipeline.structures.inventory import Complex, ScanRecipe
    from pipeline.structures.parsing.structure_files import File


WRITTEN = ("pdb", "mmcif")  # the formats that poses are written in
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
PAIRS = [first + second for first in string.ascii_uppercase for second in string.ascii_uppercase]
NAMES = {".pdb": [*LETTERS], ".cif": [*string.ascii_uppercase, *PAIRS]}  # for chains that are renamed
REMARK_LENGTH = 69
LIGAND, OTHER, DROPPED = "L", "O", "-"  # flags of residues


@dataclass(frozen=True, slots=True)
class DockedComplex:
    """An item that was docked, as it was read, and the bytes of its files by path."""

    item: Item
    read: Complex
    files: Mapping[str, File]
    reading: FileReading = PLAIN
    has_truth: bool = True  # the input is bound, or bound structures are named


@dataclass(frozen=True, slots=True)
class PosedFile:
    """The structure of a complex, whose ligand has flagged residues."""

    structure: gemmi.Structure
    suffix: str
    pos_N3: NDArray[np.float64]  # of the ligand, as it was read
    document: gemmi.cif.Document | None  # of a single mmCIF file: its other categories
    notes: tuple[str, ...]  # differences from the files

    def pose(self, move_12: NDArray[np.float64], remarks: Sequence[str]) -> bytes:
        """Return the file in which the ligand has made a move."""
        _place(self.structure[0], moved(self.pos_N3, move_12[None])[0])
        if self.document is None:
            return self._text(self.structure, remarks)
        groups = gemmi.MmcifOutputGroups(all=False, atoms=True, group_pdb=True, auth_all=True)
        self.structure.update_mmcif_block(_block(self.document), groups)
        return self._as_cif(self.document, remarks)

    def trajectory(self, move_S12: NDArray[np.float64], remarks: Sequence[str]) -> bytes:
        """Return a file of several models, the ligand after each move."""
        alone = self.structure.clone()
        _drop(alone[0], OTHER)
        for number, pos_N3 in enumerate(moved(self.pos_N3, move_S12), start=1):
            model = alone[0].clone()
            model.num = number
            _place(model, pos_N3)
            alone.add_model(model)
        del alone[0]
        return self._text(alone, remarks)

    def _text(self, structure: gemmi.Structure, remarks: Sequence[str]) -> bytes:
        if self.suffix == ".cif":
            return self._as_cif(structure.make_mmcif_document(), remarks)
        known = structure.raw_remarks
        texts = [text.encode("ascii", "replace").decode() for text in (*remarks, *self.notes)]
        pieces = (text[at : at + REMARK_LENGTH] for text in texts for at in range(0, len(text), REMARK_LENGTH))
        structure.raw_remarks = [*known, *(f"REMARK  99 {piece}" for piece in pieces)]
        options = gemmi.PdbWriteOptions(
            preserve_serial=bool(structure.conect_map), conect_records=True, cryst1_record=structure.cell.is_crystal()
        )
        text = structure.make_pdb_string(options)
        structure.raw_remarks = known
        return text.encode()

    def _as_cif(self, document: gemmi.cif.Document, remarks: Sequence[str]) -> bytes:
        comments = (f"# {' '.join(text.split())}\n" for text in (*remarks, *self.notes))
        return ("".join(comments) + document.as_string()).encode()


def posed_file(docked: DockedComplex) -> PosedFile:
    """Return a complex as one file; of two, the ligand's chains are renamed if need be."""
    item, reading = docked.item, docked.reading
    if reading.assembly is not None:
        problem = "poses are written from the text of the files, which has no assembly copies"
        remedy = "write the assembly to its own file, and unset structures.assembly"
        raise DataError(problem, item=item.id, remedy=remedy)
    parts: dict[tuple[str, int], list[Part]] = {}
    for part in sorted(item.parts, key=lambda part: part.role is Role.LIGAND):
        parts.setdefault((part.path, part.model or reading.model), []).append(part)
    documents: list[gemmi.cif.Document | None] = []
    structures: list[gemmi.Structure] = []
    for (path, model), own in parts.items():
        data = docked.files[path].data
        if (form := format_of(Path(path))) not in WRITTEN:
            problem, remedy = "poses can be written only for PDB and mmCIF files", "convert the file to one of them"
            raise DataError(problem, where=path, remedy=remedy)
        documents.append(gemmi.cif.read_string(data) if form == "mmcif" else None)
        structures.append(_structure(data, documents[-1], model))
        _flag(structures[-1][0], own, docked)
    suffix = ".cif" if any(documents) else ".pdb"
    whole, *more = structures
    notes = tuple(note for ligand in more for note in _join(whole, ligand, NAMES[suffix]))
    pos = [atom.pos.tolist() for atom in _ligand(whole[0])]
    if not pos:
        raise DataError("no atom of the ligand was found in its file", item=item.id)
    return PosedFile(whole, suffix, np.array(pos, np.float64), None if more else documents[0], notes)


def _block(document: gemmi.cif.Document) -> gemmi.cif.Block:
    """Return the first block that has atoms."""
    return next(block for block in document if block.find_values("_atom_site.id"))


def _structure(data: bytes, document: gemmi.cif.Document | None, number: int) -> gemmi.Structure:
    """Return one model of a file."""
    if document is None:
        structure = gemmi.read_pdb_string(read_on(data)[0], max_line_length=PDB_LINE_LENGTH)
        structure.setup_entities()
    else:
        structure = gemmi.make_structure_from_block(_block(document))
    for index in reversed(range(len(structure))):
        if index != number - 1:
            del structure[index]
    return structure


def _flag(model: gemmi.Model, parts: Sequence[Part], docked: DockedComplex) -> None:
    """Flag residues by their side, and remove those of neither, unless the file holds both.

    A chain's waters and molecules are of its side, unless they are named singly. Where chains go by their labels, those
    of waters and molecules are others: they go with the chain that authors give them to.
    """
    sides, by_label = docked.read.sides, docked.reading.chain_names == "label"
    roles = [role for part in parts for role in (sides if part.role is Role.COMPLEX else (part.role,))]
    side_of = {chain.name: role for role in roles for chain in sides[role].chains}
    is_whole = len(roles) == 1 and not parts[0].chains
    found: list[tuple[gemmi.Residue, str, Role | None]] = []
    of_chain: dict[str, set[Role]] = defaultdict(set)
    for chain in model:
        for residue in chain:
            own = (residue.subchain if by_label else chain.name) or BLANK_CHAIN
            role = side_of.get(f"{own}:{residue.name}:{residue.seqid}") or side_of.get(own)
            found.append((residue, chain.name, roles[0] if is_whole else role))
            of_chain[chain.name] |= {role} if role else set()
    for residue, name, role in found:
        if role is None and by_label and len(of_chain[name]) == 1:
            (role,) = of_chain[name]
        residue.flag = LIGAND if role is Role.LIGAND else OTHER if role or len(roles) > 1 else DROPPED
    _drop(model, DROPPED)
    for atom in _ligand(model):
        atom.aniso = gemmi.SMat33f(0, 0, 0, 0, 0, 0)  # it would have to turn


def _ligand(model: gemmi.Model) -> Iterator[gemmi.Atom]:
    return (atom for chain in model for residue in chain if residue.flag == LIGAND for atom in residue)


def _drop(model: gemmi.Model, flag: str) -> None:
    for chain in model:
        for index in reversed(range(len(chain))):
            if chain[index].flag == flag:
                del chain[index]


def _place(model: gemmi.Model, pos_N3: NDArray[np.float64]) -> None:
    for atom, place in zip(_ligand(model), pos_N3.tolist(), strict=True):
        atom.pos = gemmi.Position(*place)


def _join(whole: gemmi.Structure, ligand: gemmi.Structure, names: Sequence[str]) -> list[str]:
    """Add a ligand's file to the receptor's; return which of its chains have new names."""
    taken, own = ({chain.name: None for chain in structure[0]} for structure in (whole, ligand))
    clashing, free = [name for name in own if name in taken], [name for name in names if name not in {*taken, *own}]
    if len(free) < len(clashing):
        problem = f"receptor and ligand have {len({*taken, *own})} chains, too many for a PDB file"
        raise DataError(problem, remedy="give both as mmCIF")
    new = dict(zip(clashing, free, strict=False))
    for old, name in new.items():
        ligand.rename_chain(old, name)
    for residue in (residue for chain in ligand[0] for residue in chain):
        residue.subchain, residue.entity_id = f"L{residue.subchain}", f"L{residue.entity_id}"
    for entity in ligand.entities:
        entity.name, entity.subchains = f"L{entity.name}", [f"L{name}" for name in entity.subchains]
    last = max((row.atom.serial for row in whole[0].all()), default=0) + 1
    for row in ligand[0].all():
        row.atom.serial += last
    for serial, partners in ligand.conect_map.items():
        for partner in {*partners}:
            if serial < partner or serial not in ligand.conect_map.get(partner, ()):  # bonds are named from both ends
                whole.add_conect(serial + last, partner + last, partners.count(partner))
    for chain in ligand[0]:
        whole[0].add_chain(chain)
    for name in ("entities", "connections", "cispeps", "helices", "sheets", "mod_residues"):
        getattr(whole, name).extend(getattr(ligand, name))
    return [f"LIGAND CHAIN {old or BLANK_CHAIN} IS RENAMED {name}" for old, name in new.items()]


log = logging.getLogger(__name__)

TABLE, SUMMARY = "poses.csv", "summary.csv"
SHOWN = range(31)  # Å
RANKS_SHOWN = 30
QUARTILES = {"a quarter is below": 25, "half is below": 50, "three quarters are below": 75}
MOVE, CONFIDENCE, TRAJECTORY = "move", "confidence", "trajectory"
UNJUDGED = "no confidence"
TRUTH = (*RMSDS, "fnat", "irmsd", "lrmsd", "dockq", "capri")


def publish_poses(
    folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: ScanRecipe, top: int
) -> list[Path]:
    """Write the files of all complexes that have poses; return them."""
    poses_of = defaultdict[str, dict[int, PoseRow]](dict)  # by their place among the outputs
    for place, row in enumerate(pose_rows(outputs, MOVE)):
        poses_of[row.complex][place] = row
    known = {row.complex for row in pose_rows(outputs, RMSDS[0])}
    absent = {*(() if CONFIDENCE in outputs else (CONFIDENCE,)), *(() if known else TRUTH)}
    names = [name for name in PoseRow._fields if name not in absent]
    files = plain_files(reading.max_file_bytes, reading.paths)
    written: list[Path] = []
    compared: list[PoseRow] = []
    kind_of: dict[str, str] = {}
    with task_table(folder / TABLE, names) as add:
        for item in items:
            if item.id not in poses_of:
                continue
            poses = {place: row._replace(split=item.split) for place, row in poses_of[item.id].items()}
            try:
                content = files.of(item)
                taken, read = examine_item(item, content, reading)
                if read is None:
                    raise UnusableInput(taken.reason or Reason.NO_NODES, taken.detail)
                docked = DockedComplex(item, read, content, reading.reading, has_truth=item.id in known)
                move_P12 = np.stack([outputs[MOVE][place] for place in poses])
                way_of = {row.sample: outputs[TRAJECTORY][at] for at, row in poses.items() if TRAJECTORY in outputs}
                rows = write_docked(folder, docked, [*poses.values()], move_P12, top=top, way_of=way_of)
            except (DataError, UnusableInput) as error:
                what = error.what if isinstance(error, DataError) else error.detail
                log.warning("%s: no poses are written: %s", item.id, what)
                rows = [PoseRow(item.id, item.split, sample=row.sample, problem=what) for row in poses.values()]
            else:
                compared += rows if docked.has_truth else []
                kind_of[item.id] = item.labels.get(KIND, "")
                written += [folder / row.file for row in rows if row.file]
                written += [folder / way_file(row.file) for row in rows if row.file and way_of]
            for row in rows:
                add(getattr(row, name) for name in names)
    if compared:
        summary = summaries(compared, kind_of)
        with task_table(folder / SUMMARY, summary[0]) as add:
            for line in summary:
                add(line.values())
        write_whole(folder / PICTURES, json.dumps(pictures(compared)))
        written += [folder / SUMMARY, folder / PICTURES]
    return [folder / TABLE, *written]


def write_docked(
    folder: Path,
    docked: DockedComplex,
    poses: Sequence[PoseRow],
    move_P12: NDArray[np.float64],
    *,
    top: int = 5,
    way_of: Mapping[int, NDArray[np.float64]] | None = None,
) -> list[PoseRow]:
    """Write the best poses of a complex as `ID/rank-01.pdb` and so on; return a row of each pose, the best first.

    `way_of` has the moves of each sample after each step, which are written too: to open together with the receptor.
    """
    text, home = posed_file(docked), folder / docked.item.id
    home.mkdir(parents=True, exist_ok=True)
    if any(not math.isnan(pose.confidence) for pose in poses):
        poses = [pose._replace(problem=pose.problem or UNJUDGED * math.isnan(pose.confidence)) for pose in poses]
    places = {pose.sample: place for place, pose in enumerate(poses)}
    rows = ranked(poses)
    useful = [places[row.sample] for row in rows if not row.problem]
    written = set[Path]()
    for place, measures in enumerate(_measured(docked, move_P12[np.array(useful, np.int64)])):
        row = rows[place] = rows[place]._replace(**measures)
        if place >= top:
            continue
        row = rows[place] = row._replace(file=f"{docked.item.id}/rank-{row.rank:02d}{text.suffix}")
        files = {row.file: text.pose(move_P12[useful[place]], _remarks(docked, text, row))}
        if way_of:
            way_S12 = way_of[row.sample]
            remark = f"LIGAND OF {docked.item.id}: {len(way_S12)} POSES"
            files[way_file(row.file)] = text.trajectory(way_S12, [remark])
        for name, content in files.items():
            write_whole(folder / name, content)
            written.add(folder / name)
    for path in set(home.glob("rank-*")) - written:  # of an earlier, longer list
        path.unlink(missing_ok=True)
    return rows


def way_file(name: str) -> str:
    """Return the file of the way to a pose, by the pose's file."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-way{dot}{suffix}"


def _remarks(docked: DockedComplex, text: PosedFile, row: PoseRow) -> list[str]:
    """Return the remarks at the top of a pose's file."""
    confidence = "NO CONFIDENCE" if math.isnan(row.confidence) else f"CONFIDENCE {row.confidence:.4f}"
    chains = {role: ", ".join(chain.name for chain in side.chains) for role, side in docked.read.sides.items()}
    return [
        f"POSE OF {docked.item.id}: RANK {row.rank}, SAMPLE {row.sample}, {confidence}",
        f"RECEPTOR {chains[Role.RECEPTOR]} AS IT WAS, LIGAND {chains[Role.LIGAND]} MOVED ({len(text.pos_N3)} ATOMS)",
    ]


def _measured(docked: DockedComplex, move_P12: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Return the measures of each pose: contacts, and DockQ's where the true partners touch."""
    receptor, ligand = (heavy_positions(docked.read.sides[role]) for role in (Role.RECEPTOR, Role.LIGAND))
    columns: dict[str, Any] = {
        name: near_counts(receptor, ligand, move_P12, limit).tolist()
        for name, limit in (("contacts", CONTACT), ("clashes", CLASH))
    }
    if docked.has_truth:
        with suppress(UnusableInput):
            columns |= pose_quality(docking_truth(docked.read), move_P12)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def pictures(rows: Sequence[PoseRow]) -> list[dict[str, Any]]:
    """Return the curves of a run's HTML report: the share of complexes within an RMSD, and RMSDs by rank."""
    drawn_rows = [row for row in rows if row.rank is not None and math.isfinite(row.complex_rmsd)]
    if not drawn_rows:
        return []
    by_complex, by_rank = (defaultdict[Any, list[float]](list) for _ in range(2))
    for row in sorted(drawn_rows, key=lambda row: row.rank or 0):
        by_complex[row.complex].append(row.complex_rmsd)
        by_rank[row.rank].append(row.complex_rmsd)
    chosen = {
        "best-ranked pose": [rmsds[0] for rmsds in by_complex.values()],
        "best of all": [min(rmsds) for rmsds in by_complex.values()],
        "every pose": [row.complex_rmsd for row in drawn_rows],
    }
    within = {
        name: [[limit, 100 * sum(rmsd < limit for rmsd in rmsds) / len(rmsds)] for limit in SHOWN]
        for name, rmsds in chosen.items()
    }
    drawn = [_picture("complexes within an RMSD", "Å of complex RMSD", "%", within)]
    if len(by_rank) > 1:
        spread = {
            name: [[rank, float(np.percentile(by_rank[rank], share))] for rank in sorted(by_rank)[:RANKS_SHOWN]]
            for name, share in QUARTILES.items()
        }
        drawn.append(_picture("RMSD by rank", "rank", "Å", spread))
    return drawn


def _picture(title: str, x: str, y: str, curves: Mapping[str, Any]) -> dict[str, Any]:
    lines = [{"name": name, "points": points} for name, points in curves.items()]
    return {"title": title, "x": x, "y": y, "lines": lines}
