"""One patch rewrites a function, another sets the attribute that holds it: in either order, in one call or in two."""

from __future__ import annotations

import functools

import pytest

from patches.engine.edits import Rewrite, SetAttribute
from patches.engine.report import Status
from tests.engine.test_registry import snapshot


def _louder(original):
    @functools.wraps(original)
    def who(self):
        return original(self) + "!"

    return who


def _plain(original):
    return lambda self: original(self) + "!"  # nothing says what it wraps


REWRITE = Rewrite("toy:Base.who", "'base'", "'BASE'")


@pytest.mark.parametrize("make", [_louder, _plain])
@pytest.mark.parametrize("calls", [("ab",), ("a", "b"), ("b", "a")])
def test_both_go_in_and_each_comes_out_alone(toy, registry, make, calls):
    before = snapshot(toy)
    r = registry((REWRITE,), (SetAttribute("toy:Base.who", make=make, original_contains="'base'"),))
    for ids in calls:
        assert all(result.status is Status.APPLIED for result in r.apply(*ids, strict=True))
    assert toy.Base().who() == "BASE!"
    assert "'BASE'" in r.report("a").diff() and "who" in r.report("b").diff()
    assert "# " not in r.report("b").diff().partition("\n")[0]
    for out, rest, said in (("a", "b", "base!"), ("b", "a", "BASE")):
        r.revert(out)
        assert toy.Base().who() == said
        assert r.report(rest)[rest].status is Status.APPLIED
        r.apply(out, strict=True)
        assert toy.Base().who() == "BASE!"
    r.revert()
    assert snapshot(toy) == before


def test_what_another_program_puts_there_is_seen_as_before(toy, registry, monkeypatch):
    r = registry((REWRITE,), (SetAttribute("toy:Base.who", make=_louder, original_contains="'base'"),))
    r.apply("b", strict=True)
    monkeypatch.setattr(toy.Base, "who", lambda self: "theirs")
    assert r.apply("a")["a"].status is Status.SHADOWED
    assert toy.Base().who() == "theirs"
