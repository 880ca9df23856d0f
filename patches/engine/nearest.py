"""What stands in a function where an edit expected something else: for the message of a conflict."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from types import CodeType

from .function_source import FunctionNode

_SHORT = 160
"""Characters of code that a message shows."""


def describe(function: FunctionNode, code: CodeType, find: str, found: Sequence[ast.AST]) -> str:
    """Say, with file and lines, where ``find`` was ``found``, or which code of ``function`` is the most like it.

    Parameters
    ----------
    function:
        The syntax tree of the installed function.
    code:
        Its code object, which names the file.
    find:
        The code that the edit expects.
    found:
        The first node of each place where it stands.
    """
    if found:
        lines = " and ".join(str(node.lineno) for node in found if isinstance(node, (ast.expr, ast.stmt)))
        return f"it stands in {code.co_filename}, line {lines}"
    wanted = _plain(ast.parse(textwrap.dedent(find).strip()))
    texts = {_plain(node): node.lineno for node in _candidates(function)}
    near = difflib.get_close_matches(wanted, texts, n=1, cutoff=0.4)
    if not near:
        return f"nothing in {code.co_filename}, line {function.lineno} and below, is like it"
    return f"the most like it, in {code.co_filename}, line {texts[near[0]]}: {_quoted(near[0])}"


def _candidates(function: FunctionNode) -> Iterator[ast.expr | ast.stmt]:
    """Give the statements and expressions below ``function`` that are more than a name or a number."""
    for node in ast.walk(function):
        if node is not function and isinstance(node, (ast.expr, ast.stmt)):
            if not isinstance(node, (ast.Name, ast.Constant, ast.FunctionDef, ast.ClassDef)):
                yield node


def _plain(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _quoted(text: str) -> str:
    return repr(textwrap.shorten(text, _SHORT))
