"""``Registry.prepare``: what apply would work out, before it is asked to."""

from __future__ import annotations

from patches.engine.edits import Rewrite, SetAttribute
from patches.engine.report import Status
from tests.engine.test_registry import snapshot


def test_what_was_prepared_is_what_apply_puts_in_and_nothing_before(toy, registry):
    before, made = snapshot(toy), []

    def make(original):
        made.append(original)
        return lambda self: "made"

    r = registry((Rewrite("toy:plain", "y * 2", "y * 3"), SetAttribute("toy:Base.who", over="'base'", make=make)))
    r.prepare()
    assert snapshot(toy) == before and not r.report().with_status(Status.APPLIED)
    assert made == [vars(toy.Base)["who"]]
    r.apply(strict=True)
    assert len(made) == 1 and toy.Base().who() == "made"
    r.revert()
    assert snapshot(toy) == before
