"""Functions that wrapt has wrapped: OpenTelemetry, Datadog and MLflow wrap the libraries that we patch."""

from __future__ import annotations

import contextlib
import importlib
import sys
from unittest import mock

import pytest

from patches.engine import imports
from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute
from patches.engine.report import Status
from patches.engine.targets import unwrapped

wrapt = pytest.importorskip("wrapt", reason="the wrappers are wrapt's")


class Counter:
    """A wrapper that counts the calls through it, and notes the instance of each."""

    def __init__(self):
        self.instances = []

    def __call__(self, wrapped, instance, args, kwargs):
        self.instances.append(instance)
        return wrapped(*args, **kwargs)

    @property
    def calls(self) -> int:
        return len(self.instances)


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


def wrap(toy, edit: Rewrite, counter: Counter):
    return wrapt.wrap_function_wrapper(toy, edit.target.partition(":")[2], counter)


def unwrap(toy, edit: Rewrite, wrapper) -> None:
    owner, name = holder(toy, edit)
    assert vars(owner)[name] is wrapper, "it stands where wrapt put it"
    setattr(owner, name, wrapper.__wrapped__)


def holder(toy, edit):
    *outer, name = edit.target.partition(":")[2].split(".")
    for each in outer:
        toy = getattr(toy, each)
    return toy, name


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


# -- edits of attributes ------------------------------------------------------------------------------


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


# -- import hooks -----------------------------------------------------------------------------------------

BODY = "def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self):\n        return 1\n"


@pytest.fixture
def finders(monkeypatch):
    """The finders as they are without wrapt's, which it adds once in a process; afterwards as they were."""
    before = list(sys.meta_path)
    monkeypatch.setattr(wrapt.importer, "_post_import_hooks_init", False)
    sys.meta_path[:] = [finder for finder in before if not isinstance(finder, wrapt.importer.ImportHookFinder)]
    yield
    sys.meta_path[:] = before


@pytest.mark.parametrize("front", ["theirs", "ours"])
@pytest.mark.parametrize("register", ["when_imported", "register_post_import_hook", "wrap_function_wrapper"])
@pytest.mark.parametrize("ours_first", [False, True], ids=["theirs, ours", "ours, theirs"])
@pytest.mark.parametrize("name", ["traced", "traced.sub"])
def test_import_hooks_of_both_run_once_in_either_order(
    write_module, registry, finders, name, ours_first, register, front
):
    """An instrumentation registers before or after us, and either finder may be asked first."""
    name = f"{name.replace('traced', f'traced_{register}_{front}_{ours_first}')}"
    package = name.partition(".")[0]
    if "." in name:
        write_module(f"{package}.__init__", f"from . import sub\n{BODY}")
    write_module(name, BODY)
    r = registry((Rewrite(f"{name}:f", "x + 1", "x + 2"), Rewrite(f"{name}:A.g", "1", "2")))
    counter, told = Counter(), []

    def hook(module):
        told.append(module.__name__)
        for path in ("f", "A.g"):
            wrapt.wrap_function_wrapper(module, path, counter)

    def theirs():
        if register == "wrap_function_wrapper":  # wrapt's own lazy form
            told.append(name)
            for path in ("f", "A.g"):
                wrapt.wrap_function_wrapper(f"{name}?", path, counter)
        else:
            wrapt.when_imported(name)(hook) if register == "when_imported" else wrapt.register_post_import_hook(
                hook, name
            )

    steps = [r.apply, theirs] if ours_first else [theirs, r.apply]
    for step in steps:
        step()
    kind = {"ours": imports._Finder, "theirs": wrapt.importer.ImportHookFinder}[front]
    sys.meta_path.sort(key=lambda finder: not isinstance(finder, kind))
    module = importlib.import_module(name)
    assert told == [name]
    assert module.f(1) == 3 and module.A().g() == 2 and counter.calls == 2
    assert type(module.f) is wrapt.FunctionWrapper and r.report()["a"].status is Status.APPLIED
    r.revert()
    assert module.f(1) == 2 and module.A().g() == 1 and counter.calls == 4
