"""Spectra with related ones to compare them with: `SpectrumTriplets` by molecule and mass, `SpectrumPairs` by run.

    data: {source: reader, reader: "pipeline.readers.spectrum_triplets:SpectrumTriplets", path: library.mgf,
           options: {molecule: INCHIKEY, mass_within: 0.05, candidates: 4}}

Shapes: P peaks of all of a spectrum's candidates of one role, C such spectra, N all spectra.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.errors import ConfigError
from pipeline.readers.entry import Count, check_option
from pipeline.readers.spectra import Spectra
from pipeline.records import Entry, Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

OF_CANDIDATES = {"precursor_mz", "molecule", "retention_s"}


@dataclass(eq=False)
class RelatedSpectra(Spectra):
    """Spectra, each with the arrays of others of the data set, its candidates of some roles, drawn once by `seed`."""

    candidates: Count = 4  # of each role, at most
    seed: int = 0
    roles: ClassVar[tuple[str, ...]]

    def related(self, entries: Iterable[Entry | Rejection]) -> Callable[[int], Sequence[Sequence[Any]]]:
        """Return what gives the places of an entry's candidates, by its number: a list for each role, or none."""
        raise NotImplementedError

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every spectrum with its candidates; the files are read twice, the first time for who they are."""
        places_of = self.related(super().entries())
        number = 0
        for entry in super().entries():
            if isinstance(entry, Rejection):
                yield entry
                continue
            places = [entry.place, *places_of(number)]
            yield entry._replace(place=places, arrays=self._joined(entry.arrays, places[1:]))
            number += 1

    def read(self, place: Sequence[Any]) -> Arrays:
        """Return the arrays of the spectrum at a place, and of its candidates."""
        own, *related = place
        return self._joined(super().read(own), related)

    def _joined(self, own: Arrays, related: Sequence[Sequence[Any]]) -> Arrays:
        """Return an item's arrays with those of its candidates."""
        arrays = dict(own)
        for role, places in zip(self.roles, related, strict=False):
            found = [Spectra.read(self, place) for place in places]
            for name in ("mz", "intensity"):
                arrays[f"{role}.{name}"] = np.concatenate([one[f"peaks.{name}"] for one in found])
            sizes = [len(one["peaks.mz"]) for one in found]
            arrays[f"{role}.spectrum"] = np.repeat(np.arange(len(found), dtype=np.int16), sizes)
            for name in OF_CANDIDATES & own.keys():
                arrays[f"{role}s.{name}"] = np.stack([one[name] for one in found])
        return arrays


@dataclass(eq=False)
class SpectrumTriplets(RelatedSpectra):
    """The spectra of `Spectra`, each with spectra of its molecule, and of other molecules of nearly its mass.

    Further arrays: `positive.mz`, `positive.intensity` and `positive.spectrum` [P], the last the number of the
    candidate that a peak is of, `positives.precursor_mz` and `positives.molecule` [C]: spectra of the same molecule;
    likewise `negative.…`: of another whose precursor is within `mass_within` Da. Both are of the item's own split. An
    item without a known molecule, or without either kind, has none of them. A task draws one of each for every step.
    """

    mass_within: float = 0.05
    roles: ClassVar[tuple[str, ...]] = ("positive", "negative")

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = type(self.mass_within) in (int, float) and 0 < self.mass_within < np.inf
        check_option("mass_within", self.mass_within, "a number above 0", fits=fits)
        if not self.molecule:
            problem = "spectra of one molecule are known by their InChI keys"
            remedy = "name the header or column that has them, such as INCHIKEY"
            raise ConfigError(problem, where="data.options.molecule", remedy=remedy)

    def related(self, entries: Iterable[Entry | Rejection]) -> Callable[[int], Sequence[Sequence[Any]]]:
        """Return what gives the places of an entry's positives and negatives."""
        return _Relatives(entries, self).of


@dataclass(eq=False)
class SpectrumPairs(RelatedSpectra):
    """The spectra of `Spectra`, each with others of the same LC-MS run, to learn which of two came first.

    A run is a file, or what the header or column `run` names. Further arrays: `retention_s`; `other.mz`,
    `other.intensity` and `other.spectrum` [P], `others.precursor_mz` and `others.retention_s` [C], of spectra of the
    item's own run and split. Without a known time of retention, an item has none of these.
    """

    retention: bool = True
    roles: ClassVar[tuple[str, ...]] = ("other",)

    def related(self, entries: Iterable[Entry | Rejection]) -> Callable[[int], Sequence[Sequence[Any]]]:
        """Return what gives the places of others of an entry's run."""
        places, groups, names = list[Any](), array("q"), dict[tuple[int, str], int]()
        for entry in entries:
            if isinstance(entry, Entry):
                run = int(entry.arrays["run"]) if self.run else entry.place[0]
                is_timed = np.isfinite(entry.arrays["retention_s"])
                places.append(entry.place)
                groups.append(names.setdefault((run, entry.split), len(names)) if is_timed else -1)
        group_N = np.array(groups, np.int64)
        by_group = _Ordered(group_N)

        def places_of(number: int) -> Sequence[Sequence[Any]]:
            if (group := group_N[number]) < 0:
                return []
            alike_C = by_group.between(group, group)
            drawn = np.random.default_rng([self.seed, number]).integers(len(alike_C), size=self.candidates)
            others = [places[other] for other in np.unique(alike_C[drawn]) if other != number]
            return [others] if others else []

        return places_of


class _Relatives:
    """Finds related spectra by their molecules, masses and places; takes a few bytes for each."""

    def __init__(self, entries: Iterable[Entry | Rejection], reader: SpectrumTriplets) -> None:
        self._reader = reader
        self._places: list[Any] = []
        molecules, masses, splits, names = array("q"), array("d"), array("q"), dict[str, int]()
        for entry in entries:
            if isinstance(entry, Entry):
                self._places.append(entry.place)
                molecules.append(int(entry.arrays["molecule"]))
                masses.append(float(entry.arrays["precursor_mz"]))
                splits.append(names.setdefault(entry.split, len(names)))
        self._molecule_N, self._split_N = np.array(molecules, np.int64), np.array(splits, np.int64)
        self._mass_N = np.array(masses)
        self._by_mass = _Ordered(self._mass_N)
        self._by_molecule = _Ordered(self._molecule_N)

    def of(self, number: int) -> list[list[Any]]:
        """Return the places of a spectrum's positives and negatives; nothing if it lacks either."""
        molecule, mass, within = self._molecule_N[number], self._mass_N[number], self._reader.mass_within
        if not molecule:
            return []
        same_C = self._by_molecule.between(molecule, molecule)
        near_C = self._by_mass.between(mass - within, mass + within)
        near_C = near_C[(self._molecule_N[near_C] != molecule) & (self._molecule_N[near_C] != 0)]
        rng = np.random.default_rng([self._reader.seed, number])
        found = []
        for some_C in (same_C[same_C != number], near_C):
            of_split_C = some_C[self._split_N[some_C] == self._split_N[number]]
            drawn_C = rng.permutation(of_split_C)[: self._reader.candidates]
            found.append([self._places[place] for place in drawn_C])
        return found if all(found) else []


class _Ordered:
    """Numbers of spectra in the order of a value."""

    def __init__(self, value_N: NDArray[Any]) -> None:
        self._order_N = np.argsort(value_N, kind="stable")
        self._value_N = value_N[self._order_N]

    def between(self, low: Any, high: Any) -> NDArray[np.int64]:
        """Return those whose value is from `low` to `high`, both included."""
        first, last = np.searchsorted(self._value_N, low, "left"), np.searchsorted(self._value_N, high, "right")
        return self._order_N[first:last]
