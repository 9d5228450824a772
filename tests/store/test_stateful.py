"""The store against a dict, in any order of events."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipeline.errors import RecordMissing
from pipeline.store.cache_folder import CacheFolder
from tests.store.content import is_right, key_of, put

NUMBERS = st.integers(0, 15)


class StoreAgainstDict(RuleBasedStateMachine):
    """`shards` is the model: which keys each published file holds."""

    @initialize()
    def begin(self):
        self.root = Path(tempfile.mkdtemp())
        self.shards = {}
        self.stores = [self.opened(), self.opened()]
        self.writers = [store.writer() for store in self.stores]
        self.waiting = [set(), set()]

    def teardown(self):
        for writer in getattr(self, "writers", []):
            writer.__exit__(None, None, None)
        shutil.rmtree(self.root, ignore_errors=True)

    def opened(self):
        return CacheFolder(self.root / "cache").kind("scan")

    @property
    def there(self):
        return set().union(*self.shards.values())

    @rule(who=st.integers(0, 1), numbers=st.lists(NUMBERS, min_size=1, max_size=4))
    def put(self, who, numbers):
        self.waiting[who].update(put(self.writers[who], *numbers))

    @rule(who=st.integers(0, 1))
    def flush(self, who):
        before = self.files()
        assert set(self.writers[who].flush()) == self.waiting[who]
        for name in self.files() - before:
            self.shards[name] = self.waiting[who]
        self.waiting[who] = set()

    def files(self):
        folder = self.root / "cache/scan/shards"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    @rule(who=st.integers(0, 1))
    def reopen(self, who):
        self.flush(who)
        self.stores[who] = self.opened()
        self.writers[who] = self.stores[who].writer()

    @rule(who=st.integers(0, 1))
    def write_index(self, who):
        self.stores[who].write_index()

    @rule()
    def lose_index(self):
        (self.root / "cache/scan/index.bin").unlink(missing_ok=True)

    @rule(place=st.integers(1, 48), bit=st.integers(0, 7))
    def damage_index(self, place, bit):  # so that it shows; damage in its rows may cost a miss (test_damage.py)
        path = self.root / "cache/scan/index.bin"
        if path.exists():
            content = bytearray(path.read_bytes())
            content[-place] ^= 1 << bit
            path.unlink()
            path.write_bytes(content)

    @rule(which=st.integers(0, 100))
    def purge_a_shard(self, which):
        if self.shards:
            name = sorted(self.shards)[which % len(self.shards)]
            del self.shards[name]
            (self.root / "cache/scan/shards" / name).unlink()

    @rule(who=st.integers(0, 1), number=NUMBERS)
    def get(self, who, number):
        key = key_of(number)
        try:
            assert is_right(self.stores[who].get(key), key)
        except RecordMissing:
            assert (
                key not in self.there
            )  # the other way round is allowed: a purged shard that is open can still be read

    @rule(who=st.integers(0, 1), numbers=st.lists(NUMBERS, unique=True))
    def read(self, who, numbers):
        keys = [key_of(number) for number in numbers if key_of(number) in self.there]
        assert all(is_right(record, key) for record, key in zip(self.stores[who].read(keys), keys, strict=True))

    @invariant()
    def a_new_process_sees_the_dict(self):
        if hasattr(self, "root"):
            store = self.opened()
            asked = [key_of(number) for number in range(16)]
            assert store.missing(asked) == [key for key in asked if key not in self.there]
            assert list(store.keys()) == sorted(self.there)


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
