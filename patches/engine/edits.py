"""The three kinds of change that a patch may declare.

An edit is a declaration: it says where and what. :mod:`.slots` knows how a place is read and written,
:mod:`.registry` when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple


class Rewrite(NamedTuple):
    """Replace syntax-tree nodes inside an installed function, by swapping its ``__code__``.

    The function stays the same object, so every alias, bound method, hooked module and compiled
    graph sees the change, a traceback still points at the right line of the right file, and undo
    is exact. If several patches declare the same rewrite, it is made once, and stays until the last of them is reverted.

    Parameters
    ----------
    target:
        ``"package.module:Class.method"`` or ``"package.module:function"``. Static and class
        methods, properties (their getter) and functions under ``functools.wraps`` decorators are
        looked through.
    find:
        The expression or statements to replace, as source. Compared as a syntax tree: spacing,
        quotes and comments do not matter. Several statements match a run of neighbours.
    replace:
        What stands there instead; an empty string removes statements.
    count:
        How many times ``find`` must occur. Any other number is a conflict, never a guess.
    names:
        Globals that ``replace`` needs, put into the function's module before the code that uses
        them and taken out after it: name (begin it with ``_patches_``) to object.
    when:
        Requirements, joined by " and "; on other releases the edit is skipped.
    reach:
        Finds the function where no dotted name leads to it; raises ``LookupError`` with the reason
        if it is not there. ``target`` then only names it, in its module.
    decorator:
        With ``reach``: the decorator of that function, as source. It is found by it where only the file is read.
    """

    target: str
    find: str
    replace: str = ""
    count: int = 1  # type: ignore[assignment]  # a method of tuples, which is not called here
    names: Mapping[str, Any] = MappingProxyType({})
    when: str = ""
    reach: Callable[[], FunctionType] | None = None
    decorator: str = ""

    @classmethod
    def to_call(
        cls, target: str, find: str, function: Callable[..., Any], arguments: str, when: str = "", count: int = 1
    ) -> Rewrite:
        """Replace ``find`` by a call of ``function`` with ``arguments`` (source); the module gets it as ``_patches_<its name>``."""
        name = f"_patches_{function.__name__.lstrip('_')}"
        return cls(target, find, f"{name}({arguments})", count, {name: function}, when)


class SetAttribute(NamedTuple):
    """Set one attribute of a class or module, through the owner's own ``__dict__``.

    Give ``value``, or ``make``: called with the raw original (``None`` where there was none; a
    ``staticmethod`` comes as the ``staticmethod`` object) when the edit is planned, it returns the
    replacement and changes nothing. The replacement must be a plain Python object that Dynamo can
    follow, never a proxy. It calls a method as ``original.__get__(self)(...)``: another program may
    have put a wrapper there, which learns its instance only so.

    Parameters
    ----------
    original_contains:
        An expression or statement that the source of the original must contain; else the edit is a
        conflict. Without it the class or module must not have the attribute itself: inherited ones do
        not count, nor ones that an earlier patch of ours set.
    missing_ok:
        With ``original_contains``: it is no conflict if a release lacks the attribute.
    keep:
        Leave an attribute that the package already has (a later release, a source build) unchanged.
    when:
        Requirements, joined by " and "; on other releases the edit is skipped.
    """

    target: str
    value: Any = None
    make: Callable[[Any], Any] | None = None
    original_contains: str = ""
    missing_ok: bool = False
    keep: bool = False
    when: str = ""


class DeleteAttribute(NamedTuple):
    """Delete one attribute of a class or module. Absent already is fine if ``missing_ok``."""

    target: str
    missing_ok: bool = False
    when: str = ""


Edit = Rewrite | SetAttribute | DeleteAttribute


def module_of(edit: Edit) -> str:
    """Return the module that must be imported before ``edit`` can be applied."""
    return edit.target.partition(":")[0]
