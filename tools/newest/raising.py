"""Raising `tested_up_to` in the file of a patch: an edit of that one text, or none if it is not certain which one it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from patches.engine import gate, requirement
from patches.engine.patch import Part, Patch


class Uncertain(Exception):
    """The value cannot be raised; the message says why."""


class Raised(NamedTuple):
    """What was raised: the keys of parts by their file, and the others with the reason."""

    files: dict[Path, list[str]]
    refused: dict[str, str]


def new_release(version: str | None) -> str:
    """Return what `tested_up_to` becomes where ``version`` is installed. Raises ``Uncertain`` for one that is not final."""
    found = requirement.parse_version(version or "")
    if found is None or found.is_prerelease:
        raise Uncertain(f"{version} is no final release")
    return found.public


def raise_all(patches: Iterable[Patch], keys: Collection[str], root: Path, dry_run: bool = False) -> Raised:
    """Raise `tested_up_to` of the parts ``keys`` of ``patches`` to the installed releases, in files below ``root``.

    A file that has changes of which git does not know, or that is not below ``root``, stays as it is.
    """
    by_file: dict[Path, list[Patch]] = {}
    for patch in patches:
        if any(part.key in keys for part in patch.parts):
            by_file.setdefault(file_of(patch), []).append(patch)
    raised = Raised({}, {})
    for file, own in by_file.items():
        parts = [part for patch in own for part in patch.parts if part.key in keys]
        if why := uncommitted(file, root):
            raised.refused.update({part.key: why for part in parts})
            continue
        wanted = {}
        for part in parts:
            try:
                wanted[part.key] = new_release(gate.installed_version(part.package))
            except Uncertain as error:
                raised.refused[part.key] = str(error)
        before = file.read_bytes()
        after, refused = edited(before, own, wanted)
        raised.refused.update(refused)
        if done := [key for key in wanted if key not in refused]:
            raised.files[file] = done
            if not dry_run and after != before:
                file.write_bytes(after)
    return raised


def file_of(patch: Patch) -> Path:
    """Return the file that declares a patch."""
    return Path(sys.modules[patch.module].__file__ or "").resolve()


def uncommitted(file: Path, root: Path) -> str:
    """Say why a file is not to be changed by a program: git does not have it as it is. Empty if git does."""
    if not file.is_relative_to(root.resolve()):
        return f"{file} is not in {root}"
    command = ["git", "-c", "safe.directory=*", "status", "--porcelain", "--untracked-files=all", "--", str(file)]
    try:
        said = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError as error:
        return f"git cannot tell whether {file.relative_to(root.resolve())} was changed: {error}"
    if said.returncode:
        return f"git cannot tell whether {file.relative_to(root.resolve())} was changed: {said.stderr.strip()}"
    return f"{file.relative_to(root.resolve())} has uncommitted changes" if said.stdout else ""


def edited(text: bytes, patches: Iterable[Patch], wanted: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Return the text of a file with `tested_up_to` of parts as ``wanted``; and why it stays, by key, where it does."""
    tree = ast.parse(text)
    values: dict[ast.Constant, dict[str, str]] = {}
    refused: dict[str, str] = {}
    for patch, part in ((own, part) for own in patches for part in own.parts if part.key in wanted):
        try:
            value = declared(tree, patch, part)
            _check(text, value, part.tested_up_to)
            values.setdefault(value, {})[part.key] = wanted[part.key]
        except Uncertain as error:
            refused[part.key] = str(error)
    edits = []
    for value, new in values.items():
        if len(set(new.values())) > 1 or _readers(tree, value) not in (0, len(new)):
            refused.update(dict.fromkeys(new, f"line {value.lineno} is the value of other parts too"))
        else:
            edits.append((_position(text, value.lineno, value.col_offset) + 1, str(value.value), min(new.values())))
    for start, old, release in sorted(edits, reverse=True):
        text = text[:start] + release.encode() + text[start + len(old) :]
    return text, refused


def declared(tree: ast.Module, patch: Patch, part: Part) -> ast.Constant:
    """Return where the file of a patch writes `tested_up_to` of a part. Raises ``Uncertain``."""
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and _id(tree, call) == patch.id]
    if len(calls) != 1:
        raise Uncertain(f"the file declares {patch.id} {len(calls)} times")
    call = _call_of(calls[0], patch, part) if part.name else calls[0]
    return _constant(tree, _argument(tree, call))


def _id(tree: ast.Module, call: ast.Call) -> object:
    """Return the id that a call is given; None if it is given none."""
    given = _keyword(call, "id")
    try:
        return None if given is None else _constant(tree, given).value
    except Uncertain:
        return None


def _call_of(call: ast.Call, patch: Patch, part: Part) -> ast.Call:
    """Return the call that makes one of several parts."""
    written = _keyword(call, "parts")
    elements = written.elts if isinstance(written, (ast.Tuple, ast.List)) else []
    own = [each for each in elements if isinstance(each, ast.Call)]
    if len(elements) != len(own) or len(own) != len(patch.parts):
        raise Uncertain("its parts are not written one by one")
    found = own[[each.key for each in patch.parts].index(part.key)]
    if not any(_is_text(each, part.name) for each in (*found.args, *(keyword.value for keyword in found.keywords))):
        raise Uncertain(f"line {found.lineno} does not name the part {part.name!r}")
    return found


def _argument(tree: ast.Module, call: ast.Call) -> ast.expr:
    """Return what a call is given as ``tested_up_to``, by name or by its place among the parameters."""
    if (given := _keyword(call, "tested_up_to")) is not None:
        return given
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    parameters = list(Part.__dataclass_fields__) if name == "Part" else _parameters(tree, name)
    at = parameters.index("tested_up_to") if "tested_up_to" in parameters else len(call.args)
    if at >= len(call.args) or any(isinstance(each, ast.Starred) for each in call.args[: at + 1]):
        raise Uncertain(f"line {call.lineno} does not say which argument is tested_up_to")
    return call.args[at]


def _parameters(tree: ast.Module, name: str) -> list[str]:
    """Return the parameters of a function of the file."""
    found = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    return [each.arg for each in (*found[0].args.posonlyargs, *found[0].args.args)] if len(found) == 1 else []


def _constant(tree: ast.Module, value: ast.expr) -> ast.Constant:
    """Follow the name of a constant of the file to its value."""
    if isinstance(value, ast.Name):
        bound = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == value.id and not _is_read(n)]
        found = [each.value for each in tree.body if isinstance(each, ast.Assign) and _is_name(each.targets, value.id)]
        if len(bound) != 1 or len(found) != 1:
            raise Uncertain(f"{value.id} is not assigned once")
        value = found[0]
    if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
        raise Uncertain(f"line {value.lineno} computes it")
    return value


def _readers(tree: ast.Module, value: ast.Constant) -> int:
    """Return how often the constant with this value is read; 0 if the value has no name."""
    names = [each.targets for each in tree.body if isinstance(each, ast.Assign) and each.value is value]
    if not names:
        return 0
    return sum(isinstance(n, ast.Name) and _is_name(names[0], n.id) and _is_read(n) for n in ast.walk(tree))


def _check(text: bytes, value: ast.Constant, expected: str) -> None:
    """Raise ``Uncertain`` unless the file has the expected text there, in plain quotes."""
    start, end = (
        _position(text, value.lineno, value.col_offset),
        _position(text, value.end_lineno or 0, value.end_col_offset or 0),
    )
    if text[start:end].decode() not in (f'"{expected}"', f"'{expected}'"):
        raise Uncertain(f"line {value.lineno} does not say {expected}")


def _position(text: bytes, line: int, column: int) -> int:
    return sum(map(len, text.splitlines(keepends=True)[: line - 1])) + column


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def _is_text(value: ast.expr | None, text: str) -> bool:
    return isinstance(value, ast.Constant) and value.value == text


def _is_name(targets: list[ast.expr], name: str) -> bool:
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)
