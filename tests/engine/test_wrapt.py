"""Functions that wrapt has wrapped, and that a patch rewrites."""

from __future__ import annotations

import pytest

from patches.engine.edits import Rewrite, SetAttribute
from patches.engine.report import Status
from patches.engine.targets import unwrapped
from tests.engine.wrappers import Counter, holder, unwrap, wrap

wrapt = pytest.importorskip("wrapt", reason="the wrappers are wrapt's")


def raised(function, *args) -> str:
    with pytest.raises(ValueError) as error:
        function(*args)
    return str(error.value)


REWRITES = {
    "function": (Rewrite("toy:plain", "y * 2", "y * 3"), lambda toy: toy.plain(5), 12, 18),
    "functools.wraps": (Rewrite("toy:wrapped", "x + 1", "x + 2"), lambda toy: toy.wrapped(1), 2, 3),
    "closure": (Rewrite("toy:closure", "x + q", "x - q"), lambda toy: toy.closure(1), 11, -9),
    "generator": (Rewrite("toy:counted", "x + 1", "x + 2"), lambda toy: [*zip(toy.counted(1), "ab")][1][0], 2, 3),
    "method": (Rewrite("toy:Base.who", "'base'", "'BASE'"), lambda toy: toy.Base().who(), "base", "BASE"),
    "inherited method": (Rewrite("toy:Base.who", "'base'", "'BASE'"), lambda toy: toy.Derived().who(),
                         "basederived", "BASEderived"),
    "super": (Rewrite("toy:Derived.who", "'derived'", "'DERIVED'"), lambda toy: toy.Derived().who(),
              "basederived", "baseDERIVED"),
    "inner class": (Rewrite("toy:Derived.Inner.fail", "a + b", "a - b"),
                    lambda toy: raised(toy.Derived.Inner().fail, 1), "3", "-1"),
    "staticmethod": (Rewrite("toy:Base.static", "a - 1", "a - 2"), lambda toy: toy.Base.static(None, 1), 0, -1),
    "classmethod": (Rewrite("toy:Base.made", "cls, a", "a, 'made'"), lambda toy: toy.Base.made(1)[1], 1, "made"),
}  # fmt: skip
"""What is rewritten, a call, and what it returns without the patch and with it."""


@pytest.mark.parametrize("unwrap_first", [False, True], ids=["revert, unwrap", "unwrap, revert"])
@pytest.mark.parametrize("wrap_first", [False, True], ids=["apply, wrap", "wrap, apply"])
@pytest.mark.parametrize("kind", REWRITES)
def test_what_is_rewritten_under_a_wrapper(toy, registry, kind, wrap_first, unwrap_first):
    edit, call, without, repaired = REWRITES[kind]
    owner, name = holder(toy, edit)
    raw, counter = vars(owner)[name], Counter()
    function = unwrapped(raw, "")
    code = function.__code__
    r = registry((edit,))
    if wrap_first:
        wrapper = wrap(toy, edit, counter)
        assert r.apply(strict=True)["a"].status is Status.APPLIED
    else:
        r.apply(strict=True)
        wrapper = wrap(toy, edit, counter)
    assert call(toy) == repaired and counter.calls == 1
    assert r.report()["a"].status is Status.APPLIED and r.apply(strict=True)["a"].status is Status.APPLIED
    assert vars(owner)[name] is wrapper
    if unwrap_first:
        unwrap(toy, edit, wrapper)
        assert call(toy) == repaired and counter.calls == 1
        assert r.report()["a"].status is Status.APPLIED
        r.revert()
    else:
        r.revert()
        assert call(toy) == without and counter.calls == 2, "the wrapper stays, around the original"
        unwrap(toy, edit, wrapper)
    assert vars(owner)[name] is raw and function.__code__ is code and call(toy) == without
    assert r.report()["a"].status is Status.REVERTED


def _decorated(function):
    @wrapt.decorator
    def decorator(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    return decorator(function)


def _with_another_signature(function):
    @wrapt.decorator(adapter=lambda anything: None)
    def decorator(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    return decorator(function)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "around",
    [_decorated, _with_another_signature, lambda f: _decorated(_decorated(f)), wrapt.synchronized,
     wrapt.CallableObjectProxy, wrapt.PartialCallableObjectProxy,
     lambda f: wrapt.FunctionWrapper(f, Counter()).__get__(None, object)],
    ids=["decorator", "adapter", "twice", "synchronized", "proxy", "partial", "bound"],
)  # fmt: skip
def test_every_kind_of_wrapper_is_looked_through(toy, registry, around, when):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    if when == "after":
        r.apply()
    toy.plain = wrapper = around(toy.plain)
    assert r.apply(strict=True)["a"].status is Status.APPLIED and toy.plain(5) == 18
    r.revert()
    assert toy.plain is wrapper and toy.plain(5) == 12


def test_a_property_of_which_the_getter_is_wrapped(toy, registry):
    counter = Counter()
    toy.Base.size = kept = property(wrapt.FunctionWrapper(toy.Base.size.fget, counter))
    r = registry((Rewrite("toy:Base.size", "1", "2"),))
    r.apply(strict=True)
    assert toy.Base().size == 2 and counter.calls == 1
    r.revert()
    assert vars(toy.Base)["size"] is kept and toy.Base().size == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_under_a_wrapper_is_the_class(toy, registry, when):
    """The wrapper may be dropped: what is written in the class must not hang on it."""
    r = registry((Rewrite("toy:Base.who", "'base'", "'BASE'"), SetAttribute("toy:Base.new", 5)))
    cls, counter = toy.Base, Counter()
    if when == "after":
        r.apply(strict=True)
    toy.Base = wrapt.FunctionWrapper(cls, counter)
    assert r.apply(strict=True)["a"].status is Status.APPLIED
    assert toy.Base().who() == "BASE" and cls.new == 5 and counter.calls == 1
    toy.Base = cls
    assert r.report()["a"].status is Status.APPLIED
    r.revert()
    assert toy.Base().who() == "base" and not hasattr(cls, "new")
