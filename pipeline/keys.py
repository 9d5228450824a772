"""Keys: digests of everything that can change a result, and of nothing else."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_BYTES = 16
TAG_BYTES = 4
# A file changed this recently may change again within one clock tick, so its times prove nothing yet.
TICK_NS = 50_000_000
COARSE_TICK_NS = 2_000_000_000  # for file systems with whole seconds
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def recipe_key(kind: str, recipe: Mapping[str, Any]) -> bytes:
    """Return the 16-byte key of what `kind` makes from `recipe`, which is plain JSON data.

    The digest is cryptographic, because different recipes must never have the same key.
    """
    return hashlib.blake2b(_ENCODER.encode([kind, recipe]).encode(), digest_size=KEY_BYTES).digest()


def tagged_key(kind: str, recipe: Mapping[str, Any], subject: Any) -> bytes:
    """Return the key of the record that `kind` makes of `subject` by `recipe`; it begins with the tag of the recipe.

    So an index alone shows how many records each recipe has. The rest of the key depends on the recipe, too: two equal
    tags would only distort that count.
    """
    return recipe_tag(kind, recipe) + recipe_key(kind, {"recipe": recipe, "subject": subject})[TAG_BYTES:]


def recipe_tag(kind: str, recipe: Mapping[str, Any]) -> bytes:
    """Return the first bytes of all keys of a recipe."""
    return recipe_key(f"{kind} recipe", recipe)[:TAG_BYTES]


def parse_key(text: str) -> bytes:
    """Parse a key in hexadecimal; raise ValueError for anything else."""
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    return key


def content_digest(data: bytes | memoryview) -> bytes:
    """Return the 16-byte digest of file bytes; it is fast, and detects accidents, not forgery."""
    return xxhash.xxh3_128_digest(data)


def is_settled(mtime_ns: int, ctime_ns: int) -> bool:
    """Tell whether the next change of a file would show in its times.

    Any write sets the change time. A modification time without a fraction may mean a clock with whole seconds.
    """
    tick_ns = COARSE_TICK_NS if mtime_ns % 1_000_000_000 == 0 else TICK_NS
    return abs(time.time_ns() - ctime_ns) >= tick_ns
