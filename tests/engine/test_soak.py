"""A sample of benchmarks/soak.py, on toys: hundreds of rounds leave nothing behind."""

from __future__ import annotations

import gc
from types import FunctionType

import pytest

import patches
from benchmarks.soak import SAMPLES, grown, growth, rounds, verbs
from patches.engine.edits import DeleteAttribute, Rewrite, SetAttribute


def test_rounds_of_apply_and_revert_leave_nothing_behind(toy, registry):
    r = registry(
        (Rewrite("toy:plain", "y * 2", "_patches_twice(y)", names={"_patches_twice": lambda y: y * 4}),),
        (Rewrite("toy:plain", "y > 3", "y > 4"), DeleteAttribute("toy:Base.made")),
        (SetAttribute("toy:Base.who", original_contains="'base'", make=lambda old: lambda self: old(self) + "!"),),
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


def test_compile_options_leaves_nothing_behind():
    """torch keeps an object of its own for each call of ``torch.compile``; ours are as many after more uses as before."""
    torch = pytest.importorskip("torch")

    def ours() -> tuple[int, int]:
        gc.collect()
        owners = (t.__module__ if isinstance(t, FunctionType) else type(t).__module__ for t in gc.get_objects())
        return sum(str(owner).startswith("patches") for owner in owners), len(patches.REGISTRY._builder._built)

    def use() -> None:
        for _ in range(10):
            with patches.compile_options({"epilogue_fusion": False}):
                torch.compile(torch.sin)

    use()
    before = ours()
    use()
    assert ours() == before
