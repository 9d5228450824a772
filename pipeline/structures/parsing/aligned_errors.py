"""Finds whether a file is a prediction, whose B-factors are pLDDT, and reads the aligned errors (PAE) next to it.

A row is the residue on which a prediction is aligned, a column the one whose place may be wrong, by so many Å.
Shapes: N rows of a table, T tokens of AlphaFold 3, R residues of a file's polymers.
"""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
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
    Tokens: TypeAlias = list[tuple[str, int]]  # chain and residue number

THEORETICAL = "THEORETICAL MODEL"
UNKNOWN = ("", "?", ".")  # as CIF writes missing values
# What the headings of predictions say of themselves; files without any heading say nothing.
PREDICTED = re.compile(rb"ALPHAFOLD|COLABFOLD|ESMFOLD|ESM FOLD|ROSETTAFOLD|OMEGAFOLD|OPENFOLD|BOLTZ|CHAI-1|PLDDT", re.I)
HEADING = re.compile(rb"^(?:HEADER|TITLE|COMPND|KEYWDS|AUTHOR|REMARK).*$", re.M)
METHOD = re.compile(rb"^EXPDTA(.*)$", re.M)
ATOMS = re.compile(rb"^(?:ATOM|HETATM)", re.M)


def pdb_is_predicted(data: bytes) -> bool:
    """Decide by the heading of a PDB file; an experiment that began with a prediction is an experiment."""
    first = ATOMS.search(data)
    heading = data[: first.start()] if first else b""
    method = b" ".join(METHOD.findall(heading)).decode("ascii", "replace").strip()
    if method and THEORETICAL not in method:
        return False
    return any(PREDICTED.search(line) for line in HEADING.findall(heading))


def cif_is_predicted(block: gemmi.cif.Block) -> bool:
    """Decide by the method of an mmCIF block, and by whether its quality metrics include pLDDT."""
    methods = [value.strip("'\"").upper() for value in block.find_values("_exptl.method")]
    if any(method not in (*UNKNOWN, THEORETICAL) for method in methods):
        return False
    metrics = [*block.find_values("_ma_qa_metric.name"), *block.find_values("_ma_qa_metric.type")]
    return any("plddt" in metric.lower() for metric in metrics)


PREDICTIONS = re.compile(r"\.(?:pdb|ent|cif|mmcif|mcif|bcif)(?:\.gz)?$", re.IGNORECASE)
ENDINGS = (".json", ".json.gz")
# From the name of a structure to that of its JSON: AlphaFold DB, ColabFold, AlphaFold 2, AlphaFold Server, 3.
BESIDE = (
    (re.compile(r"-model_(v\d+)$"), r"-predicted_aligned_error_\1"),
    (re.compile(r"_(?:un)?relaxed_rank_"), r"_scores_rank_"),
    (re.compile(r"^(?:un)?relaxed_model_"), r"pae_model_"),
    (re.compile(r"_model_(\d+)$"), r"_full_data_\1"),
    (re.compile(r"(^|_)model$"), r"\1confidences"),
)
OURS = ".pae"  # NAME.pae.json belongs to NAME.pdb, whatever wrote it
TABLES = ("predicted_aligned_error", "pae")  # as AlphaFold DB calls it since 2022, and all others
TOKENS = ("token_chain_ids", "token_res_ids")
LARGEST_ERROR = 1000.0  # Å
DIFFERENT_NUMBERS = 1 << 14  # that are kept: a table has few, and one Python number for each entry takes 32 bytes


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
    chains = [chain for chain in structure.chains if chain.kind is not Kind.OTHER]
    residues = max((chain.last for chain in chains), default=0)
    try:
        pae_NN, tokens = read_errors(data)
        if tokens is not None:
            return _by_tokens(pae_NN, _residue_of_tokens(tokens, chains, structure))
        if len(pae_NN) != residues:
            what = f"it has {len(pae_NN):,} rows, and the polymer chains of the structure have {residues:,} residues"
            raise _bad(f"{what}: it belongs to another structure, or residues were removed from one of the two")
        return pae_NN
    except UnusableInput as problem:
        raise UnusableInput(problem.reason, f"{name}: {problem.detail}") from None


def read_errors(data: bytes) -> tuple[Errors, Tokens | None]:
    """Return the table in a JSON, and of AlphaFold 3 the chain and number of each row's residue; refuse a bad one."""
    try:
        content = json.loads(data, parse_float=lru_cache(DIFFERENT_NUMBERS)(float))
    except (ValueError, RecursionError) as error:
        raise _bad(f"it is not JSON, or it is truncated: {error}"[:200]) from error
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    name = next((name for name in TABLES if isinstance(content, dict) and name in content), None)
    if name is None:
        raise _bad(f"it has no table {' or '.join(TABLES)}")
    try:
        pae_NN = np.array(content[name])
    except ValueError as error:  # rows of different lengths
        raise _bad(f"{name} is not a square table: {error}"[:200]) from error
    if pae_NN.dtype.kind not in "if" or pae_NN.ndim != 2 or len(set(pae_NN.shape)) != 1 or not pae_NN.size:
        raise _bad(f"{name} is not a square table of numbers: its shape is {list(pae_NN.shape)}")
    if len(wrong := np.argwhere(~((pae_NN >= 0) & (pae_NN <= LARGEST_ERROR)))):
        row, column = wrong[0]
        raise _bad(f"row {row + 1} of {name} has {pae_NN[row, column]:g} at place {column + 1}, not an error in Å")
    return pae_NN.astype(np.float32), _tokens(content, len(pae_NN))


def _bad(what: str) -> UnusableInput:
    return UnusableInput(Reason.BAD_PAE, what)


def _tokens(content: Mapping[str, Any], size: int) -> Tokens | None:
    """Return the chain and the residue's number of each token, as AlphaFold 3 writes them."""
    if not any(name in content for name in TOKENS):
        return None
    chains, numbers = (content.get(name) for name in TOKENS)
    if not (isinstance(chains, list) and isinstance(numbers, list) and len(chains) == len(numbers) == size):
        raise _bad(f"{' and '.join(TOKENS)} are not two lists of {size:,} entries")
    tokens = list(zip(chains, numbers, strict=True))
    if not all(isinstance(chain, str) and type(number) is int for chain, number in tokens):
        raise _bad(f"{' and '.join(TOKENS)} are not names of chains and numbers of residues")
    return tokens


def _residue_of_tokens(tokens: Tokens, chains: Sequence[Chain], structure: Structure) -> NDArray[np.int64]:
    """Return the residue of each token, -1 of ligands; each residue of a polymer must have one, and no other."""
    token_of = {
        residue: (chain.name, int(structure.number_R[residue]))
        for chain in chains
        for residue in range(chain.first, chain.last)
    }
    residue_of = {token: residue for residue, token in token_of.items()}
    residue_T = np.array([residue_of.get(token, -1) for token in tokens])
    names = {chain.name for chain in chains}
    for chain, number in tokens:
        if chain in names and (chain, number) not in residue_of:
            raise _bad(f"it has a token of residue {number} of chain {chain}, which the structure does not have")
    if absent := sorted(token_of.keys() - set(residue_T.tolist())):
        chain, number = token_of[absent[0]]
        raise _bad(f"it has no token of residue {number} of chain {chain}, and of {len(absent):,} residues in all")
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
