"""Digests of what a source file defines: equal if the syntax trees are, whatever Python reads the file.

Not compared are positions, comments, docstrings, and what differs from one Python to the next in the tree of the same
source. The digest of a class is made of its bases and decorators: its methods and attributes are definitions of their own.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

ABSENT = "absent"
"""The digest of what a file does not define."""
_LENGTH = 16  # hexadecimal digits: 64 bits
_NOT_COMPARED = frozenset({"ctx", "type_comment", "kind"})
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def digests(text: str | bytes, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of ``names`` (``"function"``, ``"Class"``, ``"Class.method"``) in a source file.

    Raises ``SyntaxError`` or ``ValueError`` if this Python cannot read it.
    """
    module = ast.parse(text)
    return {name: digest(module, name) for name in names}


def digest(module: ast.Module | None, name: str) -> str:
    """Return the digest of ``name`` in a module; ``ABSENT`` where the module, or the name in it, is not there."""
    return _digest(list(find(module, name))) if module is not None else ABSENT


def find(module: ast.Module, name: str) -> Iterator[_Definition]:
    """Give each definition of ``name``, also those under ``if`` and ``try``; a later one replaces an earlier one."""
    *outer, last = name.split(".")
    scopes: list[Any] = [module]
    for each in outer:
        scopes = [found for scope in scopes for found in _named(scope, each) if isinstance(found, ast.ClassDef)]
    for scope in scopes:
        yield from _named(scope, last)


def _named(scope: ast.AST, name: str) -> Iterator[_Definition]:
    return (found for found in definitions(scope) if name in names_of(found))


def definitions(scope: ast.AST) -> Iterator[_Definition]:
    """Give what a module or class defines itself."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            yield from definitions(child)


def names_of(definition: _Definition) -> set[str]:
    """Return the names that a definition binds."""
    if isinstance(definition, (ast.Assign, ast.AnnAssign)):
        targets = definition.targets if isinstance(definition, ast.Assign) else [definition.target]
        return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return {definition.name}


def _digest(found: list[_Definition]) -> str:
    if not found:
        return ABSENT
    parts: list[str] = []
    for definition in found:
        _write(_header(definition) if isinstance(definition, ast.ClassDef) else definition, parts)
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def _header(definition: ast.ClassDef) -> ast.ClassDef:
    """Return a class without its body, but for the fields that a decorator, such as ``dataclass``, reads."""
    fields: list[ast.stmt] = [
        each for each in definition.body if isinstance(each, ast.AnnAssign) and definition.decorator_list
    ]
    return ast.ClassDef(definition.name, definition.bases, definition.keywords, fields, definition.decorator_list)


def _write(node: Any, parts: list[str]) -> None:
    """Add ``node`` to ``parts`` as a sequence of words that no other tree has."""
    if isinstance(node, list):
        parts.append(f"[{len(node)}")
        for each in node:
            _write(each, parts)
    elif isinstance(node, ast.AST):
        parts.append(f"({type(node).__name__}")
        for field, value in _fields(node):
            parts.append(field)
            _write(value, parts)
        parts.append(")")
    else:
        parts.append(f"{type(node).__name__} {node!r}")


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Give the fields of a node that are compared, without empty ones: a later Python may have more of them."""
    for field, value in ast.iter_fields(node):
        if field == "body" and _has_docstring(node):
            value = value[1:]
        elif field == "values" and isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty texts
            value = [each for each in value if not (isinstance(each, ast.Constant) and each.value == "")]
        if field not in _NOT_COMPARED and value is not None and value != []:
            yield field, value


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or not node.body:
        return False
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
