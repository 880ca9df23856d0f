"""Which definitions that patches rest on a release has changed, each with the lines that differ."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from packaging.version import Version

from patches.engine import definitions, gate
from patches.engine.patch import Part
from patches.newer_releases.source_table import SourceTable, source_file
from patches.process_registry import NEWER_RELEASES, REGISTRY
from tools.commands import Failed

LONGEST = 60
"""Lines of a diff that are shown."""
Text = Callable[[str, str, str], str | None]
"""From a package, a release and a module to its source; None if the release has no such module."""


class Change(NamedTuple):
    """A definition that is not the one of the nearest tested release."""

    name: str
    """As ``"module:name"``."""
    package: str
    release: str
    """The tested release."""
    rests_on_it: tuple[str, ...]
    """Keys of parts."""


def changes(parts: Iterable[Part], table: SourceTable) -> tuple[list[Change], dict[str, list[str]]]:
    """Return each definition that has changed, once; and the keys of parts that cannot be compared, by the reason."""
    found: dict[tuple[str, str], tuple[set[str], list[str]]] = {}
    unknown: dict[str, list[str]] = {}
    for part, package in ((each, package) for each in parts for package in newer(each)):
        compared = table.compare(part, gate.installed_version(package) or "", package)
        if not compared.release:
            unknown.setdefault(compared.why, []).append(part.key)
        for name in compared.different:
            releases, keys = found.setdefault((package, name), (set(), []))
            releases.add(compared.release)
            keys.append(part.key)
    return [
        Change(name, package, max(releases, key=Version), tuple(keys))
        for (package, name), (releases, keys) in sorted(found.items())
    ], unknown


def newer(part: Part) -> list[str]:
    """Return the packages that ``part`` edits and that are newer than any release that was tested.

    The one that it repairs if there is none: its version cannot be read.
    """
    sources = NEWER_RELEASES.sources
    found = gate.newer_packages(part, REGISTRY.limits)
    edited = [name for name, version, _ in found if name == part.package or sources.edits_any(part, name, version)]
    return edited or [part.package]


def describe(change: Change, text: Text) -> str:
    """A change in words: where it is, which patches rest on the definition, and its lines."""
    module, _, path = change.name.partition(":")
    file = source_file(module)
    after = definition(file.read_text("utf-8") if file else None, path)
    tested, here = f"{change.package} {change.release}", f"{change.package} {gate.installed_version(change.package)}"
    what = "differs from"
    try:
        before = definition(text(change.package, change.release, module), path)
        what = "is not in" if not before else what if after else "is gone since"
        lines = cut(list(difflib.unified_diff(before, after, tested, here, lineterm="")))
    except (OSError, Failed) as error:
        lines = [f"the source of {tested} could not be read: {error}"]
    heads = [f"{change.name} {what} {tested}"]
    heads += [f"  file:    {file or 'none'}", f"  patches: {', '.join(change.rests_on_it)}"]
    return "\n".join([*heads, *(f"    {line}".rstrip() for line in lines)])


def cut(lines: list[str]) -> list[str]:
    """Return the first lines, and say how many are left out."""
    if len(lines) <= LONGEST:
        return lines
    return [*lines[:LONGEST], f"... {len(lines) - LONGEST} more lines"]


def definition(text: str | None, path: str) -> list[str]:
    """Return the lines that define ``path`` in the text of a module; none if it is not there.

    Of a class, without its methods and attributes, which are definitions of their own; without docstrings, which
    are not compared.
    """
    if text is None:
        return []
    lines = text.split("\n")
    found: list[str] = []
    for node in definitions.find(ast.parse(text), path):
        wanted = set(range(_begin(node), (node.end_lineno or 0) + 1))
        for left_out in _left_out(node):
            wanted -= set(range(_begin(left_out), (left_out.end_lineno or 0) + 1))
        if isinstance(node, ast.ClassDef):
            wanted = {line for line in wanted if line < _begin(node.body[0]) or _is_field(node, line)}
        kept = [lines[number - 1] for number in sorted(wanted)]
        margin = len(kept[0]) - len(kept[0].lstrip()) if kept else 0
        found += [line[margin:] if line[:margin].isspace() else line for line in kept]
    return found


def _begin(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _left_out(node: ast.AST) -> Iterator[ast.stmt]:
    """Give docstrings that stand on lines of their own."""
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = each.body[0]
            if ast.get_docstring(each, clean=False) is not None and first.lineno > each.lineno:
                yield first


def _is_field(node: ast.ClassDef, line: int) -> bool:
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and node.decorator_list]
    return any(each.lineno <= line <= (each.end_lineno or 0) for each in fields)
