"""Attributes that wrapt has wrapped, and that a patch sets or deletes; objects that pretend to be a function or a class."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest

from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute
from patches.engine.report import Status
from tests.engine.wrappers import Counter, unwrap, wrap

wrapt = pytest.importorskip("wrapt", reason="the wrappers are wrapt's")


def _louder(original):
    def who(self):
        return original.__get__(self)() + "!"

    return who


OVER = SetAttribute("toy:Base.who", original_contains="'base'", make=_louder)


def test_an_attribute_that_was_wrapped_before_is_called_with_its_instance_and_comes_back(toy, registry):
    counter = Counter()
    wrapper = wrap(toy, OVER, counter)
    r = registry((OVER,))
    assert r.apply(strict=True)["a"].status is Status.APPLIED
    base = toy.Base()
    assert base.who() == "base!" and counter.instances == [base]
    r.revert()
    assert vars(toy.Base)["who"] is wrapper and base.who() == "base"


def test_an_attribute_that_was_wrapped_after_is_shadowed_until_it_is_unwrapped(toy, registry):
    """Putting the original back would drop the wrapper, which is not ours. The repair works through it meanwhile."""
    raw, counter = vars(toy.Base)["who"], Counter()
    r = registry((OVER, Rewrite("toy:plain", "y * 2", "y * 3")))
    r.apply(strict=True)
    wrapper = wrap(toy, OVER, counter)
    assert r.report()["a"].status is Status.SHADOWED
    assert toy.Base().who() == "base!" and counter.calls == 1
    result = r.revert()["a"]
    assert result.status is Status.SHADOWED and "toy:Base.who was changed by another program" in result.reason
    assert vars(toy.Base)["who"] is wrapper and toy.plain(5) == 12
    unwrap(toy, OVER, wrapper)
    result = r.report()["a"]
    assert result.status is Status.AVAILABLE
    assert result.reason == (
        "toy:Base.who was not reverted with the rest, because another program had changed it; "
        "call revert() or apply() again"
    )
    r.revert()
    assert vars(toy.Base)["who"] is raw and r.report()["a"].status is Status.REVERTED


def test_an_attribute_that_was_unwrapped_before_the_revert(toy, registry):
    raw = vars(toy.Base)["who"]
    r = registry((OVER,))
    r.apply(strict=True)
    unwrap(toy, OVER, wrap(toy, OVER, Counter()))
    assert r.report()["a"].status is Status.APPLIED
    r.revert()
    assert vars(toy.Base)["who"] is raw


@pytest.mark.parametrize("unwrap_first", [False, True])
def test_a_new_attribute_that_is_wrapped_after_us(toy, registry, unwrap_first):
    edit = SetAttribute("toy:Base.new", lambda self: "new")
    r = registry((edit,))
    r.apply(strict=True)
    wrapper = wrap(toy, edit, Counter())
    assert r.report()["a"].status is Status.SHADOWED and toy.Base().new() == "new"
    if unwrap_first:
        unwrap(toy, edit, wrapper)
    else:
        r.revert()
        assert vars(toy.Base)["new"] is wrapper and toy.Base().new() == "new"
        unwrap(toy, edit, wrapper)
    r.revert()
    assert not hasattr(toy.Base, "new")


@pytest.mark.parametrize("inherits", [True, False], ids=["of the package", "of another"])
def test_a_wrapper_around_an_inherited_function_stays_and_is_named(toy, registry, inherits):
    """The class has the attribute only because wrapt has put it there; ours would hide it."""
    if not inherits:
        toy.Derived.__bases__ = (contextlib.ContextDecorator,)
    name = "static" if inherits else "_recreate_cm"
    edit = SetAttribute(f"toy:Derived.{name}", make=lambda old: lambda *a: None)
    wrapper = wrap(toy, edit, Counter())
    result = registry((edit,)).apply(strict=True)["a"]
    assert result.status is Status.SHADOWED and vars(toy.Derived)[name] is wrapper
    assert result.reason == (
        "another program has put a FunctionWrapper at toy:Derived.static; left as it is"
        if inherits
        else "toy:Derived._recreate_cm was replaced by a function of contextlib; left as it is"
    )


def test_a_wrapped_attribute_is_deleted_and_comes_back_wrapped(toy, registry):
    edit = DeleteAttribute("toy:Derived.who")
    wrapper = wrap(toy, edit, Counter())
    r = registry((edit,))
    r.apply(strict=True)
    assert toy.Derived().who() == "base"
    r.revert()
    assert vars(toy.Derived)["who"] is wrapper and toy.Derived().who() == "basederived"


# -- objects that pretend to be a function or a class ----------------------------------------------------


class Broken:
    @property
    def __wrapped__(self):
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("pretends", "why"),
    [
        (lambda f: mock.MagicMock(spec=f), "MagicMock is not a Python function"),
        (lambda f: mock.create_autospec(f, spec_set=True), ""),
        (lambda f: Broken(), "Broken hides its function: RuntimeError: not now"),
        (wrapt.WeakFunctionProxy, "is not a Python function"),
    ],
    ids=["mock", "autospec", "broken", "weak"],
)
def test_an_object_that_pretends_to_be_the_function_keeps_out_one_patch_and_not_all(toy, registry, pretends, why):
    kept, toy.plain = toy.plain, pretends(toy.plain)
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),), (Rewrite("toy:wrapped", "x + 1", "x + 2"),))
    report = r.apply()
    assert report["a"].status in (Status.CONFLICT, Status.SHADOWED) and why in report["a"].reason
    assert report["b"].status is Status.APPLIED and toy.wrapped(1) == 3
    toy.plain = kept
    assert r.apply()["a"].status is Status.APPLIED and toy.plain(5) == 18


def test_an_object_that_pretends_to_be_the_class(toy, registry):
    toy.Base = mock.MagicMock(spec=toy.Base)
    result = registry((Rewrite("toy:Base.who", "'base'", "'BASE'"),)).apply()["a"]
    assert result.status is Status.CONFLICT and "toy has no class Base" in result.reason
