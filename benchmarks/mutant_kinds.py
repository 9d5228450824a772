"""Mutants of a module: each is one small change of its code, and is tried in a process of its own.

Changed are comparisons, `and`, `or`, `not`, arithmetic, numbers, min and max, what decides a branch, what is returned,
and statements that are for their effect, which are left out; not annotations, nor what people read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from types import ModuleType
from typing import Any

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
PAIRS = (("min", "max"), ("any", "all"), ("minimum", "maximum"), ("argmin", "argmax"), ("ceil", "floor"))
PAIRED = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
REMOVED = (ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)  # statements
UNCHANGED = {"annotation", "returns", "decorator_list"}  # fields of nodes


@dataclass(frozen=True)
class Mutant:
    """A change of one node of a module's syntax tree."""

    file: str
    owner: str  # the function, method, class or constant that it changes, by its name
    digest: str  # of that, as it is
    first_line: int  # of that
    line: int
    change: str  # before → after
    parent: ast.AST
    field: str
    place: int | None  # in the field, where that is a list
    node: ast.AST  # the new one

    @property
    def name(self) -> str:
        return f"{self.owner}: {self.change}"

    @property
    def key(self) -> str:
        """What tells it from all others, also from its like in what the code was or will be."""
        return f"{self.digest} {self.file} {self.name}"

    def install(self, tree: ast.Module) -> None:
        """Put the changed code in the place of what this process has imported; the tree is changed, too."""
        if self.place is None:
            setattr(self.parent, self.field, self.node)
        else:
            getattr(self.parent, self.field)[self.place] = self.node
        name = self.file.removesuffix(".py").replace("/", ".")
        module, changed = importlib.import_module(name), ModuleType(name)
        exec(compile(tree, self.file, "exec", dont_inherit=True), vars(changed))
        old, new = (_function(where, self.owner) for where in (module, changed))
        if not inspect.isfunction(old):
            setattr(module, self.owner, new)
            return
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def _function(where: ModuleType, owner: str) -> Any:
    """Return the function of a name, beneath whatever decorates it; of a class, what makes its objects."""
    name, _, method = owner.partition(".")
    found = getattr(where, name)
    if inspect.isclass(found):
        found = inspect.getattr_static(found, method or "__init__")
    for beneath in ("fget", "func", "__func__", "__wrapped__"):
        found = getattr(found, beneath, found)
    return found


def mutants_of(
    file: str, tree: ast.Module, *, only: Collection[str] = (), but: Collection[str] = (), strings: bool = False
) -> Iterator[Mutant]:
    """Yield the mutants of a module, or of what is named of it; those that look alike are numbered."""
    seen = Counter[str]()
    for owner, definition in _definitions(tree):
        names = {owner, owner.partition(".")[0]}
        if (only and names.isdisjoint(only)) or not names.isdisjoint(but):
            continue
        digest = sha256(ast.unparse(definition).encode()).hexdigest()[:16]
        first = min([definition.lineno, *(above.lineno for above in getattr(definition, "decorator_list", ()))])
        for parent, field, place, node, line in _nodes(definition, definition.lineno):
            for new in variants(node, strings=strings):
                change = f"{_told(node)} → {_told(new)}"
                seen[f"{owner}: {change}"] += 1
                count = seen[f"{owner}: {change}"]
                change = change if count == 1 else f"{change} ({count})"
                yield Mutant(file, owner, digest, first, line, change, parent, field, place, new)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield functions, methods, fields of classes and constants of a module, by name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef):
                yield f"{node.name}.{part.name}", part
            elif isinstance(part, ast.AnnAssign) and part.value:
                yield node.name, part


def _nodes(parent: ast.AST, line: int) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, int]]:
    """Yield every node below one, and where it stands; not annotations, nor what people read."""
    for field, value in ast.iter_fields(parent):
        for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_promise = isinstance(node, ast.keyword) and node.arg == "strict"  # of what cannot be otherwise
            if (
                field in UNCHANGED
                or is_promise
                or is_text
                or not isinstance(node, ast.AST)
                or isinstance(node, ast.JoinedStr)
            ):
                continue
            at = getattr(node, "lineno", line)
            yield parent, field, place, node, at
            if not isinstance(node, ast.Raise):
                yield from _nodes(node, at)


def variants(node: ast.AST, *, strings: bool) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node, each a little wrong."""
    for name, value in _fields(node, strings=strings):
        new = deepcopy(node)
        setattr(new, name, value)
        yield new
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            left = node.values[:place] + node.values[place + 1 :]
            yield left[0] if len(left) == 1 else ast.copy_location(ast.BoolOp(node.op, left), node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, REMOVED) or _is_for_effect(node):
        yield ast.copy_location(ast.Pass(), node)


def _fields(node: ast.AST, *, strings: bool) -> Iterator[tuple[str, Any]]:
    """Yield fields of a node, and what else may stand in them."""
    if isinstance(node, ast.Compare):
        for place, old in enumerate(node.ops):
            yield "ops", [*node.ops[:place], COMPARED[type(old)](), *node.ops[place + 1 :]]
    elif isinstance(node, ast.BoolOp):
        yield "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMPUTED:
        yield "op", COMPUTED[type(node.op)]()
    elif isinstance(node, ast.Constant):
        yield from (("value", value) for value in _constants(node.value, strings=strings))
    elif isinstance(node, ast.Name | ast.Attribute):
        field = "id" if isinstance(node, ast.Name) else "attr"
        if getattr(node, field) in PAIRED:
            yield field, PAIRED[getattr(node, field)]
    elif isinstance(node, ast.If | ast.While):
        for value in (False,) if isinstance(node, ast.While) else (True, False):
            yield "test", ast.copy_location(ast.Constant(value), node.test)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "ifs", []


def _constants(value: object, *, strings: bool) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (value + 1, value - 1)
    if value in ("left", "right"):  # of a search
        return ("left" if value == "right" else "right",)
    return (f"{value}!",) if strings and isinstance(value, str) else ()


def _is_for_effect(node: ast.AST) -> bool:
    """Tell whether a statement is a call alone, or puts something into something else."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)


def _told(node: ast.AST) -> str:
    """Return a node in one line: of a statement that holds others, its head."""
    if isinstance(node, ast.comprehension):
        return "".join(ast.unparse(node)).strip()
    return ast.unparse(node).splitlines()[0]
