"""Records whose content follows from their key, so that any copy of one can be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.keys import recipe_key
from pipeline.store.maintenance.checking import check

if TYPE_CHECKING:
    from typing import Any

    from pipeline.store.format.record import Record
    from pipeline.store.maintenance.damage_report import Checked
    from pipeline.store.store import Store, StoreWriter


def key_of(number: int) -> bytes:
    return recipe_key("test", {"number": number})


def arrays_of(key: bytes) -> dict[str, Any]:
    rng = np.random.default_rng(int.from_bytes(key, "big"))
    rows = int(rng.integers(0, 6))
    return {
        "names": rng.integers(0, 255, rows, np.uint8),
        "coordinates": rng.normal(size=(rows, 3)).astype(np.float32),
        "flags": rng.integers(0, 2, (2, rows)).astype(bool),
        "energy": np.array(rng.normal()),
    }


def put(writer: StoreWriter, *numbers: int) -> list[bytes]:
    keys = [key_of(number) for number in numbers]
    for key in keys:
        writer.put(key, arrays_of(key), {"name": key.hex()})
    return keys


def is_right(record: Record, key: bytes) -> bool:
    wanted = arrays_of(key)
    return (
        record.key == key
        and record.meta == {"name": key.hex()}
        and record.arrays.keys() == wanted.keys()
        and all(
            array.dtype == wanted[name].dtype and np.array_equal(array, wanted[name])
            for name, array in record.arrays.items()
        )
    )


def rebuild_index(store: Store) -> None:
    """Write the index from the shards alone."""
    store.layout.index.unlink(missing_ok=True)
    store.write_index()


def judged(store: Store) -> list[Checked]:
    """Return what reading every byte of every shard found."""
    return [checked for checked in check(store) if checked.shard]


def damaged(checked: Checked) -> list[bytes]:
    return [bytes.fromhex(finding.key) for finding in checked.findings if finding.key]


def is_undamaged(store: Store) -> bool:
    return not any(checked.findings for checked in check(store))
