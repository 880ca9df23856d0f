"""Code of ours that others keep goes on working after revert; what nobody keeps leaves nothing behind."""

from __future__ import annotations

import gc
import importlib
import sys
import types

import pytest

from patches.engine.edits import Rewrite, SetAttribute
from patches.engine.report import Status

NAME = "_patches_tenfold"
EDIT = Rewrite("toy:plain", "y * 2", f"{NAME}(y)", names={NAME: lambda y: y * 10})


def copied(function: types.FunctionType) -> types.FunctionType:
    """As ``transformers.utils.generic.copy_func`` does."""
    copy = types.FunctionType(function.__code__, function.__globals__, "copy", function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def test_a_copy_of_a_patched_function(toy, registry):
    r = registry((EDIT,))
    r.apply(strict=True)
    mine = copied(toy.plain)
    report = r.revert()
    assert (mine(3), toy.plain(3)) == (40, 8) and report["a"].status is Status.REVERTED
    (note,) = report.notes
    assert NAME in note and "toy.plain" in note, "the report names the function and what stays"
    r.apply(strict=True)
    assert mine(3) == toy.plain(3) == 40
    r.revert()
    del mine
    assert not r.report().notes and NAME not in vars(toy)


def from_parts(code: types.CodeType) -> types.CodeType:
    """Made anew, with one more constant and one more name, as editors of bytecode do."""
    newer = sys.version_info >= (3, 11)
    return types.CodeType(
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_nlocals, code.co_stacksize,
        code.co_flags, code.co_code, (*code.co_consts, "mine"), (*code.co_names, "more"), code.co_varnames,
        code.co_filename, "mine", *([code.co_qualname] if newer else []), code.co_firstlineno, code.co_linetable,
        *([code.co_exceptiontable] if newer else []), code.co_freevars, code.co_cellvars,
    )  # fmt: skip


MADE = {
    "renamed": lambda code: code.replace(co_name="mine"),
    "from its parts": from_parts,
    "made twice": lambda code: code.replace(co_name="mine").replace(co_firstlineno=code.co_firstlineno + 1),
}


@pytest.mark.parametrize("how", MADE)
def test_a_copy_with_code_that_a_debugger_made_of_ours(how, toy, registry):
    r = registry((EDIT,))
    r.apply(strict=True)
    mine = copied(toy.plain)
    mine.__code__ = MADE[how](toy.plain.__code__)
    report = r.revert()
    assert (mine(3), toy.plain(3)) == (40, 8)
    (note,) = report.notes
    assert NAME in note and "toy.plain" in note
    del mine
    assert not r.report().notes and NAME not in vars(toy)


def test_code_that_a_tool_made_of_ours_and_that_is_in_no_function(toy, registry):
    r = registry((EDIT,))
    r.apply(strict=True)
    code = toy.plain.__code__.replace(co_name="mine")
    r.revert()
    assert types.FunctionType(code, vars(toy), "mine", None)(3, k=1) == 40
    del code
    assert not r.report().notes and NAME not in vars(toy)


def test_a_function_inside_of_ours_with_code_that_was_replaced(registry, write_module):
    """The inner function looks the name up, and outlives the call; its code is made of ours."""
    write_module("closing", "def outer(x):\n    def inner(y):\n        return x + y\n    return inner\n")
    module = importlib.import_module("closing")
    r = registry((Rewrite("closing:outer", "x + y", f"{NAME}(x + y)", names={NAME: lambda y: y * 10}),))
    r.apply(strict=True)
    inner = module.outer(1)
    inner.__code__ = inner.__code__.replace(co_name="mine")
    r.revert()
    assert inner(2) == 30
    del inner
    assert not r.report().notes and NAME not in vars(module)


def test_a_function_inside_of_ours_after_more_than_one_revert(registry, write_module):
    """A hook that a patched method has registered, while the patches are taken out and put in again."""
    write_module("hooking", "def outer(x):\n    def inner(y):\n        return x + y\n    return inner\n")
    module = importlib.import_module("hooking")
    r = registry((Rewrite("hooking:outer", "x + y", f"{NAME}(x + y)", names={NAME: lambda y: y * 10}),))
    r.apply(strict=True)
    inner = module.outer(1)
    for _ in range(3):
        r.revert()
        assert inner(2) == 30 and module.outer(1)(2) == 3
        r.apply(strict=True)
        assert inner(2) == module.outer(1)(2) == 30
    r.revert()
    del inner
    assert not r.report().notes and NAME not in vars(module)


def test_a_tool_that_puts_back_the_code_that_it_found(toy, registry):
    """A tracer that swaps the code for a while; where it keeps ours, gc cannot see it."""
    r = registry((EDIT,))
    r.apply(strict=True)
    kept = (toy.plain.__code__,)

    def traced(x, *, k=1):
        return -1

    toy.plain.__code__ = traced.__code__
    assert r.revert()["a"].status is Status.SHADOWED
    toy.plain.__code__ = kept[0]
    del kept
    assert toy.plain(3) == 40
    assert r.report()["a"].status is Status.APPLIED, "it is there again"
    assert r.revert()["a"].status is Status.REVERTED
    assert toy.plain(3) == 8 and NAME not in vars(toy)


def test_a_tool_that_makes_code_of_its_own_from_ours(toy, registry):
    """line_profiler: ``f.__code__ = f.__code__.replace(...)``."""
    r = registry((EDIT,))
    r.apply(strict=True)
    toy.plain.__code__ = toy.plain.__code__.replace(co_name="profiled")
    report = r.revert()
    assert toy.plain(3) == 40 and report["a"].status is Status.SHADOWED
    assert any(NAME in note for note in report.notes)


def test_a_closure_made_before_another_patch_changed_the_function_again(toy, registry):
    first = Rewrite("toy:outer", "x + q", f"{NAME}(x + q)", names=dict(EDIT.names))
    r = registry(
        (first,), (Rewrite("toy:outer", "return inner", "return (inner)"), Rewrite("toy:plain", "y > 3", "y > 4"))
    )
    r.apply("a", strict=True)
    made = toy.outer(0)
    r.apply("b", strict=True)
    r.revert()
    assert made(4) == 40 and NAME in vars(toy)
    del made
    gc.collect()
    r.report()
    assert NAME not in vars(toy)


@pytest.mark.parametrize("holder", ["subclass", "closure", "generator", "stack"])
def test_wherever_it_lives(toy, registry, holder):
    edits = [EDIT, Rewrite("toy:counted", "x + 1", f"{NAME}(x)", names=dict(EDIT.names)),
             Rewrite("toy:outer", "x + q", f"{NAME}(x + q)", names=dict(EDIT.names))]  # fmt: skip
    r = registry(edits)
    r.apply(strict=True)
    if holder == "subclass":
        call = type("Mine", (), {"plain": staticmethod(copied(toy.plain))}).plain
    elif holder == "closure":
        made = toy.outer(0)
        call = lambda x: made(x + 1)  # noqa: E731
    elif holder == "generator":
        counting = toy.counted(4)
        next(counting)
        call = lambda x: next(counting)  # noqa: E731
    else:
        toy.hook = lambda: r.revert()
        stacked = Rewrite("toy:plain", "k = 0", "hook() and None; y = " + f"{NAME}(4)", names=dict(EDIT.names))
        s = registry((EDIT, stacked))
        r.revert()
        s.apply(strict=True)
        toy.hook = lambda: s.revert()
        assert toy.plain(3) == 40 and toy.plain(3) == 8, "it was reverted while it ran"
        s.report()
        assert NAME not in vars(toy)
        return
    r.revert()
    assert call(3) == 40 and NAME in vars(toy)
    del call
    counting = made = None
    gc.collect()
    r.report()
    assert NAME not in vars(toy)


def test_cycles_of_importing_anew_leave_nothing_behind(write_module, registry):
    name = write_module("again", "def f(x):\n    return x + 1\n\n\nclass C:\n    def m(self):\n        return 1\n")
    edit = Rewrite("again:f", "x + 1", "_patches_n(x)", names={"_patches_n": lambda x: x + 5})
    r = registry((edit, Rewrite("again:C.m", "1", "2")))

    def once() -> None:
        sys.modules.pop(name, None)
        module = importlib.import_module(name)
        r.apply(strict=True)
        assert module.f(1) == 6 and module.C().m() == 2

    def size() -> tuple[int, ...]:
        gc.collect()
        r.report()
        state = r._store.read()
        return len(state.slots), len(state.retired), len(r._builder._built), len(gc.get_objects())

    for _ in range(3):
        once()
    before = size()
    for _ in range(20):
        once()
    after = size()
    assert after[:3] == before[:3] and after[3] - before[3] < 100
    r.revert()
    assert sys.modules[name].f(1) == 2 and not r._store.read().slots


def test_a_module_that_was_imported_anew_is_told(write_module, registry):
    name = write_module("anew", "def f(x):\n    return x + 1\n")
    r = registry((Rewrite("anew:f", "x + 1", "x + 2"),))
    importlib.import_module(name)
    r.apply(strict=True)
    sys.modules.pop(name)
    gc.collect()
    assert importlib.import_module(name).f(1) == 2
    result = r.report()["a"]
    assert result.status is Status.AVAILABLE and "call apply() again" in result.reason
    r.apply(strict=True)
    assert sys.modules[name].f(1) == 3
    r.revert()


def test_the_old_function_of_a_module_imported_anew_is_reverted_too(write_module, registry):
    name = write_module("kept", "def f(x):\n    return x + 1\n")
    r = registry((Rewrite("kept:f", "x + 1", "x + 2"),))
    old = importlib.import_module(name).f
    r.apply(strict=True)
    sys.modules.pop(name)
    new = importlib.import_module(name).f
    r.apply(strict=True)
    assert old(1) == new(1) == 3
    r.revert()
    assert old(1) == new(1) == 2


def test_a_set_attribute_that_is_made_is_made_once_while_it_is_in(toy, registry):
    made = []

    def make(original):
        made.append(original)
        return lambda self: "made"

    r = registry(
        (SetAttribute("toy:Base.who", original_contains="'base'", make=make),),
        (Rewrite("toy:plain", "y * 2", "y * 3"),),
    )
    r.apply(strict=True)
    r.apply(strict=True)
    r.revert("b")
    assert len(made) == 1 and toy.Base().who() == "made"
    r.revert()
