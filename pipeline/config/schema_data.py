"""The sections data, structures, embed and graph: which items there are, and what is made of each."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints, model_validator

from pipeline.config.schema_parts import AutoCount, Name, Option, Section, Size
from pipeline.device.kinds import DeviceChoice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema_parts import Conflict

ENCODERS = ("auto", "esm2", "esm1b", "esm1v", "esmc")
WORD = r"^[A-Za-z_][A-Za-z0-9_]*$"
Label: TypeAlias = Annotated[str, StringConstraints(pattern=WORD)]
MAIN = "main"  # the name of the encoder that section `embed` is of, beside those of `embed.also`

OF_STRUCTURES = (
    "structures_dir", "pattern", "splits", "state", "receptor_chains", "ligand_chains", "partners", "ligand",
    "labels",
)  # fmt: skip
TAKEN = ("receptor", "ligand", "complex", "whole", "cross", "label", "ptr")  # by the parts of a batch
STRUCTURE_PATTERNS = tuple(
    f"**/*.{kind}{packed}" for kind in ("pdb", "ent", "cif", "mmcif", "bcif") for packed in ("", ".gz")
)


class DataSection(Section):
    """Which items to use, and how the files say what belongs together."""

    source: Literal["manifest", "pairs", "sabdab", "pinder", "glob", "fasta", "reader"] = Field(
        default="manifest", description="How the data set is laid out; reader: as a class of your own reads it."
    )
    path: Path = Field(description="The file (manifest, sabdab, pinder, fasta) or folder (pairs, glob) to read.")
    reader: Name | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description="What reads items that are no structures, as package.module:Name.",
    )
    options: dict[Name, Option] = Field(
        default={}, description="What the reader's class is called with, by name, besides path."
    )
    structures_dir: Path | None = Field(
        default=None, description="Folder of the structure files that a table names; null: beside the table."
    )
    pattern: tuple[Name, ...] = Field(
        default=STRUCTURE_PATTERNS, min_length=1, description="Which files below path are taken; for glob."
    )
    splits: Path | None = Field(default=None, description="CSV with the columns path and split; for pairs.")
    state: Literal["bound", "unbound"] = Field(
        default="bound",
        description="Which structures are the input; unbound (pairs, pinder) ones take labels from the bound ones.",
    )
    receptor_chains: tuple[Name, ...] = Field(
        default=(), description="Chains of the receptor in every file; empty: as the source says."
    )
    ligand_chains: tuple[Name, ...] = Field(
        default=(), description="Chains of the ligand in every file; empty: as the source says."
    )
    labels: tuple[Label, ...] = Field(
        default=(),
        description="Columns of numbers that tasks find as item.values[name]; for manifest, sabdab and pinder.",
    )
    unlabelled: bool = Field(
        default=False, description="Whether columns of labels may be absent, as where a model predicts them: then NaN."
    )
    partners: Literal["auto", "none"] = Field(
        default="auto",
        description="Files whose chains nobody names; auto: two polymer chains are the partners; none: a file is one.",
    )
    ligand: Literal["as_named", "swapped", "smaller", "larger"] = Field(
        default="as_named",
        description="Which partner is the ligand, the one that docking moves; smaller and larger go by atoms.",
    )
    on_leak: Literal["error", "warn", "ignore"] = Field(
        default="error", description="What to do when an id, a sequence or a cluster is in two splits."
    )
    limit: int | None = Field(
        default=None, ge=1, description="Take only the first so many items, for a trial; null: all."
    )
    max_rejected_fraction: float = Field(
        default=0.05, ge=0, le=1, description="Stop when more than this fraction of the items cannot be used."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if shared := sorted(set(self.receptor_chains) & set(self.ligand_chains)):
            yield "ligand_chains", f"{', '.join(shared)} is also in receptor_chains: a chain has one side"
        if self.source == "glob" and self.partners == "auto" and bool(self.receptor_chains) != bool(self.ligand_chains):
            named, other = ("receptor", "ligand") if self.receptor_chains else ("ligand", "receptor")
            problem = f"names one side of a complex; name data.{other}_chains, too, or set data.partners: none"
            yield f"{named}_chains", problem
        if self.source == "fasta" and self.ligand != "as_named":
            yield "ligand", "is for complexes, and data.source: fasta gives sequences"
        if taken := sorted(set(self.labels) & set(TAKEN)):
            yield "labels", f"{taken[0]} is the name of a part of a batch: call the column otherwise"
        if len(set(self.labels)) < len(self.labels):
            yield "labels", "names a column twice"
        if self.source == "reader" and self.reader is None:
            yield "source", "reader needs the name of a class: data.reader: package.module:Name"
        if self.source != "reader" and (self.reader is not None or self.options):
            key = "options" if self.reader is None else "reader"
            yield key, f"is for data.source: reader, and the source is {self.source}"
        if "path" in self.options:
            yield "options", "path is data.path, which a reader is given anyway"
        for key in OF_STRUCTURES if self.source == "reader" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                yield key, "is for structures: what a reader takes, such as splits, is in data.options"


class StructuresSection(Section):
    """How a structure file becomes residues, wherever it leaves a choice."""

    altlocs: Literal["highest", "first"] = Field(
        default="highest",
        description="Which of several alternative locations stays: the highest occupancy, or the first.",
    )
    model: int = Field(default=1, ge=1, description="Which model of a file with several, counted from 1.")
    chain_names: Literal["author", "label"] = Field(
        default="author", description="Chain names of mmCIF: those of the authors (as in PDB files), or the labels."
    )
    assembly: Name | None = Field(
        default=None, description='Name of the biological assembly, such as "1"; null: the asymmetric unit.'
    )
    sequence: Literal["observed", "seqres"] = Field(
        default="observed", description="Sequence of a chain: the residues with coordinates, or all of SEQRES."
    )
    require: Literal["ca", "backbone"] = Field(
        default="ca", description="Atoms a residue must have to be a node: CA, or N, CA and C."
    )
    incomplete: Literal["drop", "reject"] = Field(
        default="drop", description="A residue without those atoms: leave it out, listed, or reject the complex."
    )
    modified: Literal["parent", "unknown", "reject"] = Field(
        default="parent", description="Modified residues: their parent (MSE is MET), X, or reject the complex."
    )
    ligands: Literal["drop", "keep"] = Field(
        default="drop", description="Small molecules and ions of the chosen chains; keep: for atom graphs."
    )
    plddt: Literal["none", "marked", "every"] = Field(
        default="none",
        description="B-factors as pLDDT, a field of nodes; marked: of files that say they are predicted; every: any.",
    )
    min_plddt: float | None = Field(
        default=None, ge=0, le=100, description="Residues of a lower pLDDT are dropped or masked; null: none."
    )
    low_plddt: Literal["drop", "mask"] = Field(
        default="drop", description="Those residues: no nodes, listed; or nodes with a flag, for the task to heed."
    )
    pae: Literal["none", "beside", "required"] = Field(
        default="none",
        description="Predicted aligned errors, a field of edges; beside: NaN without their JSON; required: rejected.",
    )
    max_residues: int = Field(default=10_000, ge=1, description="A complex with more residues is rejected.")
    max_file_bytes: Size = Field(
        default=64 << 20, description="A file larger than this, after decompression, is rejected."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.min_plddt is not None and self.plddt == "none":
            problem = "needs to know whose B-factors are pLDDT: set structures.plddt: marked (or every)"
            yield "min_plddt", problem


class EmbedBatchSection(Section):
    """How sequences are put together for the encoder; changes speed and memory, never a result."""

    policy: Literal["divisor", "tokens"] = Field(
        default="divisor", description="divisor: equal small batches of at most cap; tokens: filled up to the budget."
    )
    cap: AutoCount = Field(default=4, description="Most sequences of a batch, for divisor; auto: by free memory.")
    budget: AutoCount = Field(
        default="auto", description="Most tokens of a batch (residues + 2 of each sequence); auto: by free memory."
    )


class LongSequencesSection(Section):
    """What becomes of sequences longer than the model saw in training; ESM-2 itself has no limit."""

    policy: Literal["full", "windows", "truncate", "error"] = Field(
        default="full", description="full: as one; windows: overlapping; truncate: the beginning; error: rejected."
    )
    length: int = Field(default=1022, ge=64, description="Residues of a window, and where the other policies begin.")
    overlap: int = Field(default=256, ge=0, description="Residues that neighbouring windows share.")

    def conflicts(self) -> Iterator[Conflict]:
        if 2 * self.overlap > self.length:
            yield "overlap", "is more than half of length: windows would hardly advance"


class EmbedSection(Section):
    """How sequences become embeddings."""

    weights: Path = Field(
        default=Path("weights/esm2_t33_650M_UR50D.pt"),
        description="Checkpoint: a .pt file of fair-esm, a .pth of ESM C, a Hugging Face folder or .safetensors file.",
    )
    encoder: Name = Field(
        default="auto",
        description="Family of the weights: esm2, esm1b, esm1v or esmc; auto: as they tell. Or package.module:Name.",
    )
    options: dict[Name, Option] = Field(
        default={}, description="What the encoder's class is called with, by name, besides weights."
    )
    layer: AutoCount = Field(default="auto", description="Layer whose output is kept; auto: the last.")
    cls: bool = Field(
        default=False, description="Whether the row of the token before a sequence, <cls>, is kept with its rows."
    )
    context: Literal["chain", "partner"] = Field(
        default="chain", description="What is encoded as one: each chain, or the joined chains of a partner."
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto",
        description="What is computed in; auto: fp16 on a GPU, fp32 on a CPU. On a CPU bf16 means the products.",
    )
    storage: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto", description="What embeddings are kept in; auto: as they were computed."
    )
    half_fallback: Literal["fp32", "none"] = Field(
        default="fp32", description="Where half precision is not good enough: compute that in fp32, or reject it."
    )
    on_oom: Literal["windows", "cpu"] = Field(
        default="windows", description="A single sequence that does not fit: in windows, or on the CPU."
    )
    device: DeviceChoice = Field(
        default="auto", description="What it is computed on; auto: the GPU if cluster.embed.gpus is not 0."
    )
    batch: EmbedBatchSection = EmbedBatchSection()
    long: LongSequencesSection = LongSequencesSection()
    also: dict[str, EmbedSection] = Field(
        default={}, description="Further encoders, each with a name and what differs from this section for it."
    )

    @model_validator(mode="before")
    @classmethod
    def _others_differ_from_this_one(cls, section: Any) -> Any:
        others = section.get("also") if isinstance(section, dict) else None
        if not isinstance(others, dict):
            return section
        shared = {name: value for name, value in section.items() if name != "also"}
        plain = {name: value for name, value in shared.items() if name != "options"}  # which are of one encoder alone

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
                yield "also", f"{name!r} is no name: letters, digits and _ only, such as small"
            if name == MAIN:
                yield "also", f"{MAIN} is the name of the encoder that section embed is of: call it otherwise"
            if other.also:
                yield "also", f"{name} has others itself: name them all in embed.also"
        if self.is_own and not re.fullmatch(r"[\w.]+:\w+", self.encoder):
            yield "encoder", f"{self.encoder!r} is no class: write package.module:Name"
        if not self.is_own and self.encoder not in ENCODERS:
            near = get_close_matches(self.encoder.lower(), ENCODERS, n=1, cutoff=0.5)
            meant = f": did you mean {near[0]}?" if near else ""
            known = f"there are {', '.join(ENCODERS)}, and a class of your own as package.module:Name"
            yield "encoder", f"there is no encoder {self.encoder!r}{meant} ({known})"
        if self.options and not self.is_own:
            yield "options", f"is for a class of your own, and embed.encoder is {self.encoder}"
        if "weights" in self.options:
            yield "options", "weights is embed.weights, which an encoder is given if it takes it"


def _over(shared: Any, differs: Any) -> Any:
    """Return a section as another one lays itself over it."""
    if not isinstance(shared, dict) or not isinstance(differs, dict):
        return differs
    return shared | {name: _over(shared.get(name), value) for name, value in differs.items()}


class AtomGraphSection(Section):
    """What atom graphs have besides; where graph.nodes is atom."""

    radius: float | None = Field(
        default=5.0, gt=0, le=20, description="Å within which atoms that no bond joins get an edge; null: none."
    )
    hops: int = Field(
        default=3, ge=1, le=3, description="Edges along bonds; 1: bonds, 2: and angles (1-3), 3: and dihedrals (1-4)."
    )
    hydrogens: bool = Field(default=False, description="Whether hydrogen atoms are nodes.")


class GraphSection(Section):
    """How structures become graphs."""

    nodes: Literal["residue", "atom"] = Field(
        default="residue",
        description="residue: a node at each CA of proteins; atom: at each atom, RNA's and ligands' too.",
    )
    neighbours: int = Field(
        default=20, ge=0, le=1000, description="Edges from each residue's nearest ones in its partner; 0: none."
    )
    radius: float | None = Field(
        default=None, gt=0, le=50, description="Å between CA atoms within which residues get an edge; null: none."
    )
    cross_neighbours: int = Field(
        default=0, ge=0, le=1000, description="Edges from each residue's nearest ones in the other partner; 0: none."
    )
    cross_radius: float | None = Field(
        default=None, gt=0, le=50, description="Å within which nodes of the two partners get an edge; null: none."
    )
    contacts: float | None = Field(
        default=5.0,
        gt=0,
        le=100,
        description="Å between heavy atoms of a native contact; null: no labels.",
    )
    cache: bool = Field(default=True, description="Keep graphs on disk; false: built anew whenever they are read.")
    atom: AtomGraphSection = AtomGraphSection()

    def conflicts(self) -> Iterator[Conflict]:
        if self.nodes == "residue" and self.neighbours == 0 and self.radius is None:
            yield "neighbours", "is 0 and radius is null: residues would have no edges"
