"""An error at any step leaves the process as before or as after: a sample of :mod:`.torture`, and all of it on toys."""

from __future__ import annotations

import contextlib
import os
import random
import sys

import pytest

from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute
from tests.engine.torture import Start, Subject, count, everything, torture

pytestmark = pytest.mark.check("a minute; test_transaction.py interrupts a write at each of its steps")


@pytest.fixture
def toys(toy, registry) -> Subject:
    """A registry with every kind of edit, two patches on one function, one on a generator, and one that looks for damage."""
    return Subject(
        registry(
            (
                Rewrite("toy:plain", "y * 2", "_patches_twice(y)", names={"_patches_twice": lambda y: y * 4}),
                SetAttribute("toy:Base.new", 5),
            ),
            (Rewrite("toy:plain", "y > 3", "y > 4"), DeleteAttribute("toy:Base.made")),
            (Rewrite("toy:counted", "x + 1", "_patches_next(x)", names={"_patches_next": lambda x: x + 2}),),
            (SetAttribute("toy:Base.who", original_contains="'base'", make=lambda old: lambda self: old(self) + "!"),),
            damage=lambda: ("something",),
        )
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("start", Start)
def test_every_return_on_toys(toys, verb, start, bytecode_is_written):
    total = count(toys, verb, start=start)
    reached = torture(toys, verb, iter(range(1, total + 1)), start=start)
    assert reached > 0.8 * total, "what is caught on the way is rare"
    assert os.listdir(toys.kept.parent) in ([], [toys.kept.name]), "no draft is left"


@pytest.mark.parametrize("step", [151, pytest.param(7, marks=pytest.mark.release("every 151st bytecode"))])
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_bytecodes_on_toys(toys, verb, step):
    """At every ``step``-th of them; both are prime, so that no loop is always met at the same place."""
    total = count(toys, verb, fine=True)
    if not total and sys.version_info[:2] == (3, 12):
        pytest.skip("the first releases of Python 3.12 tell a tracer of no bytecode")
    assert torture(toys, verb, iter(range(1, total + 1, step)), fine=True)


@pytest.fixture(scope="module")
def whole() -> Subject:
    pytest.importorskip("torch", reason="what the patches are for cannot be imported without torch")
    return everything()


@pytest.mark.parametrize(
    ("verb", "fine", "start"),
    [("apply", False, Start.WARM), ("apply", True, Start.WARM), ("apply", False, Start.KEPT), ("apply", False, Start.COLD),
     ("revert", False, Start.WARM), ("revert", True, Start.WARM)],
    ids=["apply", "apply-bytecodes", "apply-kept", "apply-cold", "revert", "revert-bytecodes"],
)  # fmt: skip
@pytest.mark.parametrize("size", [2, pytest.param(12, marks=pytest.mark.release("a sample of two"))])
def test_a_sample_of_steps_on_the_whole_registry(whole, verb, fine, start, size, bytecode_is_written):
    total = count(whole, verb, fine, start)
    steps = sorted(random.Random(f"{verb}{fine}{start}").sample(range(1, total + 1), size))
    assert torture(whole, verb, iter(steps), fine, start)
    assert os.listdir(whole.kept.parent) in ([], [whole.kept.name]), "no draft is left"


def test_an_interrupt_while_damage_is_looked_for_does_not_lose_what_is_found(toy, registry):
    calls = []

    def damage():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return ("one layer",)

    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"),), damage=damage)
    with pytest.raises(KeyboardInterrupt):
        r.apply()
    assert toy.plain(5) == 18, "it is in"
    assert r.apply()["a"].notes == ("one layer",)
    r.apply()
    assert len(calls) == 2


def test_what_is_alive_is_surveyed_before_a_change_and_damage_looked_for_after_it(toy):
    seen = []

    @contextlib.contextmanager
    def damage_scan():
        seen.append(("damage_scan", toy.plain(5)))
        yield
        seen.append("end")

    from patches.engine.registry import Registry
    from tests.engine.conftest import patch

    one = patch("a", Rewrite("toy:plain", "y * 2", "y * 3"), damage=lambda: seen.append(("damage", toy.plain(5))) or ())
    r = Registry([one], damage_scan=damage_scan)
    r.apply()
    assert seen[0] == ("damage_scan", 12) and ("damage", 18) in seen and seen[-1] == "end"
    assert seen.count(("damage", 18)) == 1
    r.revert()


def test_nothing_is_surveyed_for_patches_that_ask_for_no_damage(toy):
    from patches.engine.registry import Registry
    from tests.engine.conftest import patch

    r = Registry([patch("a", Rewrite("toy:plain", "y * 2", "y * 3"))], damage_scan=lambda: pytest.fail("it takes time"))
    r.apply()
    r.revert()


def test_an_interrupt_while_the_compiler_is_reset_does_not_lose_the_reset(toy):
    from patches.engine.registry import Registry
    from tests.engine.conftest import patch

    calls = []

    def forget():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return "forgotten"

    r = Registry([patch("a", Rewrite("toy:plain", "y * 2", "y * 3"))], forget)
    with pytest.raises(KeyboardInterrupt):
        r.apply()
    assert r.apply().notes == ("forgotten",) and len(calls) == 2
    r.apply()
    assert len(calls) == 2, "nothing was changed since"


def test_what_cannot_be_forgotten_now_is_tried_again_and_told(toy):
    from patches.engine.registry import Registry
    from tests.engine.conftest import patch

    answers = [None, "forgotten"]
    r = Registry([patch("a", Rewrite("toy:plain", "y * 2", "y * 3"))], lambda: answers.pop(0))
    assert "still run the old code" in r.apply().notes[0]
    assert r.apply().notes == ("forgotten",)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_compiler_that_cannot_be_reset_is_a_note(toy, error):
    from patches.engine.registry import Registry
    from tests.engine.conftest import patch

    def forget():
        raise error("no")

    r = Registry([patch("a", Rewrite("toy:plain", "y * 2", "y * 3"))], forget)
    assert f"{error.__name__}: no" in r.apply(strict=True).notes[0]
