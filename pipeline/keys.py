"""Keys are recipes: the digest of everything that can change a result, and of nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_BYTES = 16


def recipe_key(kind: str, recipe: Mapping[str, Any]) -> bytes:
    """Return the 16-byte key of what `kind` makes from `recipe`, which is plain JSON data.

    A cryptographic digest, because two recipes that differ must never meet, however they were made.
    """
    text = json.dumps([kind, recipe], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def content_digest(data: bytes | memoryview) -> bytes:
    """Return the 16-byte digest of file bytes; fast, and made to catch accidents rather than forgery."""
    return xxhash.xxh3_128_digest(data)
