"""The sections data, structures, embed and graph: the items and their processing."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import StringConstraints, model_validator

from pipeline.config.schema_parts import AutoCount, Name, Option, Section, Size, setting
from pipeline.device.kinds import DeviceChoice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

ENCODERS = ("auto", "esm2", "esm1b", "esm1v", "esmc")
WORD = r"^[A-Za-z_][A-Za-z0-9_]*$"
Label: TypeAlias = Annotated[str, StringConstraints(pattern=WORD)]
MAIN = "main"  # the name of the encoder of section `embed`; `embed.also` names others

OF_STRUCTURES = (
    "structures_dir", "pattern", "splits", "state", "receptor_chains", "ligand_chains", "partners", "ligand",
    "labels",
)  # fmt: skip
TAKEN = ("receptor", "ligand", "complex", "whole", "cross", "label", "ptr")  # by the parts of a batch
STRUCTURE_PATTERNS = tuple(
    f"**/*.{kind}{packed}" for kind in ("pdb", "ent", "cif", "mmcif", "bcif") for packed in ("", ".gz")
)


class DataSection(Section):
    """Which items to use, and how to find their parts."""

    source: Literal["manifest", "pairs", "sabdab", "pinder", "glob", "fasta", "reader"] = setting(
        "manifest", "Layout of the data set. reader: your own class reads it."
    )
    path: Path = setting(..., "File (manifest, sabdab, pinder, fasta) or folder (pairs, glob) to read.")
    reader: Name | None = setting(
        None, "Class that reads items other than structures, as package.module:Name.", pattern=r"^[\w.]+:\w+$"
    )
    options: dict[Name, Option] = setting({}, "Arguments of the reader's class, by name. It receives path in any case.")
    structures_dir: Path | None = setting(
        None, "Folder of the structure files in a table. null: the folder of the table."
    )
    pattern: tuple[Name, ...] = setting(STRUCTURE_PATTERNS, "Patterns of files below path, for glob.", min_length=1)
    splits: Path | None = setting(None, "Table with the columns id, split and cluster; for pairs: path and split.")
    state: Literal["bound", "unbound"] = setting(
        "bound", "Input structures. unbound (pairs, pinder): labels come from the bound structures."
    )
    receptor_chains: tuple[Name, ...] = setting((), "Chains of the receptor in every file; empty: as the source says.")
    ligand_chains: tuple[Name, ...] = setting((), "Chains of the ligand in every file; empty: as the source says.")
    labels: tuple[Label, ...] = setting(
        (), "Numeric columns that tasks read as item.values[name], for manifest, sabdab and pinder."
    )
    unlabelled: bool = setting(False, "Allow missing label columns, for example to predict them. They are NaN.")
    partners: Literal["auto", "none"] = setting(
        "auto", "Files without named chains. auto: two polymer chains are partners; none: one unit per file."
    )
    ligand: Literal["as_named", "swapped", "smaller", "larger"] = setting(
        "as_named", "Partner that docking moves (the ligand). smaller, larger: by the number of atoms."
    )
    on_leak: Literal["error", "warn", "ignore"] = setting(
        "error", "Action when an id, a sequence or a cluster is in two splits."
    )
    limit: int | None = setting(None, "Use only the first N items, for a trial. null: all.", ge=1)
    max_rejected_fraction: float = setting(
        0.05, "Stop when more than this fraction of the items is rejected.", ge=0, le=1
    )

    def conflicts(self) -> Iterator[Conflict]:
        if shared := sorted(set(self.receptor_chains) & set(self.ligand_chains)):
            yield "ligand_chains", f"{', '.join(shared)} is also in receptor_chains; a chain belongs to one side"
        if self.source == "glob" and self.partners == "auto" and bool(self.receptor_chains) != bool(self.ligand_chains):
            named, other = ("receptor", "ligand") if self.receptor_chains else ("ligand", "receptor")
            problem = f"names only one side of a complex: set data.{other}_chains too, or data.partners: none"
            yield f"{named}_chains", problem
        if self.source == "fasta" and self.ligand != "as_named":
            yield "ligand", "needs complexes, but data.source: fasta has only sequences"
        if taken := sorted(set(self.labels) & set(TAKEN)):
            yield "labels", f"{taken[0]} is reserved for a part of a batch: rename the column"
        if len(set(self.labels)) < len(self.labels):
            yield "labels", "names a column twice"
        if self.source == "reader" and self.reader is None:
            yield "source", "reader needs a class: set data.reader: package.module:Name"
        if self.source != "reader" and (self.reader is not None or self.options):
            key = "options" if self.reader is None else "reader"
            yield key, f"needs data.source: reader, but the source is {self.source}"
        if "path" in self.options:
            yield "options", "path is already passed to the reader as data.path: remove it"
        for key in OF_STRUCTURES if self.source == "reader" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield key, "applies to structures only: pass options of a reader, such as splits, in data.options"


class StructuresSection(Section):
    """How to turn structure files into residues."""

    altlocs: Literal["highest", "first"] = setting(
        "highest", "Alternative location to keep: the highest occupancy, or the first."
    )
    model: int = setting(1, "Model to read from a file with several, counted from 1.", ge=1)
    chain_names: Literal["author", "label"] = setting(
        "author", "Chain names of mmCIF files: author names (as in PDB files) or labels."
    )
    assembly: Name | None = setting(None, 'Name of the biological assembly, such as "1"; null: the asymmetric unit.')
    sequence: Literal["observed", "seqres"] = setting(
        "observed", "Sequence of a chain: residues with coordinates, or all of SEQRES."
    )
    require: Literal["ca", "backbone"] = setting(
        "ca", "Atoms that a residue needs to become a node: CA, or N, CA and C."
    )
    incomplete: Literal["drop", "reject"] = setting(
        "drop", "Residues without these atoms: drop and list them, or reject the complex."
    )
    modified: Literal["parent", "unknown", "reject"] = setting(
        "parent", "Modified residues: use the parent (MSE becomes MET), use X, or reject the complex."
    )
    ligands: Literal["drop", "keep"] = setting(
        "drop", "Small molecules and ions of the chosen chains. keep: for atom graphs."
    )
    plddt: Literal["none", "marked", "every"] = setting(
        "none", "Read B-factors as pLDDT. marked: of files whose header names a prediction; every: of all files."
    )
    min_plddt: float | None = setting(None, "Drop or mask residues below this pLDDT. null: keep all.", ge=0, le=100)
    low_plddt: Literal["drop", "mask"] = setting(
        "drop", "Residues below min_plddt: drop and list them, or keep them as flagged nodes."
    )
    pae: Literal["none", "beside", "required"] = setting(
        "none", "Predicted aligned errors on edges, from a JSON next to each file. required: reject if missing."
    )
    max_residues: int = setting(10_000, "Reject complexes with more residues.", ge=1)
    max_file_bytes: Size = setting(64 << 20, "Reject files larger than this after decompression.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.min_plddt is not None and self.plddt == "none":
            yield "min_plddt", "needs pLDDT values: set structures.plddt: marked (or every)"


class EmbedBatchSection(Section):
    """How to batch sequences for the encoder. Changes speed and memory, never results."""

    policy: Literal["divisor", "tokens"] = setting(
        "divisor", "divisor: equal small batches of at most cap sequences; tokens: fill up to budget."
    )
    cap: AutoCount = setting(4, "Maximum number of sequences in a batch, for divisor. auto: by free memory.")
    budget: AutoCount = setting(
        "auto", "Maximum number of tokens in a batch (residues + 2 per sequence). auto: by free memory."
    )


class LongSequencesSection(Section):
    """How to treat sequences longer than those that the encoder was trained on. ESM-2 has no limit."""

    policy: Literal["full", "windows", "truncate", "error"] = setting(
        "full", "full: encode whole; windows: overlapping windows; truncate: only the start; error: reject."
    )
    length: int = setting(1022, "Window length in residues, and the limit at which the other policies apply.", ge=64)
    overlap: int = setting(256, "Number of residues that neighbouring windows share.", ge=0)

    def conflicts(self) -> Iterator[Conflict]:
        if 2 * self.overlap > self.length:
            yield "overlap", "is more than half of length: use at most half"


class EmbedSection(Section):
    """How to compute embeddings."""

    weights: Path = setting(
        Path("weights/esm2_t33_650M_UR50D.pt"),
        "Checkpoint: fair-esm .pt, ESM C .pth, Hugging Face folder, or .safetensors file.",
    )
    encoder: Name = setting(
        "auto", "Model family: esm2, esm1b, esm1v, esmc, or your class package.module:Name. auto: by the weights."
    )
    options: dict[Name, Option] = setting(
        {}, "Arguments of your encoder class, by name. It receives weights in any case."
    )
    layer: AutoCount = setting("auto", "Layer whose output is stored. auto: the last.")
    cls: bool = setting(False, "Also store the row of the <cls> token (for --pool cls); a new key.")
    context: Literal["chain", "partner"] = setting(
        "chain", "Unit to encode: each chain, or the joined chains of a partner."
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = setting(
        "auto", "Precision. auto: fp16 on a GPU, fp32 on a CPU. bf16 on a CPU applies to matrix products only."
    )
    storage: Literal["auto", "fp32", "fp16", "bf16"] = setting(
        "auto", "Precision of stored embeddings. auto: as computed."
    )
    half_fallback: Literal["fp32", "none"] = setting(
        "fp32", "If half precision is too inaccurate: fp32 recomputes the sequence, none rejects it."
    )
    on_oom: Literal["windows", "cpu"] = setting(
        "windows", "If a single sequence does not fit on the GPU: encode it in windows, or on the CPU."
    )
    device: DeviceChoice = setting("auto", "Device. auto: the GPU if cluster.embed.gpus is not 0.")
    batch: EmbedBatchSection = EmbedBatchSection()
    long: LongSequencesSection = LongSequencesSection()
    also: dict[str, EmbedSection] = setting(
        {}, "Further encoders by name, each with the settings that differ from this section."
    )

    @model_validator(mode="before")
    @classmethod
    def _others_differ_from_this_one(cls, section: Any) -> Any:
        others = section.get("also") if isinstance(section, dict) else None
        if not isinstance(others, dict):
            return section
        shared = {name: value for name, value in section.items() if name != "also"}
        plain = {name: value for name, value in shared.items() if name != "options"}  # options belong to one encoder

        def whole(differs: Any) -> Any:
            return _over(plain if isinstance(differs, dict) and "encoder" in differs else shared, differs)

        return section | {"also": {name: whole(differs) for name, differs in others.items()}}

    @property
    def is_own(self) -> bool:
        """Whether a class encodes, mostly the user's."""
        return ":" in self.encoder

    def conflicts(self) -> Iterator[Conflict]:
        for name, other in self.also.items():
            if not re.fullmatch(WORD, name):
                yield "also", f"{name!r} is not a valid name: use letters, digits and _, such as small"
            if name == MAIN:
                yield "also", f"{MAIN} is the name of the encoder in section embed: choose another name"
            if other.also:
                yield "also", f"{name} has an `also` of its own: list all encoders in embed.also"
        if self.is_own and not re.fullmatch(r"[\w.]+:\w+", self.encoder):
            yield "encoder", f"{self.encoder!r} is not a class: write package.module:Name"
        if not self.is_own and self.encoder not in ENCODERS:
            near = get_close_matches(self.encoder.lower(), ENCODERS, n=1, cutoff=0.5)
            meant = f": did you mean {near[0]}?" if near else ""
            known = f"choose from {', '.join(ENCODERS)}, or your class as package.module:Name"
            yield "encoder", f"unknown encoder {self.encoder!r}{meant} ({known})"
        if self.options and not self.is_own:
            yield "options", f"needs a class of your own, but embed.encoder is {self.encoder}"
        if "weights" in self.options:
            yield "options", "weights is already passed to the encoder as embed.weights: remove it"


def _over(shared: Any, differs: Any) -> Any:
    """Merge two nested mappings; the second one wins."""
    if not isinstance(shared, dict) or not isinstance(differs, dict):
        return differs
    return shared | {name: _over(shared.get(name), value) for name, value in differs.items()}


class AtomGraphSection(Section):
    """Further settings of atom graphs (graph.nodes: atom)."""

    radius: float | None = setting(
        5.0, "Join atoms without a common bond within this distance in Å. null: no such edges.", gt=0, le=20
    )
    hops: int = setting(3, "Edges along bonds. 1: bonds; 2: also angles (1-3); 3: also dihedrals (1-4).", ge=1, le=3)
    hydrogens: bool = setting(False, "Make hydrogen atoms nodes.")


class GraphSection(Section):
    """How to build graphs from structures."""

    nodes: Literal["residue", "atom"] = setting(
        "residue", "residue: one node per CA of proteins; atom: one per atom, including RNA and ligands."
    )
    neighbours: int = setting(20, "Edges from this many nearest residues within a partner. 0: none.", ge=0, le=1000)
    radius: float | None = setting(
        None, "Join residues whose CA atoms are within this distance in Å. null: no such edges.", gt=0, le=50
    )
    cross_neighbours: int = setting(
        0, "Edges from this many nearest residues of the other partner. 0: none.", ge=0, le=1000
    )
    cross_radius: float | None = setting(
        None, "Join nodes of the two partners within this distance in Å. null: no such edges.", gt=0, le=50
    )
    contacts: float | None = setting(
        5.0,
        "Heavy atoms within this distance in Å make a contact. null: no labels. Unbound input needs it.",
        gt=0,
        le=100,
    )
    cache: bool = setting(True, "Store graphs on disk. false: rebuild them at each read.")
    atom: AtomGraphSection = AtomGraphSection()

    def conflicts(self) -> Iterator[Conflict]:
        if self.nodes == "residue" and self.neighbours == 0 and self.radius is None:
            yield "neighbours", "is 0 and radius is null, so residues have no edges: set one of them"
