"""Parses YAML to plain values with their lines; it executes nothing.

Scalars follow YAML 1.2: `no`, `off` and `1:30:00` are text, so a chain may be called NO; only true and false are
booleans.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml

from pipeline.config.masking import without_secrets_in
from pipeline.config.schema import FIELDS, LEAVES, SECTIONS, schema_key
from pipeline.config.schema_parts import CONFLICT, WANTS
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic_core import ErrorDetails

    from pipeline.config.schema import KeyPath

MAX_BYTES = 256 << 10
MAX_DEPTH = 20
MAX_NODES = 20_000  # counted with aliases expanded, so that a small file cannot unfold into a huge one
REMEDY = "correct it, then: pipeline config check"  # repeating what was typed could show a secret

_TAG = "tag:yaml.org,2002:"
_NULL = f"{_TAG}null"
_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": int,
    "float": float,
    "str": str,
}
_ADVICE = {
    "\\t": "indent keys with spaces, not tabs",
    "scanning an alias": "quote a value that starts with *",
    "scanning an anchor": "quote a value that starts with &",
    "mapping values are not allowed": "quote a value that contains a colon and a space; "
    "or add the missing colon at the end of the line above",
    "could not find expected ':'": "a key needs a colon and a space after it",
    "expected <block end>": "the indentation of this line differs from its neighbours",
}


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """The value written at a key; an empty mapping stands for a section."""

    value: Any
    origin: str  # "pipeline.yaml:12" or "--set", as `config show` prints it; empty for a default without a file
    line: int  # 0: a default
    typed: str = ""  # the words after --set
    refused: bool = False  # not a YAML value (or a part of its list is not): it became None, with a problem

    def place(self, key: KeyPath) -> str:
        """Return the place of `key` for a message."""
        name = ".".join(key)
        if not self.typed:
            return ": ".join(filter(None, (self.origin, name)))
        names_key = self.typed.startswith(f"{name}=")
        return f"{self.origin} {self.typed}" if names_key else f"{self.origin} {self.typed}: {name}"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A mistake in a configuration; mistakes are sorted by line."""

    line: int
    text: str


@dataclass(slots=True)
class Document:
    """The entries of a YAML text in order, and its mistakes; a syntax error raises ConfigError."""

    name: str
    typed: str = ""
    offset: int = 0  # added to lines: typed settings sort after the file, and profiles before it
    entries: dict[KeyPath, WrittenValue] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _nodes: int = 0

    def read(self, text: str, key: KeyPath = ()) -> Document:
        """Add the values of `text` at `key`; without a key the text must be a mapping of keys."""
        node = self._compose(text)
        if key:
            self._enter(key, node, self._line(node))
        elif isinstance(node, yaml.MappingNode):
            self._mapping(key, node)
        elif not _is_null(node):
            raise self._refusal("the file must contain keys, such as data:", self._line(node))
        return self

    def _compose(self, text: str) -> yaml.Node:
        """Parse a text into YAML nodes."""
        if bad := yaml.reader.Reader.NON_PRINTABLE.search(text):
            line = text.count("\n", 0, bad.start()) + 1 + self.offset
            raise self._refusal(f"invalid YAML: the character {bad.group()!r} is not allowed", line)
        try:
            node = _Loader(text).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = (mark.line if mark else 0) + 1 + self.offset
            raise self._refusal(f"invalid YAML: {_advice(error)}", line) from error
        return node or yaml.ScalarNode(_NULL, "", yaml.Mark(self.name, 0, 0, 0, None, 0))

    def _enter(self, key: KeyPath, node: yaml.Node, line: int) -> None:
        """Add the value at `key`, and everything below it when it is a mapping."""
        if isinstance(node, yaml.MappingNode):
            self.entries[key] = self._entry({}, line)
            self._mapping(key, node)
        elif _is_null(node) and key in SECTIONS:  # all keys are commented out
            self.entries[key] = self._entry({}, line)
        else:
            before = len(self.problems)
            value = self._plain(key, node)
            self.entries[key] = replace(self._entry(value, line), refused=len(self.problems) > before)

    def _mapping(self, key: KeyPath, node: yaml.MappingNode) -> None:
        self._check(key, node, depth=len(key))
        for name_node, value_node in node.value:
            line = self._line(name_node)
            path = (*key, _short(str(name_node.value)))
            if not isinstance(name_node, yaml.ScalarNode):
                self._problem(line, key, "keys must be words")
            elif path in self.entries:
                self._problem(line, path, f"duplicate key; first at {self.entries[path].origin}")
            else:
                self._enter(path, value_node, line)

    def _plain(self, key: KeyPath, node: yaml.Node, depth: int = 0) -> Any:
        """Return the value of a scalar or of a list."""
        self._check(key, node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(key, item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {str(name.value): self._plain(key, item, depth + 1) for name, item in node.value}
        return self._scalar(key, node)

    def _scalar(self, key: KeyPath, node: yaml.Node) -> Any:
        """Return the value of a scalar; None for an invalid one, with a problem noted."""
        kind = node.tag.removeprefix(_TAG)
        try:
            value = _SCALARS[kind](node.value) if kind in _SCALARS else None
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no infinities, no lone surrogates
        except (ValueError, KeyError):
            shown = _short(without_secrets_in(node.value, key[-1]))
            self._problem(self._line(node), key, f"{shown} is not a valid {kind}")
            return None
        return value

    def _check(self, key: KeyPath, node: yaml.Node, depth: int) -> None:
        """Refuse a document that unfolds endlessly; note a tag that asks for an object."""
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            problem = f"more than {MAX_NODES} values or {MAX_DEPTH} levels after aliases are expanded"
            raise self._refusal(problem, self._line(node))
        if node.tag.removeprefix(_TAG) not in (*_SCALARS, "seq", "map"):
            self._problem(self._line(node), key, f"the tag {_short(node.tag)} is not allowed: plain values only")

    def _entry(self, value: Any, line: int) -> WrittenValue:
        return WrittenValue(value, self.name if self.typed else self._place(line), line, self.typed)

    def _problem(self, line: int, key: KeyPath, message: str) -> None:
        self.problems.append(Problem(line, f"{self._entry(None, line).place(key)}: {message}"))

    def _refusal(self, problem: str, line: int) -> ConfigError:
        where = f"{self.name} {self.typed}" if self.typed else self._place(line)
        return ConfigError(problem, where=where, remedy=REMEDY)

    def _place(self, line: int) -> str:
        return f"{self.name}:{line - self.offset}"

    def _line(self, node: yaml.Node) -> int:
        return int(node.start_mark.line) + 1 + self.offset


class _Loader(yaml.SafeLoader):
    """A safe loader with scalars of YAML 1.2 and limited nesting."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the parent declares it so; filled below
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node; limit the depth."""
        self.depth += 1
        if self.depth > 2 * MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"(?:0|[-+]?[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _advice(error: yaml.MarkedYAMLError) -> str:
    """Return advice on a frequent mistake, else the parser's message."""
    parsed = " ".join(part for part in (error.context, error.problem) if part)
    return next((advice for sign, advice in _ADVICE.items() if sign in parsed), parsed)


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _NULL)


def _short(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 40 else f"{text[:37]}..."


_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, such as [A, B]",
    "dict_type": "names, with keys below each",
    "model_type": "keys below it",
}
_FORMS = {  # advice for texts with a pattern, by key
    ("train", "task"): "package.module:Name",
    ("cluster", "slurm", "container", "binds"): "FOLDER, FOLDER:INSIDE or FOLDER:INSIDE:ro, from / or a variable on",
    ("cluster", "slurm", "container", "env"): "names of letters, digits and _",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "greater_than": "more than {gt:g}",
    "less_than": "less than {lt:g}",
    "string_too_short": "some text",
    "too_short": "a list that is not empty",
}


def explain(key: KeyPath, detail: ErrorDetails) -> str:
    """Explain why pydantic refused the value at `key`."""
    key = schema_key(key)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return "unknown key" + _meant(key)
    if kind == "missing":
        return f"is required. {FIELDS[key].description}" if key in FIELDS else "is required"
    if kind == CONFLICT:
        return detail["msg"]
    got = without_secrets_in(detail["input"], key[-1])
    return f"{_wanted(key, detail)}, got {_shown(got)}{_advice_on_value(key, kind, detail['input'])}"


def _wanted(key: KeyPath, detail: ErrorDetails) -> str:
    """Describe the values that the schema accepts at a key."""
    kind = detail["type"]
    if kind == "literal_error":
        return f"expected one of {', '.join(_choices(key))}"
    if kind in _KINDS:
        return f"expected {_KINDS[kind]}"
    if kind == "string_pattern_mismatch":
        return next((f"expected {form}" for of, form in _FORMS.items() if key[: len(of)] == of), detail["msg"])
    if kind in _BOUNDS:
        return f"expected {_BOUNDS[kind].format(**detail['ctx'])}"
    return f"expected {detail['msg']}" if kind == WANTS else detail["msg"]


def _advice_on_value(key: KeyPath, kind: str, value: object) -> str:
    """Suggest the nearest choice, or to add or remove quotes; empty without advice."""
    if kind == "literal_error":
        return _suggestion(str(value), _choices(key))
    if kind == "string_type" and isinstance(value, bool | int | float | None):
        return f": unquoted, YAML reads {_kind(value)}; put it in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and _is_plain(value):
        return ": remove the quotes"
    return ""


def _meant(key: KeyPath) -> str:
    """Translate a word of other tools, or suggest a similar sibling or another section with this key."""
    if here := _familiar(key[-1]):
        return f"; {here}"
    siblings = [field[-1] for field in FIELDS if field[:-1] == key[:-1]]
    elsewhere = [".".join(leaf) for leaf in LEAVES if leaf[-1] == key[-1]]
    known = f"; choose from {', '.join(siblings)}" if siblings else ""
    return _suggestion(key[-1], siblings) or _suggestion(".".join(key), elsewhere, cutoff=0.0) or known


@cache
def familiar_words() -> dict[str, str]:
    """Return the settings that correspond to words of other tools."""
    text = Path(__file__).with_name("familiar_words.yaml").read_text(encoding="utf-8")
    table: dict[str, str] = yaml.safe_load(text)
    return {word: answer.replace("{word}", word) for answer, words in table.items() for word in words.split()}


def _familiar(word: str) -> str:
    """Return the advice on a word of other tools; empty for an unknown word."""
    answer = familiar_words().get(word.lower().lstrip("-").replace("-", "_"), "")
    return f"here {'there is' if answer.startswith('nothing to set') else 'it is'} {answer}" if answer else ""


def _suggestion(word: str, names: list[str], cutoff: float = 0.6) -> str:
    close = get_close_matches(word, names, n=1, cutoff=cutoff)
    return f'; did you mean "{close[0]}"?' if close else ""


def _choices(key: KeyPath) -> list[str]:
    annotation = FIELDS[key].annotation if key in FIELDS else None
    either = (annotation, *get_args(annotation))  # a choice, or a choice or nothing
    return [str(choice) for option in either if get_origin(option) is Literal for choice in get_args(option)]


def _is_plain(text: str) -> bool:
    """Tell whether a text without its quotes would be a number or a boolean."""
    try:
        return not isinstance(json.loads(text), dict | list | str)
    except ValueError:
        return False


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return "a truth value" if isinstance(value, bool) else "a number"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
