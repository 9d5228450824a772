"""Restricts a regenerating run to the records that a damage list calls lost."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.errors import CacheDamaged, ConfigError
from pipeline.journal.run_folder import writing_run
from pipeline.keys import KEY_BYTES
from pipeline.store.maintenance.damage_report import Fault, read_report, refuse_of_another
from pipeline.store.store import in_chunks
from pipeline.store.users import sorted_keys

if TYPE_CHECKING:
    from pipeline.journal.run_folder import RunFolder
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance.damage_report import DamageFinding
    from pipeline.store.store import Store

# Faults of a whole shard of unknown content: a run may then make all missing records of its kind.
FAULTS_WITHOUT_KEYS = frozenset({Fault.TABLE, Fault.UNREADABLE, Fault.GONE})
AT_ONCE = 4096  # findings whose records are looked up together
ABOUT, SUFFIX = "about.json", ".keys"


@dataclass(frozen=True, slots=True)
class Keys(Collection[bytes]):
    """Distinct keys in order, packed in 16 bytes each."""

    packed: bytes = b""

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, bytes):
            return False
        at = bisect_left(range(len(self)), key, key=self._at)
        return at < len(self) and self._at(at) == key

    def __iter__(self) -> Iterator[bytes]:
        return map(self._at, range(len(self)))

    def _at(self, place: int) -> bytes:
        return self.packed[place * KEY_BYTES : (place + 1) * KEY_BYTES]


@dataclass(frozen=True, slots=True)
class Only:
    """The records that a run may make; without a list, all."""

    source: str = ""  # the damage list
    keys: Mapping[str, Keys] = field(default_factory=dict)  # kind → the listed records
    whole_kinds: frozenset[str] = frozenset()  # kinds with a lost shard of unknown content

    @property
    def is_all(self) -> bool:
        return not self.source

    @property
    def kinds(self) -> set[str]:
        return {*self.keys, *self.whole_kinds}

    @property
    def records(self) -> int:
        """How many records the list names."""
        return sum(map(len, self.keys.values()))

    def of(self, kind: str) -> Keys:
        """Return the listed keys of a kind."""
        return self.keys.get(kind, Keys())

    def names(self, kind: str, key: bytes) -> bool:
        """Tell whether a record may be made."""
        return self.is_all or kind in self.whole_kinds or key in self.of(kind)

    def write(self, folder: RunFolder) -> None:
        """Write this into the folder of a run."""
        about = {"source": self.source, "kinds": sorted(self.keys), "untold": sorted(self.whole_kinds)}
        with writing_run(folder.only):
            folder.only.mkdir()
            for kind, keys in self.keys.items():
                (folder.only / f"{kind}{SUFFIX}").write_bytes(keys.packed)
            (folder.only / ABOUT).write_text(json.dumps(about))


EVERYTHING = Only()


def only_of(folder: RunFolder) -> Only:
    """Return the records that a run may make, by its folder."""
    if not folder.only.exists():
        return EVERYTHING
    about = json.loads((folder.only / ABOUT).read_text())
    keys = {kind: Keys((folder.only / f"{kind}{SUFFIX}").read_bytes()) for kind in about["kinds"]}
    return Only(about["source"], keys, frozenset(about["untold"]))


def read_list(path: Path, cache: CacheFolder) -> Only:
    """Return the lost records of a damage list or a repair's list; raise if wrong records are still in place."""
    packed, whole_kinds, in_place = dict[str, bytearray](), set[str](), 0
    stores: dict[str, Store] = {}
    report = read_report(path)
    refuse_of_another(report, cache.root)
    for findings in in_chunks(report.findings(), AT_ONCE):
        for finding in findings:
            _open(path, finding.kind, cache, stores)
            if finding.key and finding.lost:
                packed.setdefault(finding.kind, bytearray()).extend(_key(path, finding))
            elif not finding.key and finding.fault in FAULTS_WITHOUT_KEYS and not finding.forbidden:
                whole_kinds.add(finding.kind)
        in_place += sum(_count_in_place(findings, store) for store in stores.values())
    if in_place:
        what = f"{in_place:,} of the listed records are readable but wrong, and block the rebuild"
        raise CacheDamaged(what, where=str(path), remedy=Command.of("cache repair --list", path))
    keys = {kind: Keys(sorted_keys(column).tobytes()) for kind, column in packed.items()}
    return Only(str(path.absolute()), keys, frozenset(whole_kinds))


def _count_in_place(findings: Sequence[DamageFinding], store: Store) -> int:
    """Count the records with wrong content that are still in place."""
    of_kind = (finding for finding in findings if finding.kind == store.kind and finding.key and finding.lost)
    wrong = [finding for finding in of_kind if finding.fault is Fault.MEANING]
    places = store.locate([bytes.fromhex(finding.key) for finding in wrong]) if wrong else []
    found = zip(wrong, places, strict=True)
    return sum(any(place.shard == finding.shard for place in copies) for finding, copies in found)


def _open(path: Path, kind: str, cache: CacheFolder, stores: dict[str, Store]) -> None:
    """Open the store of a kind, once; refuse unknown kinds, as the name becomes a file name."""
    try:
        if kind not in stores:
            stores[kind] = cache.kind(kind)
    except ValueError:
        raise _unusable(path, f"{kind!r} is not a kind of record") from None


def _key(path: Path, finding: DamageFinding) -> bytes:
    """Return the key of a finding."""
    key = bytes.fromhex(finding.key)
    if len(key) != KEY_BYTES:
        raise _unusable(path, f"{finding.key!r} is not a record key")
    return key


def _unusable(path: Path, what: str) -> ConfigError:
    return ConfigError(what, where=str(path), remedy=Command.of("cache validate --full", then="   (writes a new list)"))
