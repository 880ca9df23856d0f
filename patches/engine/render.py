"""What edits change, as a unified diff for people to read."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from .edits import Rewrite
from .function_source import Source
from .match import matches

_CONTEXT = 3
_HUNK = re.compile(r"\A@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@")
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict, ast.Set)
_OPERATIONS = (ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Attribute, ast.Subscript, ast.IfExp)


def of_code(source: Source, edits: Sequence[Rewrite]) -> str:
    """Show ``edits`` as a unified diff of the file that the function stands in."""
    first = source.code.co_firstlineno - 1
    end = first + len(source.function_lines)
    start = max(0, first - _CONTEXT)  # the rest of the file is the same, and comparing it takes long
    head, tail = source.file_lines[start:first], source.file_lines[end : end + _CONTEXT]
    before, after = head + source.file_lines[first:end] + tail, head + _spliced(source, edits) + tail
    path = _short(source.code.co_filename)
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=_CONTEXT)
    return "".join(_HUNK.sub(partial(_shifted, start), line) for line in lines)


def _shifted(lines: int, hunk: re.Match[str]) -> str:
    """Return the head of a hunk of a diff, so many lines further down."""
    old, old_length, new, new_length = hunk.groups(default="")
    return f"@@ -{int(old) + lines}{old_length} +{int(new) + lines}{new_length} @@"


def of_attribute(name: str, before: Sequence[Any], after: Sequence[Any]) -> str:
    """Show the change of the attribute with the target ``name``: at most one value before, one after."""
    path = f"{name} (attribute)"
    attribute = name.rpartition(".")[2].rpartition(":")[2]
    old, new = ([line for value in side for line in _shown(attribute, value)] for side in (before, after))
    return "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))


def _shown(attribute: str, value: Any) -> list[str]:
    """Show ``value`` as lines of text: its source if it has one, else its ``repr`` without addresses."""
    inner: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    try:
        head = f"# {attribute} = {type(value).__name__} of {inner.__module__}.{inner.__qualname__}\n"
        source = inspect.getsource(getattr(inner, "__code__", inner))  # not of the function that it wraps
        return [head, *source.splitlines(keepends=True)]
    except (TypeError, OSError, AttributeError):
        text = repr(value)
        return [f"{attribute} = {text if ' at 0x' not in text else type(value).__name__}\n"]


def _short(path: str) -> str:
    """Shorten ``path`` to the part below ``site-packages`` or another folder of ``sys.path``."""
    parts = PurePath(path).parts
    for i in range(len(parts) - 1, -1, -1):
        if parts[i] in ("site-packages", "dist-packages"):
            return PurePath(*parts[i + 1 :]).as_posix()
    for root in sorted(filter(None, sys.path), key=len, reverse=True):
        if PurePath(path).is_relative_to(root):
            return PurePath(path).relative_to(root).as_posix()
    return path


def _spliced(source: Source, edits: Sequence[Rewrite]) -> list[str]:
    """Make the edits in the lines of ``source``, for people to read."""
    _, function = source.parse()
    first = source.code.co_firstlineno
    lines = [line.encode() for line in source.function_lines]
    spans = []
    for match in matches(source, function, edits):
        start: Any = match.nodes[0]
        end: Any = match.nodes[-1]
        text = textwrap.dedent(match.text).strip("\n") or "pass"
        if isinstance(start, ast.stmt):
            text = text.replace("\n", "\n" + " " * start.col_offset)
        elif isinstance(match.holder, _OPERATIONS) and not isinstance(match.replacement[0], _ATOMS):
            text = f"({text})"
        spans.append((start.lineno, start.col_offset, end.end_lineno, end.end_col_offset, text))
    for line, column, end_line, end_column, text in sorted(spans, reverse=True):
        head, tail = lines[line - first][:column], lines[end_line - first][end_column:]
        lines[line - first : end_line - first + 1] = [head + text.encode() + tail]
    return "".join(line.decode() for line in lines).splitlines(keepends=True)
