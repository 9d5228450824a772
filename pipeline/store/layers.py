"""Several stores of one kind, looked through one after the other; only one of them, the own, is ever written.

What is asked of a layer is only what no layer before it has. A layer that goes away counts as absent: it may be on a
disk that others purge, or unmount.
"""

from __future__ import annotations

import heapq
import logging
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import CacheDamaged, CacheUnusable
from pipeline.store.store import Place, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    import numpy.typing as npt

    from pipeline.errors import RecordMissing
    from pipeline.store.disk import Disk
    from pipeline.store.layout import KindLayout
    from pipeline.store.record import Record
    from pipeline.store.store import Room

log = logging.getLogger(__name__)


class Layered(Store):
    """A store that looks in others, too: in those `ahead` of itself, in itself, then in those `under` it.

    Whoever looks something up need not know. What is written, indexed or counted (`stat`, `tagged`) is its own.
    """

    def __init__(
        self,
        disk: Disk,
        layout: KindLayout,
        prepare: Callable[[], None],
        *,
        ahead: Sequence[Store] = (),
        under: Sequence[Store] = (),
    ) -> None:
        super().__init__(disk, layout, prepare)
        self._layers: tuple[Store | None, ...] = (*ahead, None, *under)  # None: itself
        self._away: set[int] = set()  # layers that were said to be

    def locate(self, keys: Sequence[bytes]) -> list[list[Place]]:
        """Return for each key where its copies are, in the first layer that has any."""
        found: list[list[Place]] = [[] for _ in keys]
        for number, store in enumerate(self._stores()):
            absent = [at for at, places in enumerate(found) if not places]
            if absent:
                with self._may_be_away(number):
                    for at, places in zip(absent, Store.locate(store, [keys[at] for at in absent]), strict=True):
                        found[at] = [place._replace(layer=number) for place in places]
        return found

    def present(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Say of each key whether any layer has it."""
        present = np.zeros(len(keys), bool)
        for number, store in enumerate(self._stores()):
            absent = np.flatnonzero(~present)
            if len(absent):
                with self._may_be_away(number):
                    present[absent] = Store.present(store, [keys[at] for at in absent.tolist()])
        return present

    def keys(self) -> Iterator[bytes]:
        """Yield every key of any layer once, sorted."""
        merged = heapq.merge(*(self._keys_of(number, store) for number, store in enumerate(self._stores())))
        return (key for key, _ in groupby(merged))

    def whole_at(self, key: bytes, place: Place, room: Room | None = None) -> Record | None:
        """Return the copy of a record that is at a place, if it is whole; one that is damaged is never named again."""
        return Store.whole_at(self._stores()[place.layer], key, place, room)

    def is_whole_beside(self, key: bytes, shards: Container[str]) -> bool:
        """Say whether there is a whole copy of a record in another shard, or another layer, by reading it."""
        if super().is_whole_beside(key, shards):
            return True
        for number, layer in enumerate(self._layers):
            with self._may_be_away(number):
                if layer is not None and layer.has_whole(key):
                    return True
        return False

    def refresh(self) -> None:
        """Look at the disk anew; at the other layers when they are next asked."""
        super().refresh()
        for layer in filter(None, self._layers):
            layer.forget()

    def why_not(self, key: bytes) -> CacheDamaged | RecordMissing:
        """Return the error for a record of which no layer has a whole copy."""
        reasons = [Store.why_not(store, key) for store in (self, *self._stores())]
        return next((one for one in reasons if isinstance(one, CacheDamaged)), reasons[0])

    def _first_whole(self, key: bytes, places: Sequence[Place], room: Room | None = None) -> Record | None:
        """Return the first whole copy of those at some places, else of those in the layers after these."""
        record = super()._first_whole(key, places, room)
        after = places[-1].layer + 1 if places else len(self._layers)
        for number, store in list(enumerate(self._stores()))[after:]:
            if record is None:
                with self._may_be_away(number):
                    copies = [place._replace(layer=number) for place in Store.locate(store, [key])[0]]
                    record = super()._first_whole(key, copies, room)
        return record

    def _stores(self) -> list[Store]:
        """Return the layers in order; no reference to itself is kept, so that open files close at once."""
        return [layer or self for layer in self._layers]

    def _keys_of(self, number: int, store: Store) -> Iterator[bytes]:
        with self._may_be_away(number):
            yield from Store.keys(store)

    @contextmanager
    def _may_be_away(self, number: int) -> Iterator[None]:
        """Take a layer that cannot be read for an empty one, unless it is our own."""
        try:
            yield
        except (CacheUnusable, OSError) as error:
            layer = self._layers[number]
            if layer is None:
                raise
            layer.forget()
            if number not in self._away:
                self._away.add(number)
                log.warning("%s cannot be read, and counts as empty: %s", layer.layout.folder, error)
