"""Embeddings of ligands in HDF5: targets of pockets, and libraries that they are ranked in.

A file has a dataset for each key (`PDBID_LIGAND` of a complex, or `LIGAND`), or two: `id` [N] and `embedding` [N, D].
Shapes: L ligands of a library, D numbers of an embedding, B pockets, S numbers of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from pipeline.errors import DataError
from pipeline.readers.entry import Opened
from pipeline.readers.hdf5 import open_hdf5
from pipeline.tasks.rna.pocket_reader import complex_of, ligand_of
from pipeline.tasks.task_parts import WHERE, nearer_and_ties, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

ID, EMBEDDING = "id", "embedding"
NAMED = 3  # ids in a message
EUCLIDEAN, COSINE = "euclidean", "cosine"


class LigandEmbeddings:
    """An open HDF5 file of vectors by key; several threads may read at once, as h5py has a lock."""

    def __init__(self, path: Path) -> None:
        path.stat()  # h5py's own message hides that there is no such file
        self.path, self._file = path, open_hdf5(path)
        self._rows = self._by_id() if {ID, EMBEDDING} <= set(self._file) else None

    def _by_id(self) -> Mapping[str, int]:
        """Return the row of each id."""
        ids = self._file[ID][()]
        if len(ids) != len(self._file[EMBEDDING]):
            problem = f"{self.path} has {len(ids)} ids and {len(self._file[EMBEDDING])} embeddings"
            raise DataError(problem, where=f"{WHERE}.targets", remedy="write one row of `embedding` for each `id`")
        return {name.decode() if isinstance(name, bytes) else str(name): row for row, name in enumerate(ids)}

    def keys(self) -> list[str]:
        return list(self._file if self._rows is None else self._rows)

    def of_pocket(self, name: str, width: int) -> Floats | None:
        """Return the vector of a pocket's ligand: by the pocket's id, its complex's, or the ligand's; None: none."""
        found = (self.get(key, width) for key in dict.fromkeys((name, complex_of(name), ligand_of(name))))
        return next((vector_D for vector_D in found if vector_D is not None), None)

    def get(self, key: str, width: int) -> Floats | None:
        """Return the vector of a key, None where the file has none."""
        stored = self.stored(key)
        if stored is None:
            return None
        if stored.size != width:
            problem = f"the target of {key} in {self.path} has {stored.size} numbers, but the model outputs {width}"
            refuse("output_dim", problem, f"--set {WHERE}.output_dim={stored.size}")
        problem = f"the target of {key} in {self.path} has numbers that are not finite"
        remedy = "rebuild it, or skip it with targets_missing: skip"
        return _finite(stored.reshape(width), DataError(problem, where=f"{WHERE}.targets", remedy=remedy))

    def stored(self, key: str) -> NDArray[Any] | None:
        """Return the stored numbers of a key."""
        if self._rows is not None:
            row = self._rows.get(key)
            return None if row is None else np.asarray(self._file[EMBEDDING][row])
        data_set = self._file.get(key)
        return np.asarray(data_set[()]) if hasattr(data_set, "shape") else None

    def missing(self, name: str) -> DataError:
        """Return the error for a pocket without a target."""
        names = ", ".join(self.keys()[:NAMED])
        sought = " or ".join(dict.fromkeys((name, complex_of(name), ligand_of(name))))
        problem = f"{sought} has no target in {self.path}, which has {len(self.keys()):,} ids: {names} …"
        remedy = f"--set {WHERE}.targets_missing=skip, or add it to the file"
        return DataError(problem, where=f"{WHERE}.targets", remedy=remedy)


embeddings_of = Opened(LigandEmbeddings)


def sequence_vector(path: Path, name: str, width: int) -> Floats:
    """Return the vector of a pocket's sequence: by the pocket's id or its complex's, never by its ligand's."""
    file, keys = embeddings_of(path), dict.fromkeys((name, complex_of(name)))
    stored = next((found for key in keys if (found := file.stored(key)) is not None), None)
    if stored is None:
        problem = f"{' or '.join(keys)} has no vector in {path}, which has {len(file.keys()):,} ids"
        remedy = "embed these sequences too, then run: pipeline embeddings export --pool mean --force"
        raise DataError(problem, where=f"{WHERE}.sequences", remedy=remedy)
    if stored.shape != (width,):
        problem = f"{name} in {path} has the shape {stored.shape}, but {width} numbers are needed"
        width = stored.shape[-1] if stored.shape else 0
        refuse("sequence_dim", problem, f"--set {WHERE}.sequence_dim={width}   (rows: export with --pool mean)")
    problem = f"{name} in {path} is not finite"
    return _finite(stored, DataError(problem, where=f"{WHERE}.sequences", remedy="rebuild it"))


def _finite(stored: NDArray[Any], otherwise: DataError) -> Floats:
    """Return numbers in single precision; raise where one is not finite there."""
    vector: Floats = stored.astype(np.float32)
    if not np.isfinite(vector).all():
        raise otherwise
    return vector


class Measure(NamedTuple):
    """Mean and deviation of numbers over a data set: an `.npz` of `mean` and `std`."""

    mean_D: Floats
    deviation_D: Floats


def _measure(path: Path) -> Measure:
    """Read an `.npz` file; nothing in it is run."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:  # np.load leaves a bad one open
            return Measure(*(np.asarray(file[name], np.float32).reshape(-1) for name in ("mean", "std")))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        problem, remedy = f"not an .npz file with mean and std: {error}", "np.savez(path, mean=…, std=…)"
        raise DataError(problem, where=str(path), remedy=remedy) from error


_measure_of = Opened(_measure)


def read_measure(path: Path, width: int, option: str) -> Measure:
    """Read an `.npz` file, which must have this many numbers, once a process."""
    measure = _measure_of(path)
    fits = all(len(part) == width and np.isfinite(part).all() for part in measure)
    if not fits or not (measure.deviation_D > 0).all():
        problem = f"mean and std are not {width} finite numbers each, or a deviation is not above 0"
        raise DataError(problem, where=str(path), remedy=f"use another file: --set {WHERE}.{option}=…")
    return measure


@dataclass(frozen=True)
class LigandLibrary:
    """All ligands of a file."""

    names: tuple[str, ...]
    vector_LD: Floats

    def place(self, pocket: str) -> int:
        """Return the place of the ligand that a pocket's id names; -1: not here."""
        keys = [key for key in (ligand_of(pocket), complex_of(pocket)) if key in self.names]
        return self.names.index(keys[0]) if keys else -1

    def distances(self, vector_D: Floats, metric: str) -> Floats:
        """Return how far each ligand is from a pocket's vector."""
        if metric == EUCLIDEAN:
            far_L: Floats = np.linalg.norm(self.vector_LD - vector_D, axis=1)
            return far_L
        lengths_L = np.linalg.norm(self.vector_LD, axis=1) * np.linalg.norm(vector_D)
        away_L: Floats = 1 - self.vector_LD @ vector_D / np.maximum(lengths_L, np.finfo(np.float32).tiny)
        return away_L

    def rank(self, vector_D: Floats, place: int, metric: str) -> float:
        """Return the rank of a ligand, from 1; among ties every place is equally likely. NaN counts as nearer."""
        far_L = self.distances(vector_D, metric)
        nearer, ties = nearer_and_ties(far_L[place] - np.delete(far_L, place))
        return 1 + int(nearer) + int(ties) / 2

    def best(self, vector_D: Floats, top: int, metric: str) -> list[tuple[int, float]]:
        """Return the places of the nearest ligands and how far they are, the nearest first."""
        far_L = self.distances(vector_D, metric)
        return [(at, float(far_L[at])) for at in np.argsort(far_L, kind="stable")[:top].tolist()]


def _library(path: Path) -> LigandLibrary:
    file = LigandEmbeddings(path)
    names = tuple(file.keys())
    if not names:
        raise DataError("the library has no ligands", where=str(path), remedy="write one dataset for each ligand")
    width = np.asarray(file.stored(names[0])).size
    vectors = [file.get(name, width) for name in names]
    found = [vector for vector in vectors if vector is not None]
    if len(found) < len(names):
        problem, remedy = "an entry of the library is not a dataset", "write one dataset for each ligand"
        raise DataError(problem, where=str(path), remedy=remedy)
    return LigandLibrary(names, np.stack(found))


library_of = Opened(_library)

SHARES = (5, 10, 20)  # percent of the library
AT = (1, 5, 10)


def retrieval_figures(ranks: Sequence[float], ligands: int) -> dict[str, float]:
    """Return how well the true ligands are found in a library of a size."""
    rank_B = np.asarray(ranks, np.float64)
    if not len(rank_B):
        return {}
    hits = {f"hit_top_{share}_percent": float((rank_B <= max(1, ligands * share // 100)).mean()) for share in SHARES}
    recall = {f"recall_at_{most}": float((rank_B <= most).mean()) for most in AT}
    return {
        **hits,
        **recall,
        "median_rank": float(np.median(rank_B)),
        "mean_rank": float(rank_B.mean()),
        "mean_reciprocal_rank": float((1 / rank_B).mean()),
    }
