"""The live instances of a few classes in this process.

They are found as what refers to their class. A list of all that the garbage collector tracks would hold tuples
that other threads are just building, and break them. One question asks for all of its classes at once: it costs
as much as one walk over everything, a twentieth of a second. Several questions in a row share what was found inside
:func:`one_walk`. And there is none where the reference counts of the classes say that nothing is alive, as in
a program that has not loaded its model yet.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_ASKED = {
    "bitsandbytes.nn": ("Embedding4bit", "Linear4bit", "Linear8bitLt", "Params4bit"),
    "peft.tuners.unilora.layer": ("Linear",),
}
"""Classes that ``damage()`` asks for, by module: a walk looks for all of them, whatever was asked first."""
_UNAWARE = ("torch.", "sympy.", "networkx.", "numpy.")
"""Modules that know none of these classes, most of all there are. If one names one, a walk tells that it is no instance."""
_Found = dict[type, list[Any]]
_namespace = vars(ModuleType)["__dict__"].__get__
"""Of a module, past its own ways: `vars` of a lazy one loads it."""


class _Walk:
    """The answers found inside :func:`one_walk`."""

    def __init__(self) -> None:
        self.absent = _absent()
        self.found: _Found = {}


_here = threading.local()


def find_instances(kind: type[T]) -> list[T]:
    """Every object alive whose class is ``kind`` or below it."""
    walk: _Walk | None = getattr(_here, "walk", None)
    family = _family(kind)
    if walk is not None and walk.absent.issuperset(family):
        return []
    found = walk.found if walk is not None and kind in walk.found else _walk({kind, *_asked()})
    if walk is not None:
        walk.found = found
    return [thing for cls in family for thing in found.get(cls, ())]


def collect_garbage() -> None:
    """Run the garbage collector, and let the next question walk anew: what was only in a cycle is gone."""
    walk: _Walk | None = getattr(_here, "walk", None)
    if walk is not None:
        walk.found = {}
    gc.collect()


def without_garbage(question: Callable[[], list[T]]) -> list[T]:
    """What ``question`` answers, which asks for instances; if there are any, without instances that only a cycle holds."""
    if not question():
        return []
    collect_garbage()
    return question()


@contextlib.contextmanager
def one_walk() -> Iterator[None]:
    """Inside, in this thread, all questions are answered from one walk, and of what was absent before without one.

    The found instances stay alive until the end. One inside another is the same.
    """
    if getattr(_here, "walk", None) is not None:
        yield
        return
    _here.walk = _Walk()
    try:
        yield
    finally:
        _here.walk = None


def _asked() -> Iterator[type]:
    for name, classes in _ASKED.items():
        module = sys.modules.get(name)
        yield from (vars(module)[cls] for cls in classes if cls in vars(module)) if module else ()


def _family(kind: type) -> list[type]:
    """``kind`` and every class below it."""
    found = [kind]
    for cls in found:
        subclasses: list[type] = type.__subclasses__(cls)
        found += [below for below in subclasses if below not in found]
    return found


class _Nothing:
    """A class without instances that one module names: what else refers to it refers to all classes here."""

    __slots__ = ()  # without the descriptors of an instance, which refer to their class


def _absent() -> set[type]:
    """Those classes that are asked for, and those below them, that have no instance.

    An instance refers to its class. So a class has none that is referred to by its known referrers alone: the modules
    that name it, the classes below it, and its own methods. Any other referrer is taken for an instance.
    """
    classes = [*{cls for kind in _asked() for cls in _family(kind)}, _Nothing]
    if len(classes) == 1:
        return set()
    named = _named({cls.__name__ for cls in classes})
    others = [sys.getrefcount(cls) - named[id(cls)] - _own_references(cls) for cls in classes]
    return {cls for cls, count in zip(classes, others) if count == others[-1]}


def _named(names: set[str]) -> Counter[int]:
    """How many modules have it in a global of one of these ``names``, by the ``id`` of what they have there."""
    # Some have several names; `isinstance` would ask a proxy.
    modules = {id(m): m for name, m in list(sys.modules.items())
               if not name.startswith(_UNAWARE) and issubclass(type(m), ModuleType)}  # fmt: skip
    spaces = [_namespace(module) for module in modules.values()]
    return Counter([id(space.get(name)) for space in spaces for name in space.keys() & names])


def _own_references(cls: type) -> int:
    """How often ``cls`` is referred to by classes below it and, as ``__class__``, by its methods."""
    below = _family(cls)[1:]
    count = sum((c.__base__ is cls) + c.__bases__.count(cls) + c.__mro__.count(cls) for c in below)
    methods = [f for f in (getattr(f, "__func__", f) for f in vars(cls).values()) if isinstance(f, FunctionType)]
    cells = {id(cell): cell for method in methods for cell in method.__closure__ or ()}
    return count + sum(_holds(cell, cls) for cell in cells.values())


def _holds(cell: Any, cls: type) -> bool:
    try:
        return cell.cell_contents is cls
    except ValueError:  # nothing is in it yet
        return False


def _walk(kinds: set[type]) -> _Found:
    classes = {cls for kind in kinds for cls in _family(kind)}
    found: _Found = {cls: [] for cls in classes}
    for thing in gc.get_referrers(*classes):
        if type(thing) in found:  # not __class__: a proxy would call the object behind it
            found[type(thing)].append(thing)
    return found


def find_holders(thing: object, depth: int) -> list[Any]:
    """The modules of torch that refer to ``thing`` through at most ``depth`` dicts below their own ``__dict__``."""
    from torch.nn import Module

    found: list[Any] = []
    level: list[Any] = [thing]
    for _ in range(depth + 2):
        referrers = gc.get_referrers(*level) if level else []
        found += [holder for holder in referrers if isinstance(holder, Module)]
        level = [holder for holder in referrers if type(holder) is dict]
    return found
