"""`pipeline submit regenerate`: what a damage list calls lost is made anew, that and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.load import read_config
from pipeline.engine.lifecycle import new_run, refuse_double
from pipeline.errors import CacheDamaged, ConfigError, SubmissionRefused
from pipeline.keys import KEY_BYTES
from pipeline.project.restriction import EVERYTHING, Keys, Only, only_of, read_list
from pipeline.stages import table
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.damage_report import DamageFinding, Fault
from pipeline.store.maintenance.shard_plans import repair
from pipeline.store.users import sorted_keys
from tests.store.content import key_of, put
from tests.testkit import caches
from tests.testkit.caches import Cached
from tests.testkit.project import DATA, write_config

SEED = 7


def lost(cached: Cached, kind: str, keys: set[bytes]) -> list[DamageFinding]:
    """Return findings that say that records are lost."""
    return [DamageFinding(kind, Fault.GONE, "its shard is gone", "", key.hex(), lost=True) for key in sorted(keys)]


def remove(cached: Cached, kind: str, share: float, seed: int = SEED) -> set[bytes]:
    """Remove some of the files of a kind, and return what is gone with them."""
    before, shards = cached.keys()[kind], cached.shards(kind)
    for shard in random.Random(seed).sample(shards, max(1, round(share * len(shards)))):
        shard.unlink()
    return before - cached.keys()[kind]


class TestContent:
    """What a cache holds afterwards, and what was computed for it."""

    @pytest.mark.nightly
    def test_after_damage_a_repaired_cache_becomes_what_it_was_and_only_what_was_lost_is_computed(self, cached):
        before, rng = cached.records(), random.Random(SEED)
        for kind in cached.cache.kinds():
            shards = cached.shards(kind)
            for path in rng.sample(shards, -(-len(shards) // 10)):
                rng.choice((caches.flip, caches.cut, caches.remove))(path, rng)
        assert cached.submits("validate").code == 4
        report = cached.report()
        repaired = repair(cached.cache, report)
        assert repaired.missing is not None
        kept = cached.records()
        gone = {kind: before[kind].keys() - kept.get(kind, {}).keys() for kind in before}
        assert sum(map(len, gone.values())) == repaired.lost > 0
        done = cached.submits("regenerate", "--list", str(repaired.missing))
        assert done.code == 0, done.err
        assert cached.records() == before
        assert cached.census("regenerate")["whole"] == {kind: len(keys) for kind, keys in gone.items() if keys}
        outcomes = cached.outcomes()
        assert outcomes["embed"] == len(gone["embed"])
        assert outcomes["graph"] <= len(gone["graph"])  # the rest was made while the scan had its structure in hand
        assert outcomes["scan"] <= len(gone["scan"]) + len(gone["files"])
        copies = {kind: sum(map(len, cached.cache.kind(kind).locate(list(keys)))) for kind, keys in before.items()}
        assert copies == {kind: len(keys) for kind, keys in before.items()}  # no record was made twice
        assert cached.submits("validate").code == 0

    @pytest.mark.nightly
    def test_a_damaged_record_that_nobody_put_aside_is_made_anew_whatever_is_believed_unread(self, cached):
        unread = ("--set", "cache.verify_bytes=0")
        before, rng = cached.records(), random.Random(SEED)
        for kind in ("embed", "graph"):
            caches.flip(cached.shards(kind)[0], rng)
        assert cached.submits("validate").code == 4
        listed = str(cached.report().path)
        done = cached.submits("regenerate", "--list", listed, *unread)
        assert done.code == 0, done.err
        outcomes = cached.outcomes()
        assert 0 < outcomes["embed"] + outcomes["graph"] == cached.census("regenerate")["items"]
        assert cached.records() == before

    @pytest.mark.nightly
    def test_what_the_list_does_not_name_stays_missing_and_is_no_failure(self, cached):
        gone = sorted(remove(cached, "graph", 0.5))
        named, rest = set(gone[::2]), set(gone[1::2])
        done = cached.submits("regenerate", "--list", str(cached.writes_list(*lost(cached, "graph", named))))
        assert done.code == 0, done.err
        assert cached.keys()["graph"].isdisjoint(rest)
        assert cached.keys()["graph"] >= named
        assert cached.outcomes() == {"graph": len(named)}

    @pytest.mark.nightly
    def test_the_scan_makes_no_graph_that_the_list_does_not_name(self, cached):
        graphs, scans = remove(cached, "graph", 1.0), remove(cached, "scan", 1.0)
        files = remove(cached, "files", 1.0)
        named = set(sorted(graphs)[:3])
        findings = [*lost(cached, "graph", named), *lost(cached, "scan", scans), *lost(cached, "files", files)]
        done = cached.submits("regenerate", "--list", str(cached.writes_list(*findings)))
        assert done.code == 0, done.err
        keys = cached.keys()
        assert (keys["graph"], keys["scan"], keys["files"]) == (named, scans, files)
        assert cached.outcomes() == {"scan": 25}

    @pytest.mark.nightly
    def test_regenerating_again_does_nothing(self, cached):
        gone = remove(cached, "embed", 0.3)
        words = ("cache", "regenerate", "--list", str(cached.writes_list(*lost(cached, "embed", gone))))
        assert cached.types(*words).code == 0
        assert cached.outcomes() == {"embed": len(gone)}
        again = cached.types(*words)
        assert again.code == 0, again.err
        assert cached.outcomes() == {}

    @pytest.mark.nightly
    def test_without_a_list_whatever_is_missing_is_made(self, cached):
        before = cached.records()
        for kind in ("graph", "embed", "files"):
            remove(cached, kind, 0.4)
        done = cached.types("cache", "regenerate")
        assert done.code == 0, done.err
        assert cached.records() == before

    @pytest.mark.nightly
    def test_of_a_shard_that_nobody_knows_all_that_is_missing_of_its_kind_is_made(self, cached):
        before = cached.records()
        (cached.cache.root / "graph" / "index.bin").unlink()
        broken = cached.shards("graph")[0]
        caches.cut(broken, random.Random(SEED))
        assert cached.submits("validate").code == 4
        report = cached.report()
        assert not any(one.key for one in report.findings())
        broken.unlink()
        done = cached.submits("regenerate", "--list", str(report.path))
        assert done.code == 0, done.err
        assert cached.records() == before


class TestSaid:
    """What people are told, and the exit code."""

    @pytest.mark.nightly
    def test_records_of_no_item_are_counted_and_end_it_with_4(self, cached):
        gone = remove(cached, "embed", 0.2)
        foreign = {key_of(number) for number in range(3)}
        listed = cached.writes_list(*lost(cached, "embed", gone | foreign), *lost(cached, "graph", {key_of(9)}))
        done = cached.types("cache", "regenerate", "--list", str(listed))
        assert done.code == 4
        assert str(listed) in done.err
        assert cached.keys()["embed"] >= gone

    @pytest.mark.nightly
    def test_an_empty_list_begins_no_run(self, cached):
        listed = str(cached.writes_list())
        for words in (("cache", "regenerate"), ("submit", "--stage", "regenerate")):
            done = cached.types(*words, "--list", listed)
            assert done.code == 0
        assert not (cached.folder / "runs").exists()

    @pytest.mark.nightly
    def test_wrong_words_are_refused(self, cached):
        for words in (
            "submit embed --list x",
            "submit regenerate --only",
            "submit regenerate --list nowhere.jsonl",
            "cache regenerate --list pipeline.yaml",
        ):
            assert cached.types(*words.split()).code == 2, words


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    """A cache with one file of records."""
    made = CacheFolder(tmp_path / "cache")
    with made.kind("scan").writer() as writer:
        put(writer, 0, 1, 2)
    return made


@pytest.fixture
def listed(cache: CacheFolder, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a damage list."""
    return Cached(tmp_path).writes_list


class TestList:
    """How a list is read."""

    def test_only_what_is_lost_is_taken(self, cache, listed):
        whole_elsewhere = DamageFinding("embed", Fault.RECORD, "flipped", "a", key_of(1).hex())
        header = DamageFinding("embed", Fault.HEADER, "other readers cannot open it", "a")
        twice = [DamageFinding("graph", Fault.RECORD, "flipped", name, key_of(2).hex(), lost=True) for name in "ab"]
        only = read_list(listed(whole_elsewhere, header, *twice), cache)
        assert only.kinds == {"graph"}
        assert list(only.of("graph")) == [key_of(2)]
        assert only.names("graph", key_of(2))
        assert not only.names("graph", key_of(1))
        assert not only.names("embed", key_of(1))

    def test_a_kind_that_leads_out_of_the_run_and_what_is_no_key_are_refused(self, cache, listed):
        kinds = [(kind, key_of(1).hex()) for kind in ("../../etc", "a/b", "", ".", "_reports")]
        keys = [("scan", key) for key in ("xyz", "00", "0" * 31, "0" * 34)]
        for kind, key in (*kinds, *keys):
            with pytest.raises(ConfigError):
                read_list(listed(DamageFinding(kind, Fault.GONE, "", "", key, lost=True)), cache)

    def test_what_says_nonsense_must_be_put_aside_first(self, cache, listed):
        (shard,) = (path.name for path in (cache.root / "scan/shards").iterdir())
        finding = DamageFinding("scan", Fault.MEANING, "no chain", shard, key_of(1).hex(), lost=True)
        with pytest.raises(CacheDamaged) as raised:
            read_list(listed(finding), cache)
        assert raised.value.remedy.startswith("pipeline cache repair --list ")
        (cache.root / "scan/shards" / shard).unlink()
        assert list(read_list(listed(finding), CacheFolder(cache.root)).of("scan")) == [key_of(1)]

    @given(st.sets(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=40), st.binary(min_size=16, max_size=16))
    def test_keys_are_a_sorted_set(self, names, other):
        keys = Keys(sorted_keys(b"".join(names)).tobytes())
        assert list(keys) == sorted(names)
        assert all(name in keys for name in names)
        assert (other in keys) == (other in names)

    def test_a_run_is_confined_to_what_it_was_given(self, cache, tmp_path):
        write_config(tmp_path, **DATA)
        config = read_config(tmp_path / "pipeline.yaml", [f"cluster.runs={tmp_path / 'runs'}"]).config
        only = Only("/a/list", {"scan": Keys(key_of(1)), "embed": Keys(key_of(2))}, frozenset({"graph"}))
        assert only_of(new_run(config, ["scan", "regenerate"], only=only)) == only
        assert only_of(new_run(config, ["scan"])) == EVERYTHING
        assert EVERYTHING.names("scan", key_of(5))
        assert only.names("graph", key_of(5))

    def test_a_run_that_is_confined_is_not_joined(self, cache, tmp_path):
        write_config(tmp_path, **DATA)
        config = read_config(tmp_path / "pipeline.yaml", [f"cluster.runs={tmp_path / 'runs'}"]).config
        new_run(config, ["scan", "regenerate"], only=Only("/a/list", {"scan": Keys(key_of(1))}))
        with pytest.raises(SubmissionRefused):
            refuse_double(config, ["scan"])


@pytest.mark.parametrize(
    ("source", "kinds", "stages"),
    [
        ("glob", None, ["scan", "embed", "graph"]),
        ("fasta", None, ["scan", "embed"]),
        ("glob", {"graph"}, ["scan", "graph"]),
        ("glob", {"sets"}, ["scan", "graph"]),
        ("glob", {"weights", "parity"}, ["scan", "embed"]),
        ("glob", {"files"}, ["scan"]),
        ("glob", {"recipes"}, ["scan", "embed", "graph"]),
        ("fasta", {"graph"}, ["scan"]),
    ],
)
def test_only_the_stages_that_make_what_is_named_are_run(tmp_path, source, kinds, stages):
    write_config(tmp_path, data={"source": source, "path": "nowhere"})
    config = read_config(tmp_path / "pipeline.yaml", []).config
    assert table.regenerated(config, kinds) == [*stages, "regenerate"]
    assert set(table.everything(config)).isdisjoint({"validate", "regenerate"})
