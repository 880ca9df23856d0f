"""What is alive: every instance, from one walk where several questions follow each other."""

from __future__ import annotations

import gc
import weakref

import pytest

from patches.repairs.helpers import live_objects as alive

torch = pytest.importorskip("torch", reason="torch is not installed")


class _Layer(torch.nn.Linear):
    pass


def test_modules_and_tensors_by_class_and_below():
    layer, other = _Layer(2, 2), torch.nn.Linear(2, 2)
    linears = alive.instances(torch.nn.Linear)
    assert any(x is layer for x in linears) and any(x is other for x in linears)
    assert [x for x in alive.instances(_Layer)] == [layer]
    assert any(x is layer.weight for x in alive.instances(torch.nn.Parameter))


def test_questions_inside_share_a_walk_and_those_outside_do_not(monkeypatch):
    walks = []
    monkeypatch.setattr(gc, "get_objects", lambda real=gc.get_objects: walks.append(1) or real())
    with alive.one_walk():
        assert not walks, "none before there is a question"
        alive.instances(_Layer)
        alive.instances(torch.nn.Module)
        assert len(walks) == 1
        late = _Layer(2, 2)
        assert alive.instances(_Layer) == [], "what came after the walk is not seen"
    assert alive.instances(_Layer) == [late] and len(walks) == 2


def test_collect_forgets_what_only_a_cycle_or_the_walk_held():
    layer = _Layer(2, 2)
    layer.itself = [layer]
    gone = weakref.ref(layer)
    with alive.one_walk():
        assert len(alive.instances(_Layer)) == 1
        del layer
        alive.collect()
        assert gone() is None and alive.instances(_Layer) == []
        assert alive.instances(_Layer) == []


def test_nothing_is_held_afterwards():
    layer = _Layer(2, 2)
    gone = weakref.ref(layer)
    with alive.one_walk():
        alive.instances(_Layer)
        del layer
        assert gone() is not None
    gc.collect()
    assert gone() is None
