"""The cache that neighbours share: it is damaged by chance, and every validation must tell the truth about it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.format.disk import Disk
from pipeline.store.shard_index import indexed
from tests.security.test_two_users import GROUPS, LAB
from tests.weeks.one_project import DAMAGED, Neighbour
from tests.weeks.scene import must

KINDS = ("flip a byte", "truncate a shard", "delete a shard", "delete an index")
VERBS = (
    ("validate",),
    ("validate",),
    ("clean", "--yes"),
    ("clean", "--yes", "--older-than", "1m"),
    ("repair", "--yes"),
    ("compact", "--yes"),
)
WHOLE = ("whole", "listed")


@dataclass(frozen=True)
class Looked:
    """What a validation said."""

    code: int
    named: frozenset[str]  # the shards in which it found something
    verdicts: dict[tuple[str, str], bool]  # by kind and key: is there a whole copy?
    places: dict[tuple[str, str], set[str]]  # by kind and key: the shards


@dataclass
class SharedCache:
    """A folder of a group, and the damage that was done in it."""

    folder: Path
    place: Path  # where lists are written aside
    rng: random.Random
    damaged: dict[Path, str] = field(default_factory=dict)  # shards, by the digest of their damaged bytes
    is_doubtful: bool = False  # damage was done since the last validation that found none

    def __post_init__(self) -> None:
        self.folder.mkdir()
        os.chown(self.folder, 0, LAB)
        self.folder.chmod(GROUPS)

    def damages(self, who: Neighbour, *, beside_runs: bool) -> str:
        """Damage something; then have somebody validate, who must find it."""
        kind = self.rng.choice(KINDS)
        pattern = "*/index.bin" if kind == "delete an index" else "*/shards/*.safetensors"
        if not (there := sorted(self.folder.glob(pattern))):
            return ""
        path = self.rng.choice(there)
        before = self.validated(who)
        if not path.exists():  # a run has moved its records meanwhile
            return ""
        self.is_doubtful = True
        is_indexed = self._is_indexed(path)
        self._damage(path, kind)
        after = self.validated(who)
        if kind == "delete a shard" and beside_runs:  # which write the index: it names what is there
            is_indexed = is_indexed and self._is_indexed(path)
        trouble = untold(before, after, path.name, is_indexed=is_indexed)
        must(not trouble, f"{kind} of {path.parent.parent.name}/{path.name}: {trouble}")
        return kind

    def looked_after(self, who: Neighbour) -> str:
        """Type a verb as somebody, which must work."""
        words = self.rng.choice(VERBS)
        if not any(self.folder.iterdir()):
            return ""
        if words == ("validate",):
            self.validated(who)
        else:
            code, said = who.types("cache", *words)
            must(code == 0, f"`cache {' '.join(words)}` ended with {code}", lambda: said)
        return f"cache {words[0]}"

    def validated(self, who: Neighbour) -> Looked:
        """Validate as somebody, and check that it tells of all damage that is there before and after."""
        known = self._still_damaged()
        verdicts = who.folder / f"verdicts-{secrets.token_hex(4)}.jsonl"
        listed = who.folder / f"damage-{secrets.token_hex(4)}.jsonl"
        code, said = who.types("cache", "validate", "--verdicts", verdicts.name, "--out", listed.name)
        must(code in (0, DAMAGED), f"a validation ended with {code}", lambda: said)
        must(code == 0 or self.is_doubtful, "damage is told, and none was done", lambda: said)
        looked = _looked(code, verdicts, listed)
        unnamed = [path.name for path in known & self._still_damaged() if path.name not in looked.named]
        must(not unnamed, f"damage is not told of {unnamed}", lambda: said)
        if code == 0:
            self.is_doubtful = False
        return looked

    def ends(self, everybody: list[Neighbour]) -> None:
        """Clean, repair and validate a last time: nothing is wrong any more, and nothing half is left."""
        for words in (("repair", "--yes"), ("clean", "--yes", "--older-than", "0")):
            code, said = everybody[0].types("cache", *words)
            must(code == 0, f"the last `cache {words[0]}` ended with {code}", lambda said=said: said)
        for who in everybody:
            code, said = who.types("cache", "validate")
            must(code == 0, "the cache is not whole at the end", lambda said=said: said)

    def _still_damaged(self) -> set[Path]:
        """Return the damaged shards that nobody has mended or put away."""
        self.damaged = {path: digest for path, digest in self.damaged.items() if _digest(path) == digest}
        return set(self.damaged)

    def _is_indexed(self, shard: Path) -> bool:
        return shard.name in indexed(Disk(), KindLayout(shard.parents[1]))

    def _damage(self, path: Path, kind: str) -> None:
        if kind.startswith("delete"):
            path.unlink()
            return
        content = bytearray(path.read_bytes())
        where = self.rng.randrange(len(content))
        if kind == "truncate a shard":
            del content[where:]
        else:
            content[where] ^= 1 << self.rng.randrange(8)
        path.write_bytes(content)
        self.damaged[path] = _digest(path)


def untold(before: Looked, after: Looked, shard: str, *, is_indexed: bool = True) -> str:
    """Return what of a damaged or deleted shard a validation did not tell; empty if nothing.

    What only a shard knew whose table is damaged, or which is gone before any index named it, nobody can tell.
    """
    keys = [key for key, places in before.places.items() if shard in places and before.verdicts[key]]
    unknown = [key for key in keys if key not in after.verdicts]
    if unknown and is_indexed and shard not in after.named:
        return f"nothing is said of {len(unknown)} of its {len(keys)} records, such as {unknown[0]}"
    lost = [key for key in keys if not after.verdicts.get(key, False)]
    is_silent = lost and not after.code and is_indexed
    return f"{len(lost)} records are lost, and the exit code is {after.code}" if is_silent else ""


def _looked(code: int, verdicts: Path, listed: Path) -> Looked:
    """Read what a validation wrote."""
    found: dict[tuple[str, str], bool] = {}
    places: dict[tuple[str, str], set[str]] = {}
    for line in map(json.loads, verdicts.read_text().splitlines()):
        key = (line["kind"], line["key"])
        found[key] = found.get(key, False) or line["verdict"] in WHOLE
        places.setdefault(key, set()).add(line["shard"])
    text = listed.read_text() if listed.exists() else ""
    named = frozenset(line["shard"] for line in map(json.loads, text.splitlines()) if line.get("shard"))
    for path in (verdicts, listed):
        path.unlink(missing_ok=True)
    return Looked(code, named, found, places)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # somebody has removed it meanwhile
        return ""
