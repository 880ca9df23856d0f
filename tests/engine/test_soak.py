"""A sample of benchmarks/soak.py, on toys: hundreds of rounds leave nothing behind."""

from __future__ import annotations

import gc

import pytest

from benchmarks.soak import SAMPLES, grown, growth, rounds, verbs
from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute


def test_rounds_of_apply_and_revert_leave_nothing_behind(toy, registry):
    r = registry(
        (Rewrite("toy:plain", "y * 2", "_patches_twice(y)", names={"_patches_twice": lambda y: y * 4}),),
        (Rewrite("toy:plain", "y > 3", "y > 4"), DeleteAttribute("toy:Base.made")),
        (SetAttribute("toy:Base.who", over="'base'", make=lambda old: lambda self: old(self) + "!"),),
        (SetAttribute("toy:Base.new", 5),),
    )
    before = dict(vars(toy))
    samples = verbs(r, 600)
    assert len(samples) == SAMPLES and not grown(growth(samples) | {"RSS, MiB": 0})
    state = r._store.read()
    assert dict(vars(toy)) == before and not state.slots and not state.retired and not state.notes
    assert len(r._builder._built) <= 12, "what was made once is used again"


@pytest.mark.parametrize("size", [0, 30])
def test_what_grows_is_told(size):
    kept = []
    more = growth(rounds(240, lambda number: kept.extend([number, number] for _ in range(size))))
    assert ("objects" in grown(more)) is bool(size)
    assert not grown(more, control=more) or not size
    gc.collect()
