"""`pipeline submit --stage regenerate`: what a damage list calls lost is made anew, that and nothing else."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.load import read_config
from pipeline.errors import CacheDamaged, ConfigError, SubmissionRefused
from pipeline.keys import KEY_BYTES
from pipeline.project.restriction import EVERYTHING, Keys, Only, only_of, read_list
from pipeline.runs.engine.lifecycle import new_run, refuse_double
from pipeline.runs.workflow import table
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.key_lists import sorted_pairs
from pipeline.store.maintenance import shard_repair as repairs
from pipeline.store.maintenance.damage_report import DamageFinding, Fault
from pipeline.store.maintenance.leftovers import registered
from pipeline.store.store import RecordPlace, Store
from tests.store.content import key_of, put
from tests.testkit import caches
from tests.testkit.caches import Cached

NOTES = {"files", "recipes", "sets", "weights", "parity", "limits"}
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
    def test_after_damage_a_repaired_cache_becomes_what_it_was_and_only_what_was_lost_is_computed(
        self, cached: Cached
    ) -> None:
        before, rng = cached.records(), random.Random(SEED)
        for kind in cached.cache.kinds():
            shards = cached.shards(kind)
            for path in rng.sample(shards, -(-len(shards) // 10)):
                rng.choice((caches.flip, caches.cut, caches.remove))(path, rng)
        assert cached.submits("validate").code == 4
        report = cached.report()
        repaired = repairs.repair_cache(cached.cache, report)
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
    def test_a_damaged_record_that_nobody_put_aside_is_made_anew_whatever_is_believed_unread(
        self, cached: Cached
    ) -> None:
        unread = ("--set", "cache.verify_bytes=0")
        before, rng = cached.records(), random.Random(SEED)
        for kind in ("embed", "graph"):
            caches.flip(cached.shards(kind)[0], rng)
        assert cached.submits("validate").code == 4
        listed = str(cached.report().path)
        assert "2 records" not in cached.submits("embed", *unread).err
        done = cached.submits("regenerate", "--list", listed, *unread)
        assert done.code == 0, done.err
        outcomes = cached.outcomes()
        assert 0 < outcomes["embed"] + outcomes["graph"] == cached.census("regenerate")["items"]
        assert cached.records() == before

    @pytest.mark.nightly
    def test_what_the_list_does_not_name_stays_missing_and_is_no_failure(self, cached: Cached) -> None:
        gone = sorted(remove(cached, "graph", 0.5))
        named, rest = set(gone[::2]), set(gone[1::2])
        done = cached.submits("regenerate", "--list", str(cached.writes_list(*lost(cached, "graph", named))))
        assert done.code == 0, done.err
        assert f"{len(rest)} missing that the list does not name" in done.err
        assert f"{len(rest)} missing that the list does not name" in done.out
        assert cached.keys()["graph"].isdisjoint(rest)
        assert cached.keys()["graph"] >= named
        assert cached.outcomes() == {"graph": len(named)}

    @pytest.mark.nightly
    def test_the_scan_makes_no_graph_that_the_list_does_not_name(self, cached: Cached) -> None:
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
    def test_regenerating_again_does_nothing(self, cached: Cached) -> None:
        gone = remove(cached, "embed", 0.3)
        words = ("cache", "regenerate", "--list", str(cached.writes_list(*lost(cached, "embed", gone))))
        assert cached.types(*words).code == 0
        assert cached.outcomes() == {"embed": len(gone)}
        again = cached.types(*words)
        assert again.code == 0, again.err
        assert cached.outcomes() == {}
        assert f"{len(cached.keys()['embed'])} cached, 0 to do" in again.err
        assert again.out.startswith("nothing to regenerate: what the list names is there")
        assert len(again.out.splitlines()) == 1

    @pytest.mark.nightly
    def test_without_a_list_whatever_is_missing_is_made(self, cached: Cached) -> None:
        before = cached.records()
        for kind in ("graph", "embed", "files"):
            remove(cached, kind, 0.4)
        done = cached.types("cache", "regenerate")
        assert done.code == 0, done.err
        assert "everything that this data set needs is there" in done.out
        assert cached.records() == before

    @pytest.mark.nightly
    def test_who_regenerates_is_known_to_use_the_cache(self, cached: Cached) -> None:
        shutil.rmtree(cached.cache.root / "_users")
        remove(cached, "graph", 0.1)
        assert cached.types("cache", "regenerate").code == 0
        (user,) = registered(cached.cache.disk, cached.cache.root)[0]
        assert user.config == str(cached.folder / "pipeline.yaml")
        assert user.runs == str(cached.folder / "runs")
        assert {"scan", "graph"} <= {kind for kind, _ in user.tags}

    @pytest.mark.nightly
    def test_of_a_shard_that_nobody_knows_all_that_is_missing_of_its_kind_is_made(self, cached: Cached) -> None:
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
        assert "whatever was missing was made of graph" in done.out
        assert cached.records() == before


class TestSaid:
    """What people are told, and the exit code."""

    @pytest.mark.nightly
    def test_records_of_no_item_are_counted_and_end_it_with_4(self, cached: Cached) -> None:
        gone = remove(cached, "embed", 0.2)
        foreign = {key_of(number) for number in range(3)}
        listed = cached.writes_list(*lost(cached, "embed", gone | foreign), *lost(cached, "graph", {key_of(9)}))
        done = cached.types("cache", "regenerate", "--list", str(listed))
        assert done.code == 4
        total = len(gone) + 4
        assert f"4 of {total} named records cannot be made here" in done.err
        assert "4 of no item of this data set with these settings (3 embed, 1 graph)" in done.err
        assert f"next: pipeline submit --stage regenerate --list {listed}" in done.err
        assert cached.keys()["embed"] >= gone

    @pytest.mark.nightly
    def test_notes_that_nobody_needs_now_are_no_failure(self, cached: Cached) -> None:
        listed = cached.writes_list(*lost(cached, "limits", {key_of(1)}), *lost(cached, "files", {key_of(2)}))
        done = cached.types("cache", "regenerate", "--list", str(listed))
        assert done.code == 0, done.err
        assert "2 notes come back when they are needed" in done.out
        assert {"1 limits", "1 files"} <= set(re.findall(r"1 \w+", done.out))

    @pytest.mark.nightly
    def test_an_empty_list_begins_no_run(self, cached: Cached) -> None:
        listed = str(cached.writes_list())
        for words in (("cache", "regenerate"), ("submit", "--stage", "regenerate")):
            done = cached.types(*words, "--list", listed)
            assert (done.code, done.out) == (0, f"nothing to regenerate: {listed} names no record that is lost\n")
        assert not (cached.folder / "runs").exists()

    @pytest.mark.nightly
    def test_json_is_one_document_however_it_ends(self, cached: Cached) -> None:
        gone = remove(cached, "graph", 0.1)
        for findings, code in ((lost(cached, "graph", gone), 0), (lost(cached, "graph", {key_of(1)}), 4), ([], 0)):
            done = cached.types("cache", "regenerate", "--json", "--list", str(cached.writes_list(*findings)))
            document = json.loads(done.out)
            assert (done.code, document["exit_code"]) == (code, code), done.err
        assert document["state"] == "done"

    @pytest.mark.nightly
    def test_a_dry_run_says_what_would_be_made_and_makes_nothing(self, cached: Cached) -> None:
        gone = remove(cached, "graph", 0.2)
        listed = str(cached.writes_list(*lost(cached, "graph", gone)))
        done = cached.types("submit", "--stage", "regenerate", "--list", listed, "--dry-run")
        assert done.code == 0, done.err
        row = next(line.split() for line in done.out.splitlines() if line.startswith("graph "))
        assert row[6] == str(len(gone))
        assert "embed" not in done.out  # nothing of it is named
        assert cached.keys()["graph"].isdisjoint(gone)

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (("submit", "--stage", "embed", "--list", "x"), "--stage is embed"),
            (("submit", "--stage", "regenerate", "--only"), "several stages are not one alone"),
            (("submit", "--stage", "regenerate", "--list", "nowhere.jsonl"), "No such file"),
            (("cache", "regenerate", "--list", "pipeline.yaml"), "no damage list"),
        ],
    )
    def test_wrong_words_are_refused(self, cached: Cached, words: tuple[str, ...], what: str) -> None:
        done = cached.types(*words)
        assert done.code == 2
        assert what in done.err
        assert "next: pipeline" in done.err


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

    @pytest.mark.nightly
    def test_only_what_is_lost_is_taken(self, cache: CacheFolder, listed: Callable[..., Path]) -> None:
        whole_elsewhere = DamageFinding("embed", Fault.RECORD, "flipped", "a", key_of(1).hex())
        header = DamageFinding("embed", Fault.HEADER, "other readers cannot open it", "a")
        twice = [DamageFinding("graph", Fault.RECORD, "flipped", name, key_of(2).hex(), lost=True) for name in "ab"]
        only = read_list(listed(whole_elsewhere, header, *twice), cache)
        assert only.kinds == {"graph"}
        assert list(only.of("graph")) == [key_of(2)]
        assert only.names("graph", key_of(2))
        assert not only.names("graph", key_of(1))
        assert not only.names("embed", key_of(1))

    @pytest.mark.nightly
    @pytest.mark.parametrize("kind", ["../../etc", "a/b", "", ".", "_reports"])
    def test_a_kind_that_leads_out_of_the_run_is_refused(
        self, cache: CacheFolder, listed: Callable[..., Path], kind: str
    ) -> None:
        with pytest.raises(ConfigError, match="is no kind of records"):
            read_list(listed(DamageFinding(kind, Fault.GONE, "", "", key_of(1).hex(), lost=True)), cache)

    @pytest.mark.nightly
    @pytest.mark.parametrize("key", ["xyz", "00", "0" * 31, "0" * 34])
    def test_what_is_no_key_is_refused(self, cache: CacheFolder, listed: Callable[..., Path], key: str) -> None:
        with pytest.raises(ConfigError, match=r"is no key|a line of it cannot be read"):
            read_list(listed(DamageFinding("scan", Fault.GONE, "", "", key, lost=True)), cache)

    @pytest.mark.nightly
    def test_what_says_nonsense_must_be_put_aside_first(self, cache: CacheFolder, listed: Callable[..., Path]) -> None:
        (shard,) = (path.name for path in (cache.root / "scan/shards").iterdir())
        finding = DamageFinding("scan", Fault.MEANING, "no chain", shard, key_of(1).hex(), lost=True)
        with pytest.raises(CacheDamaged, match="they are in the way") as raised:
            read_list(listed(finding), cache)
        assert raised.value.remedy.startswith("pipeline cache repair --list ")
        (cache.root / "scan/shards" / shard).unlink()
        assert list(read_list(listed(finding), CacheFolder(cache.root)).of("scan")) == [key_of(1)]

    @pytest.mark.nightly
    def test_a_long_list_opens_each_store_once_and_looks_many_records_up_together(
        self, cache: CacheFolder, listed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (shard,) = (path.name for path in (cache.root / "scan/shards").iterdir())
        there = [DamageFinding("scan", Fault.MEANING, "", shard, key_of(number).hex(), lost=True) for number in (0, 1)]
        elsewhere = [
            DamageFinding("scan", Fault.MEANING, "", "a", key_of(number).hex(), lost=True) for number in range(9)
        ]
        opened, asked = Counter[str](), Counter[int]()
        kind, locate = CacheFolder.kind, Store.locate

        def counted_kind(self: CacheFolder, name: str) -> Store:
            opened[name] += 1
            return kind(self, name)

        def counted_locate(self: Store, keys: Sequence[bytes]) -> list[list[RecordPlace]]:
            asked[len(keys)] += 1
            return locate(self, keys)

        monkeypatch.setattr(CacheFolder, "kind", counted_kind)
        monkeypatch.setattr(Store, "locate", counted_locate)
        monkeypatch.setattr("pipeline.project.restriction.AT_ONCE", 6)
        with pytest.raises(CacheDamaged, match="2 of the records"):
            read_list(listed(*there, *elsewhere), cache)
        assert (opened, asked) == ({"scan": 1}, {6: 1, 5: 1})

    @pytest.mark.nightly
    @given(st.sets(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=40), st.binary(min_size=16, max_size=16))
    def test_keys_are_a_sorted_set(self, names: set[bytes], other: bytes) -> None:
        keys = Keys(sorted_pairs(b"".join(names)).astype(">u8").tobytes())
        assert list(keys) == sorted(names)
        assert all(name in keys for name in names)
        assert (other in keys) == (other in names)
        assert keys[1:3] == sorted(names)[1:3]

    @pytest.mark.nightly
    def test_a_run_is_confined_to_what_it_was_given(self, cache: CacheFolder, tmp_path: Path) -> None:
        (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: nowhere}\n")
        config = read_config(tmp_path / "pipeline.yaml", [f"cluster.runs={tmp_path / 'runs'}"]).config
        only = Only("/a/list", {"scan": Keys(key_of(1)), "embed": Keys(key_of(2))}, frozenset({"graph"}))
        assert only_of(new_run(config, ["scan", "regenerate"], only=only)) == only
        assert only_of(new_run(config, ["scan"])) == EVERYTHING
        assert EVERYTHING.names("scan", key_of(5))
        assert only.names("graph", key_of(5))

    @pytest.mark.nightly
    def test_a_run_that_is_confined_is_not_joined(self, cache: CacheFolder, tmp_path: Path) -> None:
        (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: nowhere}\n")
        config = read_config(tmp_path / "pipeline.yaml", [f"cluster.runs={tmp_path / 'runs'}"]).config
        new_run(config, ["scan", "regenerate"], only=Only("/a/list", {"scan": Keys(key_of(1))}))
        with pytest.raises(SubmissionRefused, match="already"):
            refuse_double(config, ["scan"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "kinds", "stages"),
    [
        ("glob", None, ["scan", "embed", "graph"]),
        ("fasta", None, ["scan", "embed"]),
        ("glob", {"graph"}, ["scan", "graph"]),
        ("glob", {"sets"}, ["scan", "graph"]),
        ("glob", {"weights", "limits"}, ["scan", "embed"]),
        ("glob", {"files"}, ["scan"]),
        ("glob", {"recipes"}, ["scan", "embed", "graph"]),
        ("fasta", {"graph"}, ["scan"]),
    ],
)
def test_only_the_stages_that_make_what_is_named_are_run(
    tmp_path: Path, source: str, kinds: set[str] | None, stages: list[str]
) -> None:
    (tmp_path / "pipeline.yaml").write_text(f"data: {{source: {source}, path: nowhere}}\n")
    config = read_config(tmp_path / "pipeline.yaml", []).config
    assert table.regenerated(config, kinds) == [*stages, "regenerate"]
    assert set(table.everything(config)).isdisjoint({"validate", "regenerate"})
