"""Finding the syntax-tree nodes that edits name, and compiling the function with others in their place."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from . import nearest
from .edits import Rewrite
from .frames import witnessed
from .function_source import Conflict, FunctionNode, Source, compile_like

_NOT_COMPARED = frozenset({"ctx", "type_comment", "kind"})


class _Pattern(NamedTuple):
    """The code that an edit looks for."""

    nodes: list[Any]
    is_expression: bool
    """One expression that gives way to another; else statements."""


_Field = tuple[ast.AST, str, list[ast.AST]]
"""A node, the name of one of its fields, and the nodes in it."""


class Match(NamedTuple):
    """One place found: neighbouring nodes (one, if an expression) and what stands there instead."""

    nodes: list[Any]
    replacement: list[Any]
    text: str
    holder: ast.AST
    field: str


def rewrite(source: Source, edits: Sequence[Rewrite]) -> CodeType:
    """Return the code object of ``source`` with every edit made.

    Raises
    ------
    Conflict
        An edit does not match as often as it says, or two edits touch the same nodes.
    """
    tree, function = source.parse()
    for match in matches(source, function, edits):
        _replace(match)
    code = compile_like(tree, source.code)
    if lost := sorted(set(source.code.co_freevars) - set(code.co_freevars)):
        # An edit took out their only use; a use that never runs keeps the closure's layout.
        use = ast.parse("if 0:\n" + "".join(f"    {name}\n" for name in lost)).body[0]
        _relocate(use, function.body[-1], function.body[-1])
        at = 0 if ast.get_docstring(function, clean=False) is None else 1
        function.body.insert(at, use)
        code = compile_like(tree, source.code)
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
    """Count how often the expression or statements ``text`` stand in ``source``."""
    return len(list(_find(_pattern(text, text), _fields(source.parse()[1]))))


@functools.cache
def _pattern(find: str, replace: str) -> _Pattern:
    wanted, new = _parse(find), _parse(replace)
    if len(wanted) == len(new) == 1 and isinstance(wanted[0], ast.Expr) and isinstance(new[0], ast.Expr):
        return _Pattern([wanted[0].value], True)
    return _Pattern([*wanted], False)


def _parse(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text) if "\n" in text else text.strip()).body


def _replacement(edit: Rewrite) -> list[Any]:
    """Make new nodes of ``edit.replace``: each place needs its own."""
    body: list[Any] = _parse(edit.replace) or [ast.Pass()]
    return [body[0].value] if _pattern(edit.find, edit.replace).is_expression else body


def _find(pattern: _Pattern, fields: Iterable[_Field]) -> Iterator[tuple[list[Any], ast.AST, str]]:
    """Give each place where ``pattern`` stands: its nodes, and the node and the field that hold them."""
    kind, count = type(pattern.nodes[0]), len(pattern.nodes)
    for holder, field, nodes in fields:
        for at, node in enumerate(nodes):
            if type(node) is kind and _are_equal(pattern.nodes, nodes[at : at + count]):
                yield nodes[at : at + count], holder, field


def _fields(function: FunctionNode) -> Iterator[_Field]:
    """Give each field of each node in the body of ``function``, and the nodes in it."""
    holders: list[ast.AST] = [function]
    for holder in holders:
        for field, value in [("body", function.body)] if holder is function else ast.iter_fields(holder):
            values = value if isinstance(value, list) else [value]
            nodes = [each for each in values if isinstance(each, ast.AST)]
            holders += nodes
            yield holder, field, nodes


def _are_equal(a: Any, b: Any) -> bool:
    """Tell whether two syntax trees are equal but for positions and for load, store or delete."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if not isinstance(a, ast.AST):
        return bool(a == b)
    names = (name for name in a._fields if name not in _NOT_COMPARED)
    return all(_are_equal(getattr(a, name, None), getattr(b, name, None)) for name in names)


def matches(source: Source, function: FunctionNode, edits: Sequence[Rewrite]) -> list[Match]:
    """Find where ``edits`` are to be made in ``function``, the syntax tree of ``source``. May raise ``Conflict``."""
    found: list[Match] = []
    claimed: dict[ast.AST, Rewrite] = {}
    different: dict[Any, Rewrite] = {}
    for edit in edits:
        different.setdefault((edit.find, edit.replace, edit.count), edit)  # two patches may make the same edit
    fields = list(_fields(function))
    for edit in different.values():
        places = list(_find(_pattern(edit.find, edit.replace), fields))
        if len(places) != edit.count:
            there = nearest.describe(function, source.code, edit.find, [nodes[0] for nodes, _, _ in places])
            raise Conflict(
                f"{edit.target}: {brief(edit.find)} occurs {len(places)} times, expected {edit.count}; {there}"
            )
        for nodes, holder, field in places:
            for node in (below for each in nodes for below in ast.walk(each)):
                if not isinstance(node, (ast.expr, ast.stmt)):  # the parser shares one `Load` among all nodes
                    continue
                if node in claimed:
                    raise Conflict(f"{edit.target}: {brief(edit.find)} overlaps {brief(claimed[node].find)}")
                claimed[node] = edit
            found.append(Match(nodes, _replacement(edit), edit.replace, holder, field))
    return found


def brief(text: str) -> str:
    """Put ``text`` on one line, in quotes, for a message."""
    return repr(textwrap.shorten(" ".join(text.split()), 80))


def _replace(match: Match) -> None:
    """Put the replacement of ``match`` into the syntax tree."""
    first = match.nodes[0]
    for node in match.replacement:
        _relocate(node, first, match.nodes[-1])
    value = getattr(match.holder, match.field)
    if isinstance(value, list):
        at = next(i for i, node in enumerate(value) if node is first)
        value[at : at + len(match.nodes)] = match.replacement
    else:
        setattr(match.holder, match.field, match.replacement[0])
    if hasattr(first, "ctx") and hasattr(match.replacement[0], "ctx"):
        match.replacement[0].ctx = first.ctx


def _relocate(node: ast.AST, first: Any, last: Any) -> None:
    """Give ``node`` and all below it the position of the code from ``first`` to ``last``, which it replaces."""
    for child in ast.walk(node):
        if "lineno" in child._attributes:
            ast.copy_location(child, first)
            child.end_lineno, child.end_col_offset = last.end_lineno, last.end_col_offset  # type: ignore[attr-defined]
