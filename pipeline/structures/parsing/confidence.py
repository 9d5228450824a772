"""Whether a file is a prediction, whose B-factors are pLDDT, or an experiment, whose B-factors are not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gemmi

THEORETICAL = "THEORETICAL MODEL"
UNKNOWN = ("", "?", ".")  # as CIF writes what is not said
# What the headings of predictions say of themselves; files without any heading say nothing.
PREDICTED = re.compile(rb"ALPHAFOLD|COLABFOLD|ESMFOLD|ESM FOLD|ROSETTAFOLD|OMEGAFOLD|OPENFOLD|BOLTZ|CHAI-1|PLDDT", re.I)
HEADING = re.compile(rb"^(?:HEADER|TITLE|COMPND|KEYWDS|AUTHOR|REMARK).*$", re.M)
METHOD = re.compile(rb"^EXPDTA(.*)$", re.M)
ATOMS = re.compile(rb"^(?:ATOM|HETATM)", re.M)


def pdb_is_predicted(data: bytes) -> bool:
    """Tell by the heading of a PDB file; an experiment that began with a prediction is an experiment."""
    first = ATOMS.search(data)
    heading = data[: first.start()] if first else b""
    method = b" ".join(METHOD.findall(heading)).decode("ascii", "replace").strip()
    if method and THEORETICAL not in method:
        return False
    return any(PREDICTED.search(line) for line in HEADING.findall(heading))


def cif_is_predicted(block: gemmi.cif.Block) -> bool:
    """Tell by the method of an mmCIF block, and by whether it has pLDDT among the metrics of its quality."""
    methods = [value.strip("'\"").upper() for value in block.find_values("_exptl.method")]
    if any(method not in (*UNKNOWN, THEORETICAL) for method in methods):
        return False
    metrics = [*block.find_values("_ma_qa_metric.name"), *block.find_values("_ma_qa_metric.type")]
    return any("plddt" in metric.lower() for metric in metrics)
