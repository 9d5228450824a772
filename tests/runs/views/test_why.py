"""Why something is done again: pure answers, by what is there and what was recorded before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.stage_graph import WorkState
from pipeline.runs.views.why import (
    Because,
    FileFound,
    Recorded,
    RecordFound,
    changes_between,
    nearest_changes,
    setting_of,
    why_all,
    why_files,
    why_item,
    why_record,
    why_stage,
)

A, B = "a" * 32, "b" * 32
EMBED = {"version": 1, "weights": A, "layer": 6, "context": "chain", "precision": "fp32"}
DONE = Because(WorkState.DONE)


def told(changes: Any) -> list[str]:
    return [str(change) for change in changes]


@pytest.mark.parametrize(
    ("kind", "was", "now", "said"),
    [
        ("embed", {"context": "chain"}, {"context": "partner"}, "embed.context: chain → partner"),
        ("embed", {"weights": A}, {"weights": B}, f"embed.weights was {A[:12]}…, is {B[:12]}…"),
        ("embed", {}, {"cut": ["windows", 1022, 256]}, 'embed.long was not set, is ["windows", 1022, 256]'),
        ("graph", {"atom_radius": 5.0}, {"atom_radius": 4.0}, "graph.atom.radius: 5.0 → 4.0"),
        ("graph", {"radius": None}, {"radius": 8.0}, "graph.radius was not set, is 8.0"),
        (
            "scan",
            {"policy": {"altlocs": "first"}},
            {"policy": {"altlocs": "highest"}},
            "structures.altlocs: first → highest",
        ),
        ("scan", {"reading": {"seqres": False}}, {"reading": {"seqres": True}}, "structures.sequence: false → true"),
        ("scan", {"ligand": "smaller"}, {"ligand": "larger"}, "data.ligand: smaller → larger"),
        (
            "graph",
            {"version": [3, 1]},
            {"version": [4, 1]},
            "how this program does graph (its version of that): [3, 1] → [4, 1]",
        ),
        ("train", {"seed": 0}, {"seed": 1}, "train.seed: 0 → 1"),
        ("train", {"options": {"width": 8}}, {"options": {"width": 9}}, "train.options.width: 8 → 9"),
        ("train", {"code": A}, {"code": B}, f"the task's code was {A[:12]}…, is {B[:12]}…"),
        ("train", {"embeddings": {"layer": 5}}, {"embeddings": {"layer": 6}}, "embed.layer: 5 → 6"),
        ("new", {"x": 1}, {"x": 2}, "new.x: 1 → 2"),
    ],
)
def test_a_change_is_told_by_the_name_that_people_set(kind: str, was: Any, now: Any, said: str) -> None:
    assert told(changes_between(kind, was, now)) == [said]


recipes = st.dictionaries(
    st.sampled_from("abcd"),
    st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1)) | st.fixed_dictionaries({"x": st.integers(0, 1)}),
)


@given(recipes, recipes)
def test_recipes_differ_exactly_where_their_settings_do(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changes = changes_between("embed", was, now)
    assert not changes_between("embed", was, was)
    assert {change.setting for change in changes} == {change.setting for change in changes_between("embed", now, was)}
    differ = {name for name in {**was, **now} if was.get(name) != now.get(name)}
    assert {change.setting.split(".")[1] for change in changes} == differ


def test_lists_and_tuples_are_the_same_setting() -> None:
    assert not changes_between("graph", {"version": (1, 2)}, {"version": [1, 2]})


def test_of_several_recipes_the_one_most_alike_is_compared() -> None:
    others = [{**EMBED, "layer": 5, "context": "partner"}, {**EMBED, "layer": 5}, {**EMBED, "weights": B, "layer": 4}]
    assert told(nearest_changes("embed", EMBED, others)) == ["embed.layer: 5 → 6"]
    assert nearest_changes("embed", EMBED, [EMBED]) == nearest_changes("embed", EMBED, []) == ()


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        (RecordFound("k", is_whole=True), "done", ""),
        (RecordFound("k", is_whole=True, refused="no_polymer: none"), "refused", "no_polymer: none"),
        (RecordFound("k"), "to do", "it was never done"),
        (RecordFound("k", damage="digest differs"), "to do", "its record is damaged, and made anew: digest differs"),
        (
            RecordFound("k", recipe=EMBED, others=[{**EMBED, "layer": 5}]),
            "to do",
            "it was done with other settings: embed.layer: 5 → 6",
        ),
        (
            RecordFound("k", listed_by="r1", listed_key="k"),
            "to do",
            "run r1 had this record, and the cache has it no more",
        ),
        (RecordFound("k", listed_by="r1", listed_key="j"), "to do", "what it is made of is another than in run r1"),
        (
            RecordFound("k", damage="torn", recipe=EMBED, others=[{**EMBED, "layer": 5}]),
            "to do",
            "its record is damaged, and made anew: torn",
        ),
    ],
)
def test_a_record_says_why_it_is_made(found: RecordFound, state: str, said: str) -> None:
    because = why_record("embed", found)
    assert (because.state.value, str(because)) == (state, said)


@pytest.mark.parametrize(
    ("files", "state", "part"),
    [
        ([], "done", ""),
        ([FileFound("a.pdb", digest=A)], "done", ""),
        (
            [FileFound("a.pdb", digest=A), FileFound("b.pdb", refused="missing_file: no such file")],
            "refused",
            "missing_file",
        ),
        (
            [FileFound("a.pdb", digest=B, earlier=(A,), run="r1")],
            "to do",
            f"changed since run r1: they were {A[:12]}…, are {B[:12]}…",
        ),
        (
            [FileFound("a.pdb", is_known=False, digest=A, earlier=(A,), run="r1")],
            "to do",
            "touched, moved or copied since run r1, with the same bytes",
        ),
        ([FileFound("a.pdb", is_known=False, digest=A)], "to do", "a.pdb is not read yet"),
        ([FileFound("a.pdb", is_settled=False, is_known=False, digest=A)], "to do", "a.pdb changed just now"),
    ],
)
def test_files_say_what_became_of_them(files: list[FileFound], state: str, part: str) -> None:
    because = why_files(files)
    assert because.state.value == state
    assert part in because.why


def test_a_file_that_was_only_touched_costs_no_new_record() -> None:
    touched = [FileFound("a.pdb", is_known=False, digest=A, earlier=(A,), run="r1")]
    other = why_record("scan", RecordFound("k", recipe={"max_residues": 9}, others=[{"max_residues": 8}]))
    never = why_record("scan", RecordFound("k"))
    assert str(why_item(touched, DONE)).endswith("; nothing is computed anew for that")
    assert why_item(touched, other) is other
    assert why_item([FileFound("a.pdb", digest=A)], other) is other
    changed = [FileFound("a.pdb", digest=B, earlier=(A,), run="r1")]
    assert why_item(changed, never) == why_item(changed, other) == why_files(changed)


def test_an_item_that_cannot_be_used_is_refused_whoever_says_so() -> None:
    no, later = Because(WorkState.REFUSED, "no"), Because(WorkState.TO_DO, "later")
    assert why_item([FileFound("a.pdb", is_known=False)], no) is no
    assert why_item([FileFound("a.pdb", refused="missing_file")], later).why == "missing_file"


def test_several_sequences_are_as_the_worst_of_them() -> None:
    later, no = Because(WorkState.TO_DO, "later"), Because(WorkState.REFUSED, "no")
    assert str(why_all([DONE, later, later], "sequence")) == "2 of 3 sequences: later"
    assert why_all([DONE, later, no], "sequence").state is WorkState.REFUSED
    assert why_all([later], "sequence") is later
    waits = Because(WorkState.WAITING, "no weights")
    assert why_all([waits], "sequence") is waits
    assert str(why_all([DONE, waits], "embedding")) == "1 of 2 embeddings: no weights"
    assert why_all([], "sequence").state is WorkState.NONE
    assert str(why_all([DONE, DONE], "sequence")) == "2 sequences"


@pytest.mark.parametrize(
    ("counts", "recorded", "state", "part"),
    [
        ({"cached": 5}, [], "done", ""),
        ({}, [], "nothing to do", ""),
        ({"unkept": 5}, [], "done", ""),
        ({"unplanned": 1}, [], "waiting", "when the stages before it are done"),
        ({"waiting": 3}, [], "waiting", "3 items are not scanned yet"),
        ({"missing": 4}, [], "to do", "it was never done"),
        ({"missing": 4, "cached": 2}, [], "to do", "4 are new or changed, or their records went"),
        (
            {"missing": 4},
            [Recorded({**EMBED, "layer": 5}, 7)],
            "to do",
            "7 records are there, made with other settings: embed.layer: 5 → 6",
        ),
        ({"missing": 4}, [Recorded(EMBED, 7)], "to do", "of other data, or of files that have changed"),
    ],
)
def test_a_stage_says_why_it_is_done_again(counts: Any, recorded: list[Recorded], state: str, part: str) -> None:
    because = why_stage("embed", counts, EMBED, recorded)
    assert because.state.value == state
    assert part in str(because)


def test_every_setting_of_a_kind_that_is_known_stands_in_its_section() -> None:
    assert setting_of("embed", "precision") == "embed.precision"
    assert setting_of("scan", "reading.model") == "structures.model"
    assert setting_of("train", "schedule.kind") == "train.schedule.kind"
