"""What our own code takes from a library by name: what it imports, and what it reads of the objects that it gets.

The code of a patch is what its edits put in, and all of ours that this calls; not its reproducer.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from patches.engine import definitions
from patches.engine.edits import Edit, Rewrite, SetAttribute
from patches.engine.patch import Part

_OURS = definitions.__name__.partition(".")[0]
_A_TARGET = re.compile(r"[a-z_]\w*(\.\w+)+(:[\w.]+)?")


class Uses(NamedTuple):
    """What some code uses."""

    imported: frozenset[tuple[str, str]] = frozenset()
    """A module of a library, and the dotted path of what is taken from it."""
    attributes: frozenset[str] = frozenset()
    """Names that are read of objects."""
    called: frozenset[tuple[str, str]] = frozenset()
    """What of ``imported`` is called."""

    def __or__(self, other: Any) -> Uses:
        return Uses(*(mine | theirs for mine, theirs in zip(self, other)))


_of_patches: dict[str, Uses] = {}


def of_patch(part: Part) -> Uses:
    """Return what the code of a patch uses, in whatever release."""
    if part.key not in _of_patches:
        _of_patches[part.key] = uses(part.edits, [part.damage] if part.damage else [])
    return _of_patches[part.key]


def uses(edits: Iterable[Edit], others: Iterable[Any] = ()) -> Uses:
    """Return what the code that ``edits`` put in uses, and that of the functions ``others``."""
    seen: set[int] = set()
    found = Uses()
    for edit in edits:
        values: list[Any] = []
        if isinstance(edit, Rewrite):
            values = [*edit.names.values(), edit.reach]
            found |= _of_replacement(edit)
        elif isinstance(edit, SetAttribute):
            values = [edit.value, edit.make]
        for value in values:
            found |= _of_object(value, seen)
    for value in others:
        found |= _of_object(value, seen)
    return found


def _of_replacement(edit: Rewrite) -> Uses:
    """Return what the text of a rewrite adds to the function: what stood there before is no concern of ours."""
    module = edit.target.partition(":")[0]
    before, after = (_read(text, module) for text in (edit.find, edit.replace))
    imported = {(module, name) for name in after.names - before.names} | after.imported
    return Uses(frozenset(imported), frozenset(after.attributes - before.attributes), frozenset(after.called))


def _read(text: str, module: str) -> _Reading:
    read = _Reading(module, {})
    read.visit(ast.parse(textwrap.dedent(text) if "\n" in text else text.strip()))
    return read


def _of_object(value: Any, seen: set[int]) -> Uses:
    """Return what a function, a class or a container of them uses, with all of ours that it leads to."""
    found, pending = Uses(), [value]
    while pending:
        each = pending.pop()
        if isinstance(each, types.FunctionType):
            each = inspect.unwrap(each)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, functools.partial):
            pending += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, (staticmethod, classmethod)):
            pending.append(each.__func__)
        elif isinstance(each, functools._lru_cache_wrapper):
            pending.append(each.__wrapped__)
        elif isinstance(each, functools.cached_property):
            pending.append(each.func)
        elif isinstance(each, property):
            pending += [each.fget, each.fset, each.fdel]
        elif isinstance(each, types.MethodType):
            pending += [each.__func__, each.__self__]
        elif isinstance(each, types.FunctionType) and _is_written_by_us(each):
            pending += [cell.cell_contents for cell in each.__closure__ or () if _is_full(cell)]
            own = _of_function(each.__module__, each.__code__.co_firstlineno)
            found |= own.uses
            pending += own.ours()
        elif isinstance(each, type) and _is_ours(each.__module__):
            pending += [*vars(each).values(), *each.__bases__]
        elif isinstance(each, (tuple, list, set, frozenset)):
            pending += each
        elif isinstance(each, (dict, types.MappingProxyType)):
            pending += each.values()
        elif isinstance(each, str):
            found |= _of_text(each)
    return found


def _of_text(text: str) -> Uses:
    """Return what a string names: ``"module:name"``, a module, or an attribute, as for ``getattr``."""
    if text.isidentifier():
        return Uses(attributes=frozenset([text]))
    if _A_TARGET.fullmatch(text):
        module, _, path = text.partition(":")
        return Uses(frozenset([(module, path)]))
    return Uses()


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == _OURS


def _is_written_by_us(function: types.FunctionType) -> bool:
    """Tell whether it stands in a file of ours: methods of named tuples and dataclasses stand in none."""
    return _is_ours(function.__module__) and function.__code__.co_filename == sys.modules[function.__module__].__file__


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class _Function(NamedTuple):
    uses: Uses
    module: str
    names: frozenset[tuple[str, ...]]
    """Names of our module, each with the attributes that are read of it."""
    imports: frozenset[tuple[str, str]]
    """Of our modules, inside the function."""

    def ours(self) -> list[Any]:
        """Return the objects of ours that it leads to."""
        found = [_reached(sys.modules[self.module], path) for path in self.names]
        return [*found, *(_reached(importlib.import_module(module), path.split(".")) for module, path in self.imports)]


def _reached(value: Any, path: Iterable[str]) -> Any:
    """Follow ``path`` while it leads through modules of ours: what a function does with an object is not followed."""
    for name in path:
        if not isinstance(value, types.ModuleType) or not _is_ours(value.__name__):
            break
        value = getattr(value, name, None)
    return None if isinstance(value, types.ModuleType) else value


@functools.cache
def _of_function(module: str, line: int) -> _Function:
    tree, imports = _module(module)
    node = next(n for n in ast.walk(tree) if _begins(n) == line)
    read = _Reading(module, imports)
    read.visit(node)
    ours = frozenset(each for each in read.imported if _is_ours(each[0]))
    theirs = frozenset(read.imported) - ours
    uses = Uses(theirs, frozenset(read.attributes), frozenset(read.called))
    return _Function(uses, module, frozenset(read.paths), ours)


def _begins(node: ast.AST) -> int:
    """Return the line in which a function begins, decorators included; 0 for another node."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return node.lineno if isinstance(node, ast.Lambda) else 0


@functools.cache
def _module(name: str) -> tuple[ast.Module, dict[str, tuple[str, str]]]:
    """Return the syntax tree of a module of ours, and what its top level imports from libraries."""
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    read = _Reading(name, {})
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            read.visit(statement)
    return tree, read.bound


class _Reading(ast.NodeVisitor):
    """Collects what a piece of code of ``module`` imports and reads."""

    def __init__(self, module: str, bound: dict[str, tuple[str, str]]) -> None:
        self.module = module
        self.bound = dict(bound)
        """By local name the module and the path there, an empty one for the module."""
        self.imported: set[tuple[str, str]] = set()
        self.called: set[tuple[str, str]] = set()
        self.attributes: set[str] = set()
        self.names: set[str] = set()
        self.paths: set[tuple[str, ...]] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.bound[name] = (alias.name if alias.asname else name, "")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        origin = node.module or ""
        if node.level:
            package = sys.modules[self.module].__spec__.parent or ""  # type: ignore[union-attr]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            origin = f"{package}.{origin}".strip(".")
        for alias in node.names:
            self.bound[alias.asname or alias.name] = (origin, alias.name)
            self.imported.add((origin, alias.name))

    def visit_Call(self, node: ast.Call) -> None:
        before = set(self.imported)
        self.imported.clear()
        self.visit(node.func)
        self.called |= self.imported
        self.imported |= before
        for each in (*node.args, *node.keywords):
            self.visit(each)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            path.insert(0, value.attr)
            value = value.value
        self.attributes.update(name for name in path if not name.startswith("__"))
        if isinstance(value, ast.Name):
            self._take(value.id, path)
        else:
            self.visit(value)

    def visit_Name(self, node: ast.Name) -> None:
        self._take(node.id, [])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            named = _of_text(node.value)
            self.imported |= named.imported
            self.attributes |= named.attributes

    def _take(self, name: str, path: list[str]) -> None:
        if name in self.bound:
            module, first = self.bound[name]
            self.imported.add((module, ".".join(filter(None, [first, *path]))))
        else:
            self.names.add(name)
            self.paths.add((name, *path))
