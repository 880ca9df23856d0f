"""Places that an edit may change: how each is found, read, built anew, written and described.

There are two kinds, the code object of a function and one entry in the ``__dict__`` of a class or
module. Both read and write *raw* values, so that what is put back is the object that was there.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from . import locate, match, render
from .edits import DeleteAttribute, Edit, Rewrite, SetAttribute
from .locate import Conflict, Replaced


_OPERATOR = re.compile(r":fake\((\w+::\w+)\)$")


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()


class Slot(Protocol):
    """One place. ``key`` tells whether two slots are the same place."""

    key: Hashable
    name: str

    def read(self) -> Any: ...
    def write(self, value: Any) -> None: ...
    def build(self, original: Any, edits: Sequence[Any]) -> Any:
        """The value that ``edits`` make of ``original``; writes nothing. May raise ``Conflict``."""

    def diff(self, original: Any, edits: Sequence[Any], value: Any) -> str: ...

    def displaced(self) -> str:
        """Who put something else where the place was to be found, in words; empty if nobody did."""


class CodeSlot:
    """The ``__code__`` of a function, which ``find`` finds anew."""

    def __init__(self, function: FunctionType, name: str, find: Callable[[], FunctionType]) -> None:
        self.function = function
        self.name = name
        self.key = ("code", id(function))
        self._find = find

    def read(self) -> CodeType:
        return self.function.__code__

    def write(self, value: CodeType) -> None:
        self.function.__code__ = value

    def build(self, original: CodeType, edits: Sequence[Rewrite]) -> CodeType:
        return match.rewrite(locate.read(self.function, original), edits)

    def diff(self, original: CodeType, edits: Sequence[Rewrite], value: Any) -> str:
        return render.diff(locate.read(self.function, original), edits, _short(original.co_filename))

    def displaced(self) -> str:
        try:
            found = self._find()
        except Conflict:
            return f"{self.name} was taken out after us"
        return "" if _reaches(found, self.function) else f"{self.name} is a function of {_home(found)} now"


class AttributeSlot:
    """One entry in the ``__dict__`` of a class or module."""

    def __init__(self, owner: Any, attribute: str, name: str) -> None:
        self.owner = owner
        self.attribute = attribute
        self.name = name
        self.key = ("attribute", id(owner), attribute)

    def read(self) -> Any:
        return vars(self.owner).get(self.attribute, ABSENT)

    def write(self, value: Any) -> None:
        if value is not ABSENT:
            setattr(self.owner, self.attribute, value)
        elif self.read() is not ABSENT:
            delattr(self.owner, self.attribute)

    def build(self, original: Any, edits: Sequence[SetAttribute | DeleteAttribute]) -> Any:
        value = original
        for edit in edits:
            if isinstance(edit, DeleteAttribute):
                if value is ABSENT and not edit.missing_ok:
                    raise Conflict(f"{edit.target}: there is nothing to delete")
                value = ABSENT
            elif edit.make is not None:
                value = edit.make(None if value is ABSENT else value)
            else:
                value = edit.value
        return value

    def diff(self, original: Any, edits: Sequence[Any], value: Any) -> str:
        path = f"{self.name} (attribute)"
        lines = difflib.unified_diff(_shown(self, original), _shown(self, value), f"a/{path}", f"b/{path}")
        return "".join(lines)

    def displaced(self) -> str:
        return ""  # what stands there is what is read


def slots_of(edit: Edit) -> list[tuple[Slot, Edit]]:
    """The places that ``edit`` changes, each with the edit to make there.

    The module of the edit must be imported. Raises ``Conflict`` if it does not hold what the
    target names; ``Replaced``, which is one, if a function of another package stands there.
    """
    if not isinstance(edit, Rewrite):
        return [(AttributeSlot(*_owner(edit.target), edit.target), edit)]
    find = partial(_found, edit.target)
    function = find()
    if _home(function).partition(".")[0] != edit.target.partition(":")[0].partition(".")[0]:
        raise Replaced(f"{edit.target} is a function of {_home(function)}")
    slots: list[tuple[Slot, Edit]] = []
    for name, value in edit.names.items():
        module = sys.modules.get(_home(function))
        if not isinstance(module, ModuleType) or vars(module) is not function.__globals__:
            raise Conflict(f"{edit.target}: the module that it was defined in is gone")
        target = f"{module.__name__}:{name}"
        slots.append((AttributeSlot(module, name, target), SetAttribute(target, value=value)))
    return [*slots, (CodeSlot(function, edit.target, find), edit)]  # the names first: the code needs them


def _found(target: str) -> FunctionType:
    """The function that ``target`` names now."""
    if operator := _OPERATOR.search(target):
        return _shape_function(operator[1], target)
    owner, attribute = _owner(target)
    return _function(vars(owner).get(attribute, ABSENT), target)


def _home(function: FunctionType) -> str:
    """The module in which ``function`` was written, whatever ``functools.wraps`` made of its name."""
    return str(function.__globals__.get("__name__", ""))


def _reaches(wrapper: FunctionType, function: FunctionType, depth: int = 4) -> bool:
    """Whether ``wrapper`` is ``function`` or has it in its closure, as one that calls it would."""
    if wrapper is function:
        return True
    return depth > 0 and any(_reaches(inner, function, depth - 1) for inner in _enclosed(wrapper))


def _enclosed(function: FunctionType) -> Iterator[FunctionType]:
    """The functions in the closure of ``function``."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            if isinstance(cell.cell_contents, FunctionType):
                yield cell.cell_contents


def _shape_function(operator: str, target: str) -> FunctionType:
    """What ``torch.library.register_fake`` was given for ``operator``: no dotted name need reach it."""
    from torch._library.simple_registry import singleton

    kernel = singleton.find(operator).fake_impl.kernel
    function = getattr(kernel, "func", None)
    inner: dict[int, FunctionType] = {}
    if isinstance(function, FunctionType):  # torch wraps it
        inner = {id(f): f for f in (function, *_enclosed(function))}
    found = [f for f in inner.values() if getattr(f, "__module__", "") == target.partition(":")[0]]
    if len(found) != 1:
        raise Conflict(f"{target}: no shape function of that module is registered for {operator}")
    return found[0]


def _owner(target: str) -> tuple[Any, str]:
    """The class or module that holds the last name of ``target``, and that name."""
    module, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = sys.modules.get(module)
    if owner is None:
        raise Conflict(f"{target}: {module} is not imported")
    for parent in parents:
        owner = vars(owner).get(parent, ABSENT)
        if not isinstance(owner, type):
            raise Conflict(f"{target}: {module} has no class {parent}")
    return owner, attribute


def _function(raw: Any, target: str) -> FunctionType:
    """The function under static and class methods, properties and ``functools.wraps``."""
    if raw is ABSENT:
        raise Conflict(f"{target}: there is no such function")
    seen: set[int] = set()
    while id(raw) not in seen:
        seen.add(id(raw))
        if isinstance(raw, (staticmethod, classmethod)):
            raw = raw.__func__
        elif isinstance(raw, property):
            raw = raw.fget
        elif isinstance(wrapped := getattr(raw, "__wrapped__", None), Callable):
            raw = wrapped
    if not isinstance(raw, FunctionType):
        raise Conflict(f"{target}: {type(raw).__name__} is not a Python function")
    return raw


def _shown(slot: AttributeSlot, value: Any) -> list[str]:
    """``value`` as lines of text: its source if it has one, else its ``repr`` without addresses."""
    if value is ABSENT:
        return []
    inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    try:
        head = f"# {slot.attribute} = {type(value).__name__} of {inner.__module__}.{inner.__qualname__}\n"
        return [head, *inspect.getsource(inner).splitlines(keepends=True)]
    except (TypeError, OSError, AttributeError):
        text = repr(value)
        return [f"{slot.attribute} = {text if ' at 0x' not in text else type(value).__name__}\n"]


def _short(path: str) -> str:
    """``path`` from its ``site-packages`` on, as a reader of a diff knows it."""
    parts = PurePath(path).parts
    for i in range(len(parts) - 1, -1, -1):
        if parts[i] in ("site-packages", "dist-packages"):
            return str(PurePath(*parts[i + 1 :]))
    for root in sorted(filter(None, sys.path), key=len, reverse=True):
        if PurePath(path).is_relative_to(root):
            return str(PurePath(path).relative_to(root))
    return path
