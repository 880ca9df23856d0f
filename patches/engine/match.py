"""Finding the syntax-tree nodes that edits name, and compiling the function with others in their place."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Collection, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from .edits import Rewrite
from .locate import Conflict, FunctionNode, Source, compiled

_SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)  # the parser has one node of each
_CHILDLESS = frozenset({ast.Name, ast.Constant, *(kind for shared in _SHARED for kind in shared.__subclasses__())})
"""Types of most nodes: none of them has a node below it that is its own."""


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
    for match in matches(function, edits):
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
    return code


def check(edit: Rewrite) -> None:
    """Raise ``SyntaxError`` or ``ValueError`` if the texts of ``edit`` make no sense."""
    if not edit.find.strip():
        raise ValueError(f"{edit.target}: a Rewrite needs `find`")
    _pattern(edit.find, edit.replace)


def occurrences(source: Source, text: str) -> int:
    """How many times the expression or statements ``text`` stand in ``source``."""
    find = list(_pattern(text, text)[0])
    return len(_runs(_places(source.parse()[1], {type(find[0])}), find))


@functools.cache
def _pattern(find_text: str, replace_text: str) -> tuple[tuple[ast.AST, ...], bool]:
    """What to find, and whether it is an expression that gives way to another; else it is statements."""
    find, replace = (_parsed(text) for text in (find_text, replace_text))
    if len(find) == len(replace) == 1 and isinstance(find[0], ast.Expr) and isinstance(replace[0], ast.Expr):
        return (find[0].value,), True
    return tuple(find), False


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text) if "\n" in text else text.strip()).body  # dedent takes its time


def _replacement(edit: Rewrite) -> list[ast.AST]:
    """New nodes to put there."""
    body: list[Any] = _parsed(edit.replace) or [ast.Pass()]
    return [body[0].value] if _pattern(edit.find, edit.replace)[1] else body


def _same(a: object, b: object) -> bool:
    """Whether two syntax trees are equal but for positions and for load, store or delete."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, ast.AST):
        return type(a) is type(b) and a == b
    return type(a) is type(b) and all(
        _same(getattr(a, name, None), getattr(b, name, None))
        for name in a._fields
        if name not in ("ctx", "type_comment", "kind")
    )


_Place = tuple[list[Any], int, ast.AST, str]
"""A node: the list that it is in, its index there, and the node and the field that hold them."""


def _places(function: FunctionNode, kinds: Collection[type]) -> dict[type, list[_Place]]:
    """Every node of the ``kinds`` in the body of ``function``, by type; written for speed, it sees every node."""
    places: dict[type, list[_Place]] = {kind: [] for kind in kinds}
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
                if kind not in _CHILDLESS and isinstance(child, ast.AST):
                    pending.append(child)
    return places


def _runs(places: dict[type, list[_Place]], find: list[ast.AST]) -> list[tuple[list[ast.AST], ast.AST, str]]:
    """Where the nodes ``find`` stand: neighbouring nodes, and the node and field that hold them."""
    runs = [(nodes[at : at + len(find)], holder, field) for nodes, at, holder, field in places[type(find[0])]]
    return [run for run in runs if _same(find, run[0])]


def matches(function: FunctionNode, edits: Sequence[Rewrite]) -> list[Match]:
    claimed: dict[int, Rewrite] = {}
    matches = []
    places = _places(function, {type(_pattern(edit.find, edit.replace)[0][0]) for edit in edits})
    for number, edit in enumerate(edits):
        if any((e.find, e.replace, e.count) == (edit.find, edit.replace, edit.count) for e in edits[:number]):
            continue  # made already, for another patch
        found = _runs(places, list(_pattern(edit.find, edit.replace)[0]))
        if len(found) != edit.count:
            raise Conflict(f"{edit.target}: {brief(edit.find)} stands there {len(found)} times, expected {edit.count}")
        for nodes, holder, field in found:
            inside = {id(n) for node in nodes for n in ast.walk(node) if not isinstance(n, _SHARED)}
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
    """Give ``node`` and all below it the position of what it replaces."""
    last = last or first
    child: Any
    for child in ast.walk(node):
        if "lineno" in child._attributes:
            child.lineno, child.col_offset = first.lineno, first.col_offset
            child.end_lineno, child.end_col_offset = last.end_lineno, last.end_col_offset
    return node
