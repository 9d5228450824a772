"""Words that plain English has a better word for, and the texts that people read: pages, help, settings, messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer

from pipeline.cli.main import app
from pipeline.config.schema import LEAVES
from tests.docs.reference import walk

ROOT = Path(__file__).resolve().parents[2]
BANNED = re.compile(
    r"(?<![.\w])(told|anew|whoever|nobody|beside|is no more|of which|that there is|cards?|SLURM(?!_)"
    r"|what (?:is|are|was|were|has|have|had|becomes|became|goes|went|lay|lies|stands)"
    r"|(?:take|takes|taken|took) up(?! to)|(?:look|looks|looked) after|hands? in|handed in|(?:goes|go|went) on)\b"
)
QUOTES = (  # where one of them is right: the text around it
    "structures.pae: beside",
)
LEAST_WORDS = 3  # of a string in the code that is taken for a message


class Text(NamedTuple):
    """A piece of text, and where it is from."""

    place: str
    words: str


def prose(page: Path) -> str:
    """Return the text of a page without blocks, comments, code, links' targets and pictures."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "x", re.sub(r"\]\([^)]*\)", "]", text))


def pages() -> list[Path]:
    """Return every page that is written by hand, but for the history of changes."""
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"]
    written += [ROOT / "sbatch/README.md", ROOT / "configs/sites/README.md"]
    return [page for page in sorted(written) if page.name not in ("CHANGELOG.md", "AGENTS.md")]


def help_texts() -> Iterator[Text]:
    """Yield the help of every command, option and setting."""
    for verb, command in walk("pipeline", typer.main.get_command(app)):
        yield Text(verb, command.help or "")
        for one in command.params:
            yield Text(f"{verb} {one.name}", getattr(one, "help", None) or "")
    for key, leaf in LEAVES.items():
        yield Text(".".join(key), getattr(leaf, "description", None) or "")


def messages() -> Iterator[Text]:
    """Yield the strings of the package that look like sentences; of templates, all."""
    for path in sorted((ROOT / "pipeline").rglob("*")):
        place = path.relative_to(ROOT).as_posix()
        if path.suffix in (".jinja", ".html", ".yaml"):
            yield Text(place, re.sub(r"\{[{%].*?[%}]\}|\bcards:", "", path.read_text()))
        if path.suffix != ".py":
            continue
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        for node in strings:
            if isinstance(node.value, str) and len(node.value.split()) >= LEAST_WORDS:
                yield Text(f"{place}:{node.lineno}", node.value)


def texts() -> Iterator[Text]:
    """Yield everything that people read, pages first."""
    for page in pages():
        yield Text(page.relative_to(ROOT).as_posix(), prose(page))
    yield from help_texts()
    yield from messages()


def banned(text: Text) -> list[str]:
    """Return the banned words of a text, each with what stands around it."""
    words = " ".join(text.words.split())
    for quote in QUOTES:
        words = words.replace(quote, "")
    return [words[max(0, match.start() - 30) : match.end() + 30] for match in BANNED.finditer(words)]


def test_nothing_that_people_read_has_a_word_for_which_there_is_a_plainer_one() -> None:
    assert [(text.place, around) for text in texts() for around in banned(text)] == []
