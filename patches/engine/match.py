"""Finding the syntax-tree nodes that edits name, and compiling the function with others in their place."""

from __future__ import annotations

import ast
import functools
import textwrap
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from . import nearest
from .edits import Rewrite
from .frames import witnessed
from .locate import Conflict, FunctionNode, Source, compiled

_SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)  # the parser has one node of each
_IGNORED = frozenset({"ctx", "type_comment", "kind"})
_CHILDLESS = frozenset({ast.Name, ast.Constant, *(kind for shared in _SHARED for kind in shared.__subclasses__())})
"""Types of most nodes: none of them has a node below it that is its own."""
_WITH_LINES = frozenset(ast.stmt.__subclasses__()) - {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef}
"""Statements whose lines are all that is below them; the lines of the others begin after their decorators."""


class _Pattern(NamedTuple):
    """What an edit is to find."""

    nodes: tuple[ast.AST, ...]
    is_expression: bool
    """It is one, and gives way to another; else it is statements."""
    word: str
    """A name that stands in every text that it is found in; empty if it holds none."""


class Match(NamedTuple):
    """One place found: neighbouring nodes (one, if an expression) and what stands there instead."""

    nodes: list[ast.AST]
    replacement: list[ast.AST]
    text: str
    holder: ast.AST
    field: str


def rewrite(source: Source, edits: Sequence[Rewrite]) -> CodeType:
    """The code object of ``source`` with every edit made.

    Raises
    ------
    Conflict
        An edit does not match as often as it says, or two edits touch the same nodes.
    """
    tree, function = source.parse()
    for match in matches(source, function, edits):
        _replace(match)
    code = compiled(tree, source.code)
    if lost := sorted(set(source.code.co_freevars) - set(code.co_freevars)):
        # An edit took out their only use; a use that never runs keeps the closure's layout.
        use = ast.parse("if 0:\n" + "".join(f"    {name}\n" for name in lost)).body[0]
        at = 0 if ast.get_docstring(function, clean=False) is None else 1
        function.body.insert(at, _relocated(use, function.body[-1]))
        code = compiled(tree, source.code)
    if code.co_freevars != source.code.co_freevars:
        raise Conflict(
            f"{edits[0].target}: the edit would change the closure from {source.code.co_freevars} to {code.co_freevars}"
        )
    return witnessed(code)


def check(edit: Rewrite) -> None:
    """Raise ``SyntaxError`` or ``ValueError`` if the texts of ``edit`` make no sense."""
    if not edit.find.strip():
        raise ValueError(f"{edit.target}: a Rewrite needs `find`")
    _pattern(edit.find, edit.replace)


def occurrences(source: Source, text: str) -> int:
    """How many times the expression or statements ``text`` stand in ``source``."""
    pattern = _pattern(text, text)
    return len(_runs(_places(source, source.parse()[1], [pattern]), pattern))


@functools.cache
def _pattern(find_text: str, replace_text: str) -> _Pattern:
    find, replace = (_parsed(text) for text in (find_text, replace_text))
    nodes = [below for node in find for below in _below(node)]
    names = {n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, (ast.Name, ast.Attribute))}
    word = max(sorted(names), key=len, default="")
    if len(find) == len(replace) == 1 and isinstance(find[0], ast.Expr) and isinstance(replace[0], ast.Expr):
        return _Pattern((find[0].value,), True, word)
    return _Pattern(tuple(find), False, word)


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text) if "\n" in text else text.strip()).body  # dedent takes its time


def _replacement(edit: Rewrite) -> list[ast.AST]:
    """New nodes to put there."""
    body: list[Any] = _parsed(edit.replace) or [ast.Pass()]
    return [body[0].value] if _pattern(edit.find, edit.replace).is_expression else body


def _same(a: Any, b: Any) -> bool:
    """Whether two syntax trees are equal but for positions and for load, store or delete."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is list:
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, ast.AST):
        return bool(a == b)
    mine, other = vars(a), vars(b)
    for name in kind._fields:
        if name not in _IGNORED and not _same(mine.get(name), other.get(name)):
            return False
    return True


def _below(node: ast.AST) -> list[Any]:
    """``node`` and all nodes below it, as ``ast.walk`` finds them, which takes its time."""
    found: list[Any] = [node]
    for each in found:
        for value in vars(each).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif type(value) is list:
                found += [child for child in value if isinstance(child, ast.AST)]
    return found


_Place = tuple[list[Any], int, ast.AST, str]
"""A node: the list that it is in, its index there, and the node and the field that hold them."""


def _places(source: Source, function: FunctionNode, patterns: Collection[_Pattern]) -> dict[type, list[_Place]]:
    """The nodes in the body of ``function`` that one of ``patterns`` may begin with, by type; written for speed.

    It looks into the statements in whose lines their words stand, and into all if a pattern has none.
    """
    places: dict[type, list[_Place]] = {type(pattern.nodes[0]): [] for pattern in patterns}
    words = {pattern.word for pattern in patterns}
    skipped = _WITH_LINES if all(words) else ()
    lines = _lines_with(words, source)
    pending: list[ast.AST] = [function]
    while pending:
        holder = pending.pop()
        values = vars(holder)
        for field in ("body",) if holder is function else holder._fields:
            children = values.get(field)
            if isinstance(children, ast.AST):
                children = [children]
            elif type(children) is not list:
                continue
            for at, child in enumerate(children):
                kind = type(child)
                if kind in places:
                    places[kind].append((children, at, holder, field))
                if kind in _CHILDLESS or kind in skipped and not _holds(child, lines):
                    continue
                if isinstance(child, ast.AST):
                    pending.append(child)
    return places


def _lines_with(words: Iterable[str], source: Source) -> list[int]:
    """The numbers of the lines in which one of ``words`` stands, in order."""
    numbered = list(enumerate(source.lines, source.code.co_firstlineno))
    return sorted({number for word in words for number, line in numbered if word in line})


def _holds(statement: Any, lines: Sequence[int]) -> bool:
    """Whether one of ``lines``, which are in order, is one of the statement's."""
    at = bisect_left(lines, statement.lineno)
    return at < len(lines) and lines[at] <= statement.end_lineno


def _runs(places: dict[type, list[_Place]], pattern: _Pattern) -> list[tuple[list[ast.AST], ast.AST, str]]:
    """Where ``pattern`` stands: neighbouring nodes, and the node and field that hold them."""
    find = list(pattern.nodes)
    runs = [(nodes[at : at + len(find)], holder, field) for nodes, at, holder, field in places[type(find[0])]]
    return [run for run in runs if _same(find, run[0])]


def matches(source: Source, function: FunctionNode, edits: Sequence[Rewrite]) -> list[Match]:
    """Where ``edits`` are to be made in ``function``, the syntax tree of ``source``."""
    claimed: dict[int, Rewrite] = {}
    matches = []
    places = _places(source, function, [_pattern(edit.find, edit.replace) for edit in edits])
    for number, edit in enumerate(edits):
        if any((e.find, e.replace, e.count) == (edit.find, edit.replace, edit.count) for e in edits[:number]):
            continue  # made already, for another patch
        found = _runs(places, _pattern(edit.find, edit.replace))
        if len(found) != edit.count:
            there = nearest.describe(function, source.code, edit.find, [nodes[0] for nodes, _, _ in found])
            raise Conflict(
                f"{edit.target}: {brief(edit.find)} occurs {len(found)} times, expected {edit.count}; {there}"
            )
        for nodes, holder, field in found:
            inside = {id(n) for node in nodes for n in _below(node) if not isinstance(n, _SHARED)}
            if other := next((claimed[i] for i in inside if i in claimed), None):
                raise Conflict(f"{edit.target}: {brief(edit.find)} overlaps {brief(other.find)}")
            claimed.update(dict.fromkeys(inside, edit))
            matches.append(Match(nodes, _replacement(edit), edit.replace, holder, field))
    return matches


def brief(text: str) -> str:
    """``text`` on one line, in quotes, for a message."""
    return repr(textwrap.shorten(" ".join(text.split()), 80))


def _replace(match: Match) -> None:
    for node in match.replacement:
        _relocated(node, match.nodes[0], match.nodes[-1])
    value = getattr(match.holder, match.field)
    if isinstance(value, list):
        at = next(i for i, node in enumerate(value) if node is match.nodes[0])
        value[at : at + len(match.nodes)] = match.replacement
    else:
        setattr(match.holder, match.field, match.replacement[0])
    context = getattr(match.nodes[0], "ctx", None)
    if context is not None and hasattr(match.replacement[0], "ctx"):
        match.replacement[0].ctx = context


_Node = TypeVar("_Node", bound=ast.AST)


def _relocated(node: _Node, first: Any, last: Any = None) -> _Node:
    """Give ``node`` and all below it the position of the code that it replaces."""
    last = last or first
    for child in _below(node):
        if "lineno" in child._attributes:
            child.lineno, child.col_offset = first.lineno, first.col_offset
            child.end_lineno, child.end_col_offset = last.end_lineno, last.end_col_offset
    return node
