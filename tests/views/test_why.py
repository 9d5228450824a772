"""Why something is done again: pure answers, by what is there and what was recorded before."""

from __future__ import annotations

from pipeline.journal.run_status import State
from pipeline.store.cache_folder import RecipeStat
from pipeline.views.why import (
    Because,
    FileFound,
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
DONE = Because(State.DONE)


def test_a_change_is_named_by_what_people_set() -> None:
    for kind, was, now, setting in (
        ("embed", {"context": "chain"}, {"context": "partner"}, "embed.context"),
        ("embed", {"weights": A}, {"weights": B}, "embed.weights"),
        ("embed", {}, {"cut": ["windows", 1022, 256]}, "embed.long"),
        ("graph", {"atom_radius": 5.0}, {"atom_radius": 4.0}, "graph.atom.radius"),
        ("graph", {"radius": None}, {"radius": 8.0}, "graph.radius"),
        ("scan", {"policy": {"altlocs": "first"}}, {"policy": {"altlocs": "highest"}}, "structures.altlocs"),
        ("scan", {"reading": {"seqres": False}}, {"reading": {"seqres": True}}, "structures.sequence"),
        ("scan", {"ligand": "smaller"}, {"ligand": "larger"}, "data.ligand"),
        ("train", {"seed": 0}, {"seed": 1}, "train.seed"),
        ("train", {"options": {"width": 8}}, {"options": {"width": 9}}, "train.options.width"),
        ("train", {"embeddings": {"layer": 5}}, {"embeddings": {"layer": 6}}, "embed.layer"),
        ("new", {"x": 1}, {"x": 2}, "new.x"),
    ):
        (change,) = changes_between(kind, was, now)
        assert change.setting == setting
    assert setting_of("embed", "precision") == "embed.precision"
    assert setting_of("scan", "reading.model") == "structures.model"
    assert setting_of("train", "schedule.kind") == "train.schedule.kind"


def test_of_several_recipes_the_one_most_alike_is_compared() -> None:
    others = [{**EMBED, "layer": 5, "context": "partner"}, {**EMBED, "layer": 5}, {**EMBED, "weights": B, "layer": 4}]
    (change,) = nearest_changes("embed", EMBED, others)
    assert (change.setting, change.was, change.now) == ("embed.layer", 5, 6)
    assert nearest_changes("embed", EMBED, [EMBED]) == nearest_changes("embed", EMBED, []) == ()


def test_a_record_says_why_it_is_made() -> None:
    other = [{**EMBED, "layer": 5}]
    for found, state, part in (
        (RecordFound("k", is_whole=True), "done", ""),
        (RecordFound("k", is_whole=True, refused="no_polymer: none"), "refused", "no_polymer"),
        (RecordFound("k"), "to do", ""),
        (RecordFound("k", damage="digest differs"), "to do", "digest differs"),
        (RecordFound("k", recipe=EMBED, others=other), "to do", "embed.layer"),
        (RecordFound("k", listed_by="r1", listed_key="k"), "to do", "r1"),
        (RecordFound("k", listed_by="r1", listed_key="j"), "to do", "r1"),
        (RecordFound("k", damage="torn", recipe=EMBED, others=other), "to do", "torn"),
    ):
        because = why_record("embed", found)
        assert (because.state.value, part in str(because)) == (state, True), found


def test_files_say_what_became_of_them() -> None:
    for files, state, part in (
        ([], "done", ""),
        ([FileFound("a.pdb", digest=A)], "done", ""),
        ([FileFound("a.pdb", digest=A), FileFound("b.pdb", refused="missing_file: x")], "refused", "missing_file"),
        ([FileFound("a.pdb", digest=B, earlier=(A,), run="r1")], "to do", "r1"),
        ([FileFound("a.pdb", is_known=False, digest=A, earlier=(A,), run="r1")], "to do", "r1"),
        ([FileFound("a.pdb", is_known=False, digest=A)], "to do", "a.pdb"),
        ([FileFound("a.pdb", is_settled=False, is_known=False, digest=A)], "to do", "a.pdb"),
    ):
        because = why_files(files)
        assert (because.state.value, part in because.why) == (state, True), files


def test_a_file_that_was_only_touched_costs_no_new_record() -> None:
    touched = [FileFound("a.pdb", is_known=False, digest=A, earlier=(A,), run="r1")]
    other = why_record("scan", RecordFound("k", recipe={"max_residues": 9}, others=[{"max_residues": 8}]))
    never = why_record("scan", RecordFound("k"))
    assert why_item(touched, DONE).state is State.TO_DO
    assert why_item(touched, other) is other
    assert why_item([FileFound("a.pdb", digest=A)], other) is other
    changed = [FileFound("a.pdb", digest=B, earlier=(A,), run="r1")]
    assert why_item(changed, never) == why_item(changed, other) == why_files(changed)


def test_several_sequences_are_as_the_worst_of_them() -> None:
    later, no = Because(State.TO_DO, "later"), Because(State.REFUSED, "no")
    waits = Because(State.WAITING, "no weights")
    for several, state in (
        ([DONE, later, later], State.TO_DO),
        ([DONE, later, no], State.REFUSED),
        ([later], State.TO_DO),
        ([DONE, waits], State.WAITING),
        ([], State.NOTHING),
        ([DONE, DONE], State.DONE),
    ):
        assert why_all(several, "sequence").state is state, several


def test_a_stage_says_why_it_is_done_again() -> None:
    recorded = [RecipeStat({**EMBED, "layer": 5}, 7, 0)]
    for counts, records, state, part in (
        ({"cached": 5}, [], "done", ""),
        ({}, [], "nothing to do", ""),
        ({"unkept": 5}, [], "done", ""),
        ({"unplanned": 1}, [], "waiting", ""),
        ({"waiting": 3}, [], "waiting", "3"),
        ({"missing": 4}, [], "to do", ""),
        ({"missing": 4, "cached": 2}, [], "to do", "4"),
        ({"missing": 4}, recorded, "to do", "embed.layer"),
        ({"missing": 4}, [RecipeStat(EMBED, 7, 0)], "to do", ""),
    ):
        because = why_stage("embed", counts, EMBED, records)
        assert (because.state.value, part in str(because)) == (state, True), counts
