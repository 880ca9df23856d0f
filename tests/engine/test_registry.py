"""apply, revert, applied, report: idempotent, atomic, exact, and honest about others' changes."""

from __future__ import annotations

import functools
import sys
import threading

import pytest

from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute
from patches.engine.report import Status
from patches.engine.registry import PatchError, Registry
from tests.engine.conftest import patch


def snapshot(module) -> dict:
    """The raw objects of a module and its classes, and each function's code, by identity."""
    taken = {}
    for name, value in vars(module).items():
        taken[name] = id(value)
        if isinstance(value, type):
            taken |= {f"{name}.{k}": id(v) for k, v in vars(value).items() if k != "__weakref__"}
        if hasattr(value, "__code__"):
            taken[f"{name}()"] = id(value.__code__)
    return taken


def test_apply_is_idempotent_and_revert_is_exact(toy, registry):
    before = snapshot(toy)
    r = registry(
        (Rewrite("toy:plain", "y * 2", "y * 3"),),
        (SetAttribute("toy:Base.new", 5), DeleteAttribute("toy:Base.who")),
        (
            SetAttribute(
                "toy:Base.static",
                original_contains="a - 1",
                make=lambda o: staticmethod(lambda ctx, a: o.__func__(ctx, a) * 2),
            ),
        ),
    )
    r.apply(strict=True)
    assert toy.Base.new == 5 and not hasattr(toy.Base, "who") and toy.Base.static(None, 5) == 8
    first = snapshot(toy)
    r.apply(strict=True)
    assert snapshot(toy) == first
    r.revert()
    assert snapshot(toy) == before
    assert {x.status for x in r.report()} == {Status.REVERTED}
    r.revert()
    assert snapshot(toy) == before


def test_patches_on_one_attribute_chain_and_one_can_be_taken_out_of_the_middle(toy, registry):
    def adds(letter):
        return (
            SetAttribute("toy:Base.who", original_contains="'base'", make=lambda old: lambda self: old(self) + letter),
        )

    original = vars(toy.Base)["who"]
    r = registry(adds("1"), adds("2"), adds("3"))
    r.apply("c"), r.apply("a"), r.apply("b")
    assert toy.Base().who() == "base123", "the order is the registry's, not that of the calls"
    r.revert("b")
    assert toy.Base().who() == "base13"
    r.revert()
    assert vars(toy.Base)["who"] is original


def test_a_patch_that_fails_half_way_is_undone_whole_and_the_next_goes_on(toy, registry, monkeypatch):
    class Meta(type):
        def __setattr__(cls, name, value):
            if value == "bad":
                raise RuntimeError("no")
            super().__setattr__(name, value)

    toy.Sealed = Meta("Sealed", (), {"x": 1})
    before = snapshot(toy)
    r = registry(
        (Rewrite("toy:plain", "y * 2", "y * 3"), SetAttribute("toy:Sealed.y", "bad")),
        (SetAttribute("toy:Base.made", original_contains="(cls, a)", make=lambda old: 1 / 0),),
        (Rewrite("toy:wrapped", "x + 1", "x + 2"),),
    )
    results = r.apply()
    assert [x.status for x in results] == [Status.FAILED, Status.FAILED, Status.APPLIED]
    assert "no" in results["a"].reason and "ZeroDivisionError" in results["b"].reason
    assert toy.plain(5) == 12
    with pytest.raises(PatchError, match="a: failed.*b: failed"):
        r.apply(strict=True)
    r.revert()
    assert snapshot(toy) == before


def test_a_third_party_that_wraps_the_name_after_us_survives_our_revert(toy, registry):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r.apply(strict=True)
    ours = toy.plain
    toy.plain = lambda x: -ours(x)
    assert toy.plain(5) == -18
    r.revert()
    assert toy.plain(5) == -12


def test_an_attribute_changed_after_us_is_left_alone_and_reported(toy, registry):
    r = registry((SetAttribute("toy:Base.new", 1), Rewrite("toy:plain", "y * 2", "y * 3")))
    r.apply(strict=True)
    toy.Base.new = 2
    assert r.report()["a"].status is Status.SHADOWED
    result = r.revert()["a"]
    assert result.status is Status.SHADOWED and "toy:Base.new" in result.reason
    assert toy.Base.new == 2
    assert toy.plain(5) == 12, "what was still ours is reverted"


def test_a_code_object_replaced_after_us_is_left_alone(toy, registry):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r.apply(strict=True)
    toy.plain.__code__ = (lambda x, *, k=1: "theirs").__code__
    assert r.revert()["a"].status is Status.SHADOWED
    assert toy.plain(5) == "theirs"


def _of_another_package(text: str, **names):
    """What ``text`` defines, as if it stood in a module of another package."""
    space = {"__name__": "others.fixes", **names}
    exec(text, space)
    return space["f"]


def test_a_function_that_another_package_put_there_before_us_is_left_and_named(toy, registry):
    toy.plain = theirs = _of_another_package("def f(x, *, k=1):\n    y = x * 2\n    return y * 2")
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    result = r.apply(strict=True)["a"]
    assert result.status is Status.SHADOWED
    assert result.reason == "toy:plain was replaced by a function of others.fixes; left as it is"
    assert toy.plain is theirs and theirs(1) == 4
    r.revert()
    assert toy.plain is theirs


@pytest.mark.parametrize("gone", [False, True])
def test_a_function_that_is_replaced_after_us_is_reported_and_ours_is_reverted(toy, registry, gone):
    ours, code = toy.plain, toy.plain.__code__
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r.apply(strict=True)
    if gone:
        del toy.plain
    else:
        toy.plain = _of_another_package("def f(x, *, k=1):\n    return -x")
    result = r.report()["a"]
    assert result.status is Status.SHADOWED
    assert (
        result.reason
        == f"toy:plain {'was removed by another program after the patch was applied' if gone else 'is a function of others.fixes now'}"
    )
    r.revert()
    assert ours.__code__ is code and r.report()["a"].status is Status.REVERTED


def test_a_module_that_is_dropped_after_us_is_reported_and_reverted(toy, registry, monkeypatch):
    ours, code = toy.plain, toy.plain.__code__
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r.apply(strict=True)
    monkeypatch.delitem(sys.modules, "toy")
    assert r.report()["a"].reason == "toy:plain was removed by another program after the patch was applied"
    r.revert()
    assert ours.__code__ is code


@pytest.mark.parametrize("wraps", [False, True])
def test_a_function_that_calls_ours_does_not_hide_it(toy, registry, wraps):
    text = "def outer(ours):\n    def f(x):\n        return -ours(x)\n    return f\nf = outer(ours)"
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r.apply(strict=True)
    wrapper = _of_another_package(text, ours=toy.plain)
    toy.plain = functools.wraps(toy.plain)(wrapper) if wraps else wrapper
    assert toy.plain(5) == -18 and r.report()["a"].status is Status.APPLIED


def test_applied_is_a_context_manager_and_a_decorator_that_leaves_the_rest(toy, registry):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),), (Rewrite("toy:wrapped", "x + 1", "x + 2"),))
    r.apply("b")
    with r.applied() as report:
        assert {x.status for x in report} == {Status.APPLIED}
        assert toy.plain(5) == 18
    assert toy.plain(5) == 12 and toy.wrapped(1) == 3, "b was applied before and stays"

    @r.applied("a")
    def inside():
        return toy.plain(5)

    assert (inside(), toy.plain(5)) == (18, 12)


def test_an_unknown_id_names_the_nearest_and_changes_nothing(toy):
    r = Registry([patch("int8-offload", Rewrite("toy:plain", "y * 2", "y * 3"))])
    for verb in (r.apply, r.revert, r.report):
        with pytest.raises(KeyError, match="int8-offload"):
            verb("int8-offlaod")
    with pytest.raises(KeyError):
        r.apply("int8-offload", "nonsense")
    assert toy.plain(5) == 12


def test_ids_in_a_list_are_told_how_they_are_given(toy):
    r = Registry([patch("int8-offload", Rewrite("toy:plain", "y * 2", "y * 3"))])
    for verb in (r.apply, r.revert, r.report):
        with pytest.raises(TypeError, match=r"one per argument, got \['int8-offload'\]"):
            verb(["int8-offload"])
    assert toy.plain(5) == 12


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        ({"requires": ("no-such-package>=1",)}, Status.NOT_INSTALLED, "no-such-package is not installed"),
        ({"requires": ("packaging<1",)}, Status.NOT_AFFECTED, "is outside <1"),
        ({"tested_up_to": "1.0"}, Status.UNTESTED, "is newer than 1.0"),
    ],
)
def test_the_gate_says_why(toy, registry, options, status, why):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),), **options)
    result = r.apply()["a"]
    assert result.status is status and why in result.reason
    assert toy.plain(5) == 12
    if status is Status.UNTESTED:
        assert "untested=True" in result.reason
        assert r.apply(untested=True)["a"].status is Status.APPLIED


def test_disabled(toy, registry):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),))
    r.disabled = frozenset({"a"})
    assert r.apply()["a"].status is Status.DISABLED
    assert toy.plain(5) == 12


def test_edits_for_other_releases_are_skipped(toy, registry):
    r = registry(
        (
            Rewrite("toy:plain", "y * 2", "y * 3", when="packaging>=1"),
            Rewrite("toy:plain", "y * 2", "y * 4", when="packaging<1"),
        )
    )
    r.apply(strict=True)
    assert toy.plain(5) == 18


def test_many_threads_at_once(toy, registry):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),), (Rewrite("toy:plain", "y > 3", "y > 4"),))
    errors = []

    def work():
        try:
            for _ in range(20):
                r.apply(strict=True)
                r.revert()
        except Exception as error:  # noqa: BLE001 - any failure in a thread must fail the test
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    r.revert()
    assert not errors and toy.plain(5) == 12


def test_report_is_plain_data(toy, registry):
    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),), damage=lambda: ("one layer was damaged",))
    report = r.apply()
    row = report.to_dict()["results"][0]
    assert row["status"] == "applied" and row["changes"][0]["target"] == "toy:plain"
    assert row["notes"] == ["one layer was damaged"]
    assert "one layer was damaged" in str(report) and '"applied"' in report.to_json()


def test_two_patches_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two patches are named a"):
        Registry([patch("a"), patch("a")])


def test_compiled_code_is_forgotten_after_apply_and_revert(write_module):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from patches.process import compiled_code

    source = "import torch\nclass Twice(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    write_module("layer", source)
    import layer

    r = Registry([patch("a", Rewrite("layer:Twice.forward", "x * 2", "x * 3"))], compiled_code.forget_compiled_code)
    model = torch.nn.Sequential(torch.nn.Identity(), layer.Twice())  # inlined, and so not guarded on its code
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(1)
    assert compiled(x).item() == 2
    assert any("torch.compiler.reset" in note for note in r.apply(strict=True).notes)
    assert compiled(x).item() == 3
    r.revert()
    assert compiled(x).item() == 2
