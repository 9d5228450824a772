"""The graph of stages: which arrows are drawn, and how it is written as text, in Mermaid, in DOT and as boxes."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from pipeline.journal.run_status import State
from pipeline.views.stage_states import StageExplained, arrows, as_dot, as_mermaid, columns_of, graph_lines
from pipeline.views.why import Because


def box(name: str, needs: tuple[str, ...], state: str, counts: str = "", why: str = "") -> StageExplained:
    return StageExplained(name, Because(State(state), why), needs, counts)


WHOLE = (
    box("data", (), "done", "glob structures"),
    box("scan", ("data",), "done", "items: 24 cached"),
    box("embed", ("scan",), "to do", "sequences: 30 to do", "embed.context: chain → partner"),
    box("graph", ("scan",), "done"),
    box("train", ("scan", "embed", "graph"), "waiting"),
    box("evaluate", ("scan", "embed", "graph", "train"), "waiting"),
    box("predict", ("scan", "embed", "graph", "train"), "waiting"),
)
TEXT = """\
data ──> scan ─┬─> embed ─┬─> train ─┬─> evaluate
               └─> graph ─┘          └─> predict"""


def test_graphs_are_drawn_with_names_and_arrows() -> None:
    assert "\n".join(graph_lines(WHOLE)) == TEXT
    many = {"a": (), "b": ("a",), "c": ("a",), "d": ("a",), "e": ("b", "c", "d")}
    needs: dict[str, tuple[str, ...]]
    for needs, drawn in [
        ({}, []),
        ({"scan": ("elsewhere",)}, ["scan"]),
        ({"a": (), "bcd": (), "e": ("a", "bcd")}, ["a ───┬─> e", "bcd ─┘"]),
        (many, ["a ─┬─> b ─┬─> e", "   ├─> c ─┤", "   └─> d ─┘"]),
    ]:
        assert graph_lines([box(name, of, "done") for name, of in needs.items()]) == drawn


graphs = st.lists(st.sets(st.integers(0, 6)), max_size=7).map(
    lambda rows: [
        box(f"n{at}", tuple(f"n{need}" for need in sorted(needs) if need < at), "done") for at, needs in enumerate(rows)
    ]
)


@given(graphs)
def test_arrows_are_the_fewest_that_say_all_that_is_needed(boxes: list[StageExplained]) -> None:
    def reached(pairs: list[tuple[str, str]]) -> set[tuple[str, str]]:
        known = set(pairs)
        while more := {(a, d) for a, b in known for c, d in known if b == c} - known:
            known |= more
        return known

    drawn = arrows(boxes)
    assert reached(drawn) == reached([(need, box.name) for box in boxes for need in box.needs])
    for arrow in drawn:
        assert arrow not in reached([other for other in drawn if other != arrow])


@given(graphs)
def test_every_box_stands_once_and_right_of_what_it_needs(boxes: list[StageExplained]) -> None:
    columns = columns_of(boxes)
    place = {box.name: at for at, column in enumerate(columns) for box in column}
    assert sorted(box.name for column in columns for box in column) == sorted(box.name for box in boxes)
    assert all(place[need] < place[box.name] for box in boxes for need in box.needs)
    drawn = "\n".join(graph_lines(boxes))
    assert all(len(re.findall(rf"\b{box.name}\b", drawn)) == 1 for box in boxes)
    assert not boxes or min(place.values()) == 0


def test_mermaid_and_dot_have_a_node_for_each_stage_and_an_arrow_for_each_need() -> None:
    lines = as_mermaid(WHOLE).splitlines()
    assert lines[0] == "flowchart LR"
    assert '  s_embed["embed: to do<br/>sequences: 30 to do<br/>embed.context: chain → partner"]' in lines
    assert [line for line in lines if "-->" in line] == [f"  s_{first} --> s_{then}" for first, then in arrows(WHOLE)]
    text = as_dot(WHOLE)
    assert (text.count('"') % 2, text.count(" -> ")) == (0, len(arrows(WHOLE)))
    assert text.startswith("digraph pipeline {")
    assert text.endswith("}")


def test_what_settings_say_cannot_leave_its_label() -> None:
    hostile = [box("scan", (), "to do", why='a "quoted" \\ <b>name</b>\n-->')]
    (label,) = re.findall(r'\["(.*)"\]', as_mermaid(hostile))
    assert '"' not in label.replace("#quot;", "")
    assert "<b>" not in label
    (dot,) = re.findall(r'label="((?:[^"\\]|\\.)*)"', as_dot(hostile))
    assert dot == 'scan: to do\\na \\"quoted\\" \\\\ ‹b›name‹/b› --›'
