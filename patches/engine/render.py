"""What edits change, as a unified diff for people to read."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Sequence

from .edits import Rewrite
from .locate import FunctionNode, Source
from .match import matches

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set)
_OPERATIONS = (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Subscript, ast.IfExp)


def diff(source: Source, edits: Sequence[Rewrite], path: str) -> str:
    """What ``edits`` change, as a unified diff of the file ``path``."""
    first = source.code.co_firstlineno - 1
    head, tail = source.file[:first], source.file[first + len(source.lines) :]
    after = head + _spliced(source, edits) + tail
    return "".join(difflib.unified_diff(source.file, after, f"a/{path}", f"b/{path}"))


def _spliced(source: Source, edits: Sequence[Rewrite]) -> list[str]:
    """The lines of ``source`` with the edits made in the text, for people to read."""
    _, function = source.parse()
    first = source.code.co_firstlineno
    lines = [line.encode() for line in source.lines]
    spans = []
    for match in matches(function, edits):
        start, end = match.nodes[0], match.nodes[-1]
        text = textwrap.dedent(match.text).strip("\n") or "pass"
        if isinstance(start, ast.stmt):
            text = text.replace("\n", "\n" + " " * start.col_offset)
        elif isinstance(match.holder, _OPERATIONS) and not isinstance(match.replacement[0], _ATOMS):
            text = f"({text})"
        spans.append((start.lineno, start.col_offset, end.end_lineno, end.end_col_offset, text))
    for edit in edits:
        if edit.signature:
            line, column, before = _end_of_parameters(function)
            spans.append((line, column, line, column, before + edit.signature))
    for line, column, end_line, end_column, text in sorted(spans, reverse=True):
        head, tail = lines[line - first][:column], lines[end_line - first][end_column:]
        lines[line - first : end_line - first + 1] = [head + text.encode() + tail]
    return "".join(line.decode() for line in lines).splitlines(keepends=True)


def _end_of_parameters(function: FunctionNode) -> tuple[int, int, str]:
    """Line and column after the last parameter, and the comma that a further one needs."""
    known = [n for n in ast.walk(function.args) if isinstance(n, (ast.arg, ast.expr))]
    if known:
        line, column = max((n.end_lineno, n.end_col_offset) for n in known)
        return line, column, ", "
    name_at = function.col_offset + len("def ") + len(function.name) + 1
    return function.lineno, name_at, ""
