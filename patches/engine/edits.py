"""The three kinds of change that a patch may declare.

An edit is a declaration: it says where and what. :mod:`patches.slots` knows how a place is read
and written, :mod:`patches.registry` when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union


@dataclass(frozen=True)
class Rewrite:
    """Replace syntax-tree nodes inside an installed function, by swapping its ``__code__``.

    The function stays the same object, so every alias, bound method, hooked module and compiled
    graph sees the change, a traceback still points at the right line of the right file, and undo
    is exact.

    Parameters
    ----------
    target:
        ``"package.module:Class.method"`` or ``"package.module:function"``. Static and class
        methods, properties (their getter) and functions under ``functools.wraps`` decorators are
        looked through. ``"package.module:fake(namespace::operator)"`` is the function that this
        module gave to ``torch.library.register_fake``, which has no name of its own.
    find:
        The expression or statements to replace, as source. Compared as a syntax tree: spacing,
        quotes and comments do not matter. Several statements match a run of neighbours.
    replace:
        What stands there instead; an empty string removes statements.
    count:
        How many times ``find`` must occur. Any other number is a conflict, never a guess.
    names:
        Globals that ``replace`` needs, put into the function's module while the edit is active
        and taken out with it: name (begin it with ``_patches_``) to object.
    signature:
        ``"**kwargs"``: added to the parameters of the function. With it ``find`` may be empty.
    when:
        PEP 508 requirements, joined by " and "; on other releases the edit is skipped.
    """

    target: str
    find: str = ""
    replace: str = ""
    count: int = 1
    names: Mapping[str, Any] = field(default_factory=dict)
    signature: str = ""
    when: str = ""


@dataclass(frozen=True)
class SetAttribute:
    """Set one attribute of a class or module, through the owner's own ``__dict__``.

    Give ``value``, or ``make``: called with the raw original (``None`` where there was none; a
    ``staticmethod`` comes as the ``staticmethod`` object) when the edit is applied, it returns the
    replacement. The replacement must be a plain Python object that Dynamo can follow, never a proxy.
    """

    target: str
    value: Any = None
    make: Callable[[Any], Any] | None = None
    when: str = ""


@dataclass(frozen=True)
class DeleteAttribute:
    """Delete one attribute of a class or module. Absent already is fine if ``missing_ok``."""

    target: str
    missing_ok: bool = False
    when: str = ""


Edit = Union[Rewrite, SetAttribute, DeleteAttribute]


def module_of(edit: Edit) -> str:
    """The module that must be imported before ``edit`` can be applied."""
    return edit.target.partition(":")[0]
