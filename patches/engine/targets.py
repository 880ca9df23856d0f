"""From the name of a target to the object that it names in this process, and whose that object is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, cast

from .edits import Rewrite
from .function_source import Conflict, Replaced
from .libraries import IMPORTED, Libraries


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()
"""Stands for an attribute that is not there."""
_MAX_WRAPPERS = 100
_OF_PYTHON = (FunctionType, staticmethod, classmethod, property)


def holder_of(target: str, libraries: Libraries = IMPORTED) -> tuple[Any, str]:
    """Return the class or module that holds the last name of ``target``, and that name."""
    module, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    holder: Any = libraries.module(module)
    if holder is None:
        raise Conflict(f"{target}: {module} is not imported")
    for parent in parents:
        holder = _class_under(vars(holder).get(parent, ABSENT))
        if holder is None:
            raise Conflict(f"{target}: {module} has no class {parent}")
    return holder, attribute


def _class_under(raw: Any) -> type | None:
    """Return ``raw`` if it is a class, or the class under a wrapper or proxy of another program; None if there is none."""
    for _ in range(_MAX_WRAPPERS):
        if issubclass(type(raw), type):  # ``isinstance`` would take a proxy for the class
            return cast(type, raw)
        try:
            raw = raw.__wrapped__
        except Exception:  # a proxy may raise any error
            break
    return None


def raw_attribute(holder: Any, attribute: str) -> Any:
    """Return the raw value of an attribute of a class or module itself; ``ABSENT`` if there is none."""
    return vars(holder).get(attribute, ABSENT)


def function_of(
    edit: Rewrite, raw: Callable[[Any, str], Any] = raw_attribute, libraries: Libraries = IMPORTED
) -> FunctionType:
    """Return the function that ``edit`` rewrites; ``raw`` gives the attributes of classes and modules.

    Raises ``Replaced`` if another package put its own function there.
    """
    function = _found(edit, raw, libraries)
    if not is_of(function, edit.target):
        raise Replaced(f"{edit.target} was replaced by a function of {home(function)}")
    return function


def _found(edit: Rewrite, raw: Callable[[Any, str], Any], libraries: Libraries = IMPORTED) -> FunctionType:
    if edit.reach is None:
        return unwrapped(raw(*holder_of(edit.target, libraries)), edit.target)
    try:
        return edit.reach()
    except LookupError as error:
        raise Conflict(f"{edit.target}: {error}") from error


def unwrapped(raw: Any, target: str) -> FunctionType:
    """Return the function under static and class methods, properties, ``functools.wraps`` and the wrappers of wrapt."""
    if raw is ABSENT:
        raise Conflict(f"{target}: there is no such function")
    seen: set[int] = set()
    while id(raw) not in seen:
        seen.add(id(raw))
        if type(raw) in _OF_PYTHON:
            raw = _inside(raw)
            continue
        try:
            raw = _inside(raw)
        except Exception as error:  # a proxy may raise any error
            raise Conflict(
                f"{target}: {type(raw).__name__} hides its function: {type(error).__name__}: {error}"
            ) from error
    if type(raw) is not FunctionType:  # ``isinstance`` would take a proxy or a mock for the function
        raise Conflict(f"{target}: {type(raw).__name__} is not a Python function")
    return raw


def _inside(raw: Any) -> Any:
    """Return what ``raw`` is around; ``raw`` itself if there is nothing."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    wrapped = getattr(raw, "__wrapped__", None)
    return wrapped if isinstance(wrapped, Callable) else raw  # type: ignore[arg-type]


def wrapper_of_others(raw: Any, target: str) -> str:
    """Name what another package has put around the function under ``raw``; empty if ``raw`` is what its package made."""
    if type(raw) in (staticmethod, classmethod):
        raw = raw.__func__
    elif type(raw) is property:
        raw = raw.fget
    if type(raw) is FunctionType:
        return "" if is_of(raw, target) else f"function of {home(raw)}"
    return "" if _package(type(raw).__module__) == _package(target) else type(raw).__name__


def module_of(function: FunctionType, target: str, libraries: Libraries = IMPORTED) -> ModuleType:
    """Return the module whose globals ``function`` uses."""
    module = libraries.module(home(function))
    if not isinstance(module, ModuleType) or vars(module) is not function.__globals__:
        raise Conflict(f"{target}: the module that defined it is no longer in sys.modules")
    return module


def home(function: FunctionType) -> str:
    """Return the module in which ``function`` was written, whatever ``functools.wraps`` made of its name."""
    return str(function.__globals__.get("__name__", ""))


def is_of(function: FunctionType, target: str) -> bool:
    """Tell whether ``function`` was written in the package that ``target`` is in."""
    return _package(home(function)) == _package(target)


def _package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def displaced(edit: Rewrite, function: FunctionType) -> str:
    """Say who put something else where ``function`` was found; empty if no other code did."""
    try:
        found = _found(edit, raw_attribute)
    except Conflict:
        return f"{edit.target} was removed by another program after the patch was applied"
    if _reaches(found, function):
        return ""
    return f"{edit.target} is {'another function now' if is_of(found, edit.target) else f'a function of {home(found)} now'}"


def _reaches(wrapper: FunctionType, function: FunctionType, depth: int = 4) -> bool:
    """Tell whether ``wrapper`` is ``function`` or has it in its closure, as one that calls it would."""
    if wrapper is function:
        return True
    return depth > 0 and any(_reaches(inner, function, depth - 1) for inner in enclosed(wrapper))


def enclosed(function: FunctionType) -> Iterator[FunctionType]:
    """Give the functions in the closure of ``function``."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            if isinstance(cell.cell_contents, FunctionType):
                yield cell.cell_contents
