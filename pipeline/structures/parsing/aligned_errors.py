"""Whether a file is a prediction, whose B-factors are pLDDT, and the aligned errors (PAE) in the JSON beside one.

A row is the residue on which a prediction is aligned, a column the one whose place may be wrong, by so many Å. A
regular expression cuts tables of numbers out of the JSON: `json` alone would hold a Python number for each value, eight
times the memory of the array.
Shapes: N rows of a table, T tokens of AlphaFold 3, R residues of a file's polymers.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.records import Kind, Reason
from pipeline.structures.atoms import UnusableInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import gemmi
    from numpy.typing import NDArray

    from pipeline.structures.policy import Chain, Structure

    Errors: TypeAlias = NDArray[np.float32]
    Tokens: TypeAlias = tuple[tuple[str, int], ...]  # chain and residue number

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


PREDICTIONS = re.compile(r"\.(?:pdb|ent|cif|mmcif|mcif|bcif)(?:\.gz)?$", re.IGNORECASE)
ENDINGS = (".json", ".json.gz")
# How the name of a structure tells that of its JSON: of AlphaFold DB, ColabFold, AlphaFold 2, AlphaFold's server and 3.
BESIDE = (
    (re.compile(r"-model_(v\d+)$"), r"-predicted_aligned_error_\1"),
    (re.compile(r"_(?:un)?relaxed_rank_"), r"_scores_rank_"),
    (re.compile(r"^(?:un)?relaxed_model_"), r"pae_model_"),
    (re.compile(r"_model_(\d+)$"), r"_full_data_\1"),
    (re.compile(r"(^|_)model$"), r"\1confidences"),
)
OURS = ".pae"  # NAME.pae.json belongs to NAME.pdb, whoever made it
TABLES = ("predicted_aligned_error", "pae")  # as AlphaFold DB calls it since 2022, and all others
TOKENS = ("token_chain_ids", "token_res_ids")
LARGEST_ERROR = 1000.0  # Å
MOST_BESIDES = 16 << 20  # bytes of what is not a table
# A list of rows of numbers and its name; possessive, so that damage costs one pass. No NaN or null is part of it.
TABLE = re.compile(rb'"(\w+)"\s*:\s*(\[\s*\[[0-9+\-.eE,\s]*+\](?:\s*,\s*\[[0-9+\-.eE,\s]*+\])*+\s*\])')
ROW = re.compile(rb"\[([^\[\]]*)\]")


def pae_candidates(path: str) -> tuple[str, ...]:
    """Return the files that may hold the errors of a structure; none for a path of another kind."""
    folder, slash, name = path.rpartition("/")
    stem = PREDICTIONS.sub("", name)
    if stem == name:
        return ()
    stems = [pattern.sub(beside, stem) for pattern, beside in BESIDE if pattern.search(stem)]
    return tuple(f"{folder}{slash}{known}{ending}" for known in (*stems, stem + OURS) for ending in ENDINGS)


def pae_beside(path: str) -> tuple[str, ...]:
    """Return the file that holds the errors of a structure, if there is one."""
    return tuple(candidate for candidate in pae_candidates(path) if os.path.exists(candidate))[:1]  # noqa: PTH110


def errors_of(structure: Structure, name: str, data: bytes) -> Errors:
    """Return the errors between the residues of a structure's polymers [R, R], in its order; `name` is the JSON's."""
    try:
        return _of_residues(*read_errors(data), structure)
    except UnusableInput as problem:
        raise UnusableInput(problem.reason, f"{name}: {problem.detail}") from None


def read_errors(data: bytes) -> tuple[Errors, Tokens | None]:
    """Return the table in a JSON, and of AlphaFold 3 the chain and number of each row's residue; refuse a bad one."""
    tables, content = _apart(data)
    name = next((name for name in TABLES if name in content), None)
    if name is None:
        there = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise _bad(f"it has no table {' or '.join(TABLES)}; it has {there}")
    if name not in tables:
        raise _bad(f"{name} is not a list of rows of numbers (NaN and null are not numbers)")
    pae_NN = _square(data, name, *tables[name])
    return pae_NN, _tokens(content, len(pae_NN))


def _bad(what: str) -> UnusableInput:
    return UnusableInput(Reason.BAD_PAE, what)


def _apart(data: bytes) -> tuple[dict[str, tuple[int, int]], Mapping[str, Any]]:
    """Return where the tables of a JSON begin and end, and its other content."""
    tables: dict[str, tuple[int, int]] = {}

    def cut_out(table: re.Match[bytes]) -> bytes:
        name = table[1].decode()
        if name in tables:
            raise _bad(f"it has {name} twice")
        tables[name] = table.start(2) + 1, table.end() - 1
        return b'"%b":null' % table[1]

    besides = TABLE.sub(cut_out, data)
    if len(besides) > MOST_BESIDES:
        raise _bad(f"it has {len(besides):,} bytes of other content: it is not a table of errors")
    try:
        content = json.loads(besides)
    except (ValueError, RecursionError) as error:
        raise _bad(f"it is not JSON, or it is truncated: {error}"[:200]) from error
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        raise _bad("it is neither an object nor a list of one")
    return tables, content


def _square(data: bytes, name: str, first: int, last: int) -> Errors:
    """Return the table between two places; refuse one that is not square before there is memory for it."""
    sizes = [row[1].count(b",") + 1 for row in ROW.finditer(data, first, last)]
    uneven = next((place for place, size in enumerate(sizes) if size != len(sizes)), None)
    if uneven is not None:
        what = f"row {uneven + 1} of {name} has {sizes[uneven]:,} numbers, and there are {len(sizes):,} rows"
        raise _bad(f"{what}: it is not square")
    pae_NN = np.empty((len(sizes), len(sizes)), np.float32)
    for place, row in enumerate(ROW.finditer(data, first, last)):
        try:
            values_N = np.array(json.loads(b"[%b]" % row[1]), np.float64)
        except (ValueError, OverflowError) as error:
            raise _bad(f"row {place + 1} of {name} has a value that is not a number: {error}"[:200]) from error
        wrong = np.flatnonzero(~((values_N >= 0) & (values_N <= LARGEST_ERROR)))
        if len(wrong) or not len(values_N):
            what = f"{values_N[wrong[0]]:g} at place {wrong[0] + 1}" if len(wrong) else "no number"
            raise _bad(f"row {place + 1} of {name} has {what}, which is not an error in Å")
        pae_NN[place] = values_N
    return pae_NN


def _tokens(content: Mapping[str, Any], size: int) -> Tokens | None:
    """Return the chain and the residue's number of each token, as AlphaFold 3 writes them."""
    if not any(name in content for name in TOKENS):
        return None
    chains, numbers = (content.get(name) for name in TOKENS)
    if not (isinstance(chains, list) and isinstance(numbers, list) and len(chains) == len(numbers) == size):
        raise _bad(f"{' and '.join(TOKENS)} are not two lists of {size:,} entries")
    tokens = tuple(zip(chains, numbers, strict=True))
    if not all(isinstance(chain, str) and type(number) is int for chain, number in tokens):
        raise _bad(f"{' and '.join(TOKENS)} are not names of chains and numbers of residues")
    return tokens


def _of_residues(pae_NN: Errors, tokens: Tokens | None, structure: Structure) -> Errors:
    """Return the errors of the residues of a structure's polymers; refuse those of other residues."""
    chains = [chain for chain in structure.chains if chain.kind is not Kind.OTHER]
    residues = max((chain.last for chain in chains), default=0)
    if tokens is not None:
        return _by_tokens(pae_NN, _residue_of_tokens(tokens, chains, structure))
    if len(pae_NN) != residues:
        what = f"it has {len(pae_NN):,} rows, and the polymer chains of the structure have {residues:,} residues"
        raise _bad(f"{what}: it belongs to another structure, or residues were removed from one of the two")
    return pae_NN


def _residue_of_tokens(tokens: Tokens, chains: Sequence[Chain], structure: Structure) -> NDArray[np.int64]:
    """Return the residue of each token, -1 of ligands; each residue of a polymer must have one, and no other."""
    residue_of = {
        (chain.name, int(structure.number_R[residue])): residue
        for chain in chains
        for residue in range(chain.first, chain.last)
    }
    residue_T = np.array([residue_of.get(token, -1) for token in tokens])
    names = {chain.name for chain in chains}
    for chain, number in tokens:
        if chain in names and (chain, number) not in residue_of:
            raise _bad(f"it has a token of residue {number} of chain {chain}, which the structure does not have")
    absent = sorted({residue for chain in chains for residue in range(chain.first, chain.last)} - {*residue_T.tolist()})
    if absent:
        owner = next(chain.name for chain in chains if chain.first <= absent[0] < chain.last)
        number = structure.number_R[absent[0]]
        raise _bad(f"it has no token of residue {number} of chain {owner}, and of {len(absent):,} residues in all")
    return residue_T


def _by_tokens(pae_TT: Errors, residue_T: NDArray[np.int64]) -> Errors:
    """Return the errors of residues; of one with several tokens, as modified ones have, it is their mean."""
    order = np.argsort(residue_T, kind="stable")
    order = order[np.count_nonzero(residue_T < 0) :]
    first_R, count_R = np.unique(residue_T[order], return_index=True, return_counts=True)[1:]
    pae_TT = pae_TT[np.ix_(order, order)]
    if len(first_R) == len(order):
        return pae_TT
    for axis in (0, 1):
        pae_TT = np.add.reduceat(pae_TT, first_R, axis=axis, dtype=np.float64)
    return (pae_TT / np.outer(count_R, count_R)).astype(np.float32)
