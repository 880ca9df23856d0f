"""The installed packages as their files say, for a forecast: nothing of them is imported or run.

For each module there is a stand-in with the functions and classes that the module defines: made of the same code objects
that an import would take from its bytecode or source. Patches are gated, matched and applied to the stand-ins by the same
code as in a program. What only an import can show is not known here: a package whose import raises an error, or another program
that has replaced a function.
"""

from __future__ import annotations

import ast
import opcode
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from .edits import Edit, Rewrite, SetAttribute
from .libraries import Libraries
from .patch import Part, Patch

_IS_FUNCTION = 1  # CO_OPTIMIZED: the body of a class has not this flag
_OF_THE_CLASS_ITSELF = ("__classcell__", "__doc__", "__module__", "__qualname__", "__slots__")
_STORE, _CONSTANT, _MORE = (opcode.opmap[name] for name in ("STORE_NAME", "LOAD_CONST", "EXTENDED_ARG"))
_SMALL_INT = opcode.opmap.get("LOAD_SMALL_INT")  # since Python 3.14: the argument is the value
_IMPORTS = (opcode.opmap["IMPORT_NAME"], opcode.opmap["IMPORT_FROM"])
_SKIPPED = opcode.opmap.get("CACHE", -1)


class _Value:
    """Stands for a value that only the import would compute."""


_VALUE = _Value()
_MODULE = ModuleType("imported")
"""Stands for what a module imports."""


class _Made(NamedTuple):
    """Stands for what ``make`` of an edit would return at the import."""

    edit: SetAttribute

    def __repr__(self) -> str:
        make: Any = self.edit.make
        return f"<made at the import by {make.__module__}.{make.__qualname__}>"


class LibraryFiles(Libraries):
    """Reads each file once."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}
        self._codes: dict[str, CodeType | None] = {}
        self._modules: dict[str, ModuleType] = {}
        self._versions: dict[str, str | None] = {}
        self._reached: dict[tuple[str, str], FunctionType] = {}
        self.errors: list[str] = []
        """A sentence for each module whose file cannot be read as Python."""

    def module(self, name: str) -> ModuleType | None:
        """Return the stand-in of a module; None if there is no such file, or this Python cannot read it."""
        if name not in self._modules:
            code = self._code(name)
            if code is None:
                return None
            module = self._modules[name] = ModuleType(name)
            vars(module).update(_bound(code, "", vars(module)))
        return self._modules[name]

    def is_imported(self, name: str) -> bool:
        """Tell whether the module could be imported."""
        return self._code(name) is not None

    def after_import(self, name: str, callback: Callable[[], None]) -> None:
        """Do nothing: what is not there will not come."""

    def version(self, module: str) -> str | None:
        """Return the ``__version__`` of a top-level module if its file has it as text, once."""
        if module not in self._versions:
            code = self._code(module)
            found = [value for name, value in _stored(code) if name == "__version__"] if code is not None else []
            self._versions[module] = found[0] if len(found) == 1 and isinstance(found[0], str) else None
        return self._versions[module]

    def readable(self, patch: Patch) -> Patch:
        """Return ``patch`` without what needs the libraries: its edits call nothing, and it looks for no damage."""
        parts = tuple(replace(part, **self._without_calls(part)) for part in patch.parts if part.name)
        return replace(patch, parts=parts, **self._without_calls(patch))

    def _without_calls(self, found: Patch | Part) -> dict[str, Any]:
        return {"edits": tuple(map(self._edit_without_calls, found.edits)), "damage": None}

    def _edit_without_calls(self, edit: Edit) -> Edit:
        if isinstance(edit, SetAttribute) and edit.make is not None:
            return edit._replace(make=None, value=_Made(edit))
        if isinstance(edit, Rewrite) and edit.reach is not None:
            return edit._replace(reach=partial(self._decorated, edit))
        return edit

    def _decorated(self, edit: Rewrite) -> FunctionType:
        """Find the function of ``edit``, which has no name of its own, by its decorator."""
        key = (edit.target, edit.decorator)
        if key in self._reached:  # the same function each time: places are held weakly
            return self._reached[key]
        name = edit.target.partition(":")[0]
        spec, code, module = self._spec(name), self._code(name), self.module(name)
        wanted = ast.dump(ast.parse(edit.decorator, mode="eval").body) if edit.decorator else ""
        if spec is not None and spec.loader is not None and code is not None and module is not None:
            source = spec.loader.get_source(name)  # type: ignore[attr-defined]
            for node in ast.walk(ast.parse(source or "")):
                if isinstance(node, ast.FunctionDef) and wanted in map(ast.dump, node.decorator_list):
                    line = node.decorator_list[0].lineno
                    found = [each for each in _inner(code) if (each.co_name, each.co_firstlineno) == (node.name, line)]
                    if found:
                        return self._reached.setdefault(key, _function(found[0], node.name, vars(module)))
        raise LookupError(f"no function of {name} has the decorator {edit.decorator}")

    def _code(self, name: str) -> CodeType | None:
        if name not in self._codes:
            spec, code = self._spec(name), None
            if spec is not None and spec.loader is not None:
                try:
                    code = spec.loader.get_code(name)  # type: ignore[attr-defined]
                except AttributeError:  # a loader that has no code
                    code = None
                except (ImportError, OSError, SyntaxError, ValueError) as error:  # the import would fail, too
                    code = None
                    self.errors.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
                else:
                    code = code or _EMPTY  # an extension
            self._codes[name] = code
        return self._codes[name]

    def _spec(self, name: str) -> ModuleSpec | None:
        if name not in self._specs:
            package = name.rpartition(".")[0]
            try:
                if not package:
                    found = _top_level(name)
                elif (parent := self._spec(package)) is None or parent.submodule_search_locations is None:
                    found = None
                else:
                    found = PathFinder.find_spec(name, parent.submodule_search_locations)
            except (ImportError, ValueError):
                found = None
            self._specs[name] = found
        return self._specs[name]


def _top_level(name: str) -> ModuleSpec | None:
    """Find a package as its import would; the spec of one that is imported may have been changed since."""
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next((spec for find in finders if find is not None and (spec := find(name, None)) is not None), None)


_EMPTY = compile("", "<extension>", "exec")


def _bound(code: CodeType, scope: str, space: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give what a module or the body of a class binds to names; of two definitions the last one.

    ``scope``: the qualified name of the class and a dot; ``space``: the globals of the module.
    """
    inner = {each.co_name: each for each in _inner(code)}
    private = f"_{code.co_name.lstrip('_')}__"  # in a class, the begin of names that Python mangles
    for name, value in _stored(code):
        found = inner.get(f"__{name.removeprefix(private)}" if scope and name.startswith(private) else name)
        if found is None:
            yield name, value
        elif found.co_flags & _IS_FUNCTION:
            yield name, _function(found, f"{scope}{found.co_name}", space)
        else:
            body = dict(_bound(found, f"{scope}{name}.", space))
            own = {key: each for key, each in body.items() if key not in _OF_THE_CLASS_ITSELF}
            yield name, type(name, (), {**own, "__module__": space["__name__"], "__qualname__": f"{scope}{name}"})


def _function(code: CodeType, qualname: str, space: dict[str, Any]) -> FunctionType:
    function = FunctionType(code, space, closure=tuple(CellType() for _ in code.co_freevars))
    function.__qualname__ = qualname
    return function


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _stored(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Give each name that ``code`` stores, with the value if it is a constant."""
    before: tuple[int, int] = (-1, 0)
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2]):
        argument, high = high | low, 0
        if operation == _MORE:
            high = argument << 8
        elif operation == _STORE:
            if before[0] == _CONSTANT:
                value = code.co_consts[before[1]]
            elif before[0] == _SMALL_INT:
                value = before[1]
            else:
                value = _MODULE if before[0] in _IMPORTS else _VALUE
            yield code.co_names[argument], value
        if operation not in (_SKIPPED, _MORE):
            before = operation, argument
