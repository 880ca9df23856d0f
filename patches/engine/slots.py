"""Places that edits change: how each is found, read, built anew and written.

There are three kinds: the code object of a function, an entry in the ``__dict__`` of a class or module, and a
global that rewritten code needs, which is such an entry with a life of its own. All hold *raw* values, so that
the former object itself is put back. A slot writes nothing: it says which step would. It holds its place
weakly: an object that no other code holds needs no restoring.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol
from weakref import ref

from . import function_source, match, render, targets
from .compiler import Compiler
from .edits import DeleteAttribute, Edit, Rewrite, SetAttribute
from .function_source import Conflict, Replaced
from .state import State
from .targets import ABSENT
from .transaction import Step

UNCHANGED = State()
"""Nothing of ours is in."""


class Slot(Protocol):
    """One place."""

    key: Hashable
    """Two slots with the same key are the same place."""
    name: str
    """The target that it was found by."""
    write_order: int
    """Where in a change it is written: names before the attributes and code that use them."""

    @property
    def alive(self) -> bool:
        """Tell whether the place is still there."""

    def held(self) -> Any:
        """Return the object that the place is in, for code that needs it to stay; None if it is gone."""

    def read(self) -> Any:
        """Return the value that stands there now."""

    def build(self, original: Any, edits: Sequence[Any], compiler: Compiler, state: State = UNCHANGED) -> Any:
        """Make the ``edits`` of ``original``, and write nothing; ``state``: our changes until now. May raise ``Conflict``."""

    def step(self, before: Any, after: Any) -> Step | None:
        """Return the step that puts ``after`` there, where ``before`` stands now; None if the place is gone."""

    def diff(self, original: Any, edits: Sequence[Any]) -> str:
        """Show the ``edits`` of ``original`` as a unified diff."""

    def displaced(self) -> str:
        """Say who put something else where the place was to be found; empty if no other code did."""


class CodeSlot:
    """The ``__code__`` of a function."""

    write_order = 2

    def __init__(self, function: FunctionType, edit: Rewrite) -> None:
        self.held = ref(function)
        self.name = edit.target
        self.key: Hashable = ("code", id(function))
        self._edit = edit

    @property
    def alive(self) -> bool:
        return self.held() is not None

    def read(self) -> CodeType | None:
        function = self.held()
        return None if function is None else function.__code__

    def build(
        self, original: CodeType, edits: Sequence[Rewrite], compiler: Compiler, state: State = UNCHANGED
    ) -> CodeType:
        return compiler.rewritten(self._function(), original, edits)

    def step(self, before: CodeType, after: CodeType) -> Step | None:
        function = self.held()
        if function is None:
            return None
        return Step(self, *(partial(setattr, function, "__code__", code) for code in (after, before)))

    def diff(self, original: CodeType, edits: Sequence[Rewrite]) -> str:
        return render.of_code(function_source.read_source(self._function(), original), edits)

    def displaced(self) -> str:
        return targets.displaced(self._edit, self._function())

    def _function(self) -> FunctionType:
        function = self.held()
        if function is None:
            raise Conflict(f"{self.name}: the function is gone")
        return function


class _Entry:
    """One entry in the ``__dict__`` of a class or module."""

    def __init__(self, holder: Any, attribute: str, name: str) -> None:
        self.held = ref(holder)
        self.attribute = attribute
        self.name = name

    @property
    def alive(self) -> bool:
        return self.held() is not None

    def read(self) -> Any:
        holder = self.held()
        return ABSENT if holder is None else vars(holder).get(self.attribute, ABSENT)

    def step(self, before: Any, after: Any) -> Step | None:
        holder = self.held()
        return None if holder is None else Step(self, *(self._put(holder, value) for value in (after, before)))

    def _put(self, holder: Any, value: Any) -> partial[Any]:
        if value is ABSENT:
            return partial(delattr, holder, self.attribute)
        return partial(setattr, holder, self.attribute, value)


class AttributeSlot(_Entry):
    """An attribute that edits set or delete."""

    write_order = 1

    def __init__(self, holder: Any, attribute: str, name: str) -> None:
        super().__init__(holder, attribute, name)
        self.key: Hashable = ("attribute", id(holder), attribute)

    def build(
        self,
        original: Any,
        edits: Sequence[SetAttribute | DeleteAttribute],
        compiler: Compiler,
        state: State = UNCHANGED,
    ) -> Any:
        for edit in edits:
            _check_original(original, edit, compiler, state)
        return functools.reduce(_edited, edits, original)

    def diff(self, original: Any, edits: Sequence[SetAttribute | DeleteAttribute]) -> str:
        edited = functools.reduce(_edited, edits, original)
        before, after = ([] if value is ABSENT else [value] for value in (original, edited))
        return render.of_attribute(self.name, before, after)

    def displaced(self) -> str:
        try:
            holder, _ = targets.holder_of(self.name)
        except Conflict:
            return f"{self.name} was removed by another program after the patch was applied"
        return "" if holder is self.held() else f"{self.name} is an attribute of another class now"


class NameSlot(_Entry):
    """A global that rewritten code needs. It stays while such code is alive anywhere, see :mod:`.frames`."""

    write_order = 0

    def __init__(self, module: ModuleType, name: str) -> None:
        super().__init__(module, name, f"{module.__name__}:{name}")
        self.key: Hashable = ("name", id(module), name)

    def build(self, original: Any, edits: Sequence[Rewrite], compiler: Compiler, state: State = UNCHANGED) -> Any:
        first, *others = (edit.names[self.attribute] for edit in edits)
        if original is not ABSENT:
            raise Replaced(f"{self.name} exists already, and another program put it there")
        if any(other is not first for other in others):
            raise Conflict(f"two patches give the name {self.name} to different helpers")
        return first

    def diff(self, original: Any, edits: Sequence[Rewrite]) -> str:
        return render.of_attribute(self.name, [], [self.build(original, edits, Compiler())])

    def displaced(self) -> str:
        return ""  # its users hold the module


def _edited(value: Any, edit: SetAttribute | DeleteAttribute) -> Any:
    if isinstance(edit, DeleteAttribute):
        return ABSENT
    if edit.keep and value is not ABSENT:
        return value
    return edit.value if edit.make is None else edit.make(None if value is ABSENT else value)


def _check_original(value: Any, edit: SetAttribute | DeleteAttribute, compiler: Compiler, state: State) -> None:
    """Refuse an original other than the one that ``edit`` was made for."""
    if isinstance(edit, DeleteAttribute):
        if value is ABSENT and not edit.missing_ok:
            raise Conflict(f"{edit.target} does not exist, so it cannot be deleted")
        if _is_function(value):
            _check_home(value, edit.target)
        return
    if value is not ABSENT:
        _check_home(value, edit.target)
    if edit.original_contains and not (value is ABSENT and edit.missing_ok):
        function = targets.unwrapped(value, edit.target)
        if not compiler.holds(function, state.original_code(function), edit.original_contains):
            raise Conflict(f"{edit.target}: {match.brief(edit.original_contains)} does not occur in it")
    elif value is not ABSENT and not edit.keep:
        if wrapper := targets.wrapper_of_others(value, edit.target):  # around an inherited function, say
            raise Replaced(f"another program has put a {wrapper} at {edit.target}")
        raise Conflict(f"{edit.target} already exists in the package")


def _check_home(value: Any, target: str) -> None:
    """Refuse what someone else has put in the place of ``target``."""
    if not _is_function(value):  # nothing tells where it comes from
        raise Replaced(f"another program has put a {type(value).__name__} at {target}")
    function = targets.unwrapped(value, target)
    if not targets.is_of(function, target):
        raise Replaced(f"{target} was replaced by a function of {targets.home(function)}")


def _is_function(value: Any) -> bool:
    try:
        targets.unwrapped(value, "")
    except Conflict:
        return False
    return True


def slots_of(edit: Edit, state: State = UNCHANGED) -> list[tuple[Slot, Edit]]:
    """Return the places that ``edit`` changes, each with the edit to make there; ``state``: our changes until now.

    The module of the edit must be imported. Raises ``Conflict`` if the target is not in it, and its subclass ``Replaced``
    if a function of another package stands there.
    """
    if not isinstance(edit, Rewrite):
        return [(AttributeSlot(*targets.holder_of(edit.target, state.libraries), edit.target), edit)]
    function = targets.function_of(edit, state.original_attribute, state.libraries)
    slots: list[tuple[Slot, Edit]] = []
    if edit.names:
        module = targets.module_of(function, edit.target, state.libraries)
        slots += [(NameSlot(module, name), edit) for name in edit.names]
    return [*slots, (CodeSlot(function, edit), edit)]
