"""The workflow as a graph of stages with their states and reasons: text, Mermaid or Graphviz."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.journal.run_status import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


FILLED: dict[str, str] = {State.DONE: "#d9f0dd", State.TO_DO: "#dbe7f6", State.WAITING: "#ececec"}


@dataclass(frozen=True, slots=True)
class StageBox:
    """A stage of a configuration, with its state."""

    name: str
    needs: tuple[str, ...]  # names of other boxes
    state: str
    counts: str = ""
    why: str = ""  # of its state

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def arrows(boxes: Sequence[StageBox]) -> list[tuple[str, str]]:
    """Return the arrows between boxes as pairs of names: direct needs only, among the shown boxes."""
    shown = {box.name: [name for name in box.needs if any(name == other.name for other in boxes)] for box in boxes}
    return [
        (name, box.name)
        for box in boxes
        for name in shown[box.name]
        if not any(name in _all_needed(other, shown) for other in shown[box.name])
    ]


def _all_needed(name: str, needs: Mapping[str, Sequence[str]]) -> set[str]:
    """Return all that a box needs, directly or not."""
    found: set[str] = set()
    waiting = [*needs[name]]
    while waiting:
        if (other := waiting.pop()) not in found:
            found.add(other)
            waiting += needs[other]
    return found


def columns_of(boxes: Sequence[StageBox]) -> list[list[StageBox]]:
    """Return the boxes in columns, each right of all that it needs."""
    needs: dict[str, list[str]] = {box.name: [] for box in boxes}
    for first, then in arrows(boxes):
        needs[then].append(first)
    depth = {name: len(_chain(name, needs)) for name in needs}
    return [[box for box in boxes if depth[box.name] == place] for place in sorted(set(depth.values()))]


def _chain(name: str, needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the longest chain of boxes that ends with a name."""
    return [*max((_chain(other, needs) for other in needs[name]), key=len, default=[]), name]


def graph_lines(boxes: Sequence[StageBox]) -> list[str]:
    """Return the graph as lines of text: names and arrows."""
    columns, parts = columns_of(boxes), list[list[str]]()
    for at, column in enumerate(columns, 1):
        after = columns[at] if at < len(columns) else []
        width = max(len(box.name) for box in column) + 1
        parts.append([f"{box.name} ".ljust(width, "─" if after else " ") for box in column])
        if after:
            parts.append(list(_joints(len(column), len(after))))
    rows = range(max(map(len, columns), default=0))
    cells = ([part[row] if row < len(part) else " " * len(part[0]) for part in parts] for row in rows)
    return ["".join(line).rstrip() for line in cells]


def _joints(before: int, after: int) -> Iterator[str]:
    """Yield the joints between two columns, row by row: each box of the first leads to each of the second."""
    if before == after == 1:
        yield "──> "
        return
    last = max(before, after) - 1
    for row in range(last + 1):
        left, right = row < before, row < after
        joint = {(True, True): "┼┴", (True, False): "┤┘", (False, True): "├└"}[left, right][row == last]
        yield ("─" if left else " ") + ("┬" if row == 0 else joint) + ("─> " if right else "   ")


def as_mermaid(boxes: Sequence[StageBox]) -> str:
    """Return the graph in the language of Mermaid."""
    lines = ["flowchart LR"]  # where `graph` is a word of its own
    for box in boxes:
        text = "<br/>".join(_plain(part) for part in _told(box)).replace('"', "#quot;")
        lines.append(f'  s_{box.name}["{text}"]:::{_class_of(box.state)}')
    lines += [f"  s_{first} --> s_{then}" for first, then in arrows(boxes)]
    states = dict.fromkeys(box.state for box in boxes)
    lines += [
        f"  classDef {_class_of(state)} fill:{FILLED.get(state, '#ffffff')},stroke:#555,color:#111" for state in states
    ]
    return "\n".join(lines)


def as_dot(boxes: Sequence[StageBox]) -> str:
    """Return the graph in the language of Graphviz."""
    lines = [
        "digraph pipeline {",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fontname="sans-serif"];',
    ]
    for box in boxes:
        text = "\\n".join(_plain(part).replace("\\", "\\\\").replace('"', '\\"') for part in _told(box))
        lines.append(f'  "{box.name}" [label="{text}", fillcolor="{FILLED.get(box.state, "#ffffff")}"];')
    lines += [f'  "{first}" -> "{then}";' for first, then in arrows(boxes)]
    return "\n".join([*lines, "}"])


def _told(box: StageBox) -> Iterator[str]:
    """Yield the lines of a box."""
    yield f"{box.name}: {box.state}"
    yield from filter(None, (box.counts, box.why))


def _plain(text: str) -> str:
    """Return a text on one line, without symbols that a drawing language reads as its own."""
    return " ".join(text.split()).replace("<", "‹").replace(">", "›")


def _class_of(state: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in state)
