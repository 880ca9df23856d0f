"""What is alive: every instance, from one walk where several questions follow each other."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from patches.repairs.helpers import live_objects as alive

torch = pytest.importorskip("torch", reason="torch is not installed")


class _Layer(torch.nn.Linear):
    pass


class _Weight(torch.nn.Parameter):
    pass


def test_modules_and_tensors_by_class_and_below():
    layer, other = _Layer(2, 2), torch.nn.Linear(2, 2)
    layer.weight = weight = _Weight(torch.zeros(2, 2))
    linears = alive.instances(torch.nn.Linear)
    assert any(x is layer for x in linears) and any(x is other for x in linears)
    assert list(alive.instances(_Layer)) == [layer]
    assert len(alive.instances(_Weight)) == 1 and alive.instances(_Weight)[0] is weight


def test_other_threads_go_on_building_tuples():
    """A list of all objects holds tuples that are half built, and ``tuple(generator)`` then raises SystemError."""
    stop, errors = threading.Event(), []

    def build():
        try:
            while not stop.is_set():
                tuple(str(i) for i in range(50))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        alive.instances(_Layer)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_questions_inside_share_a_walk_and_those_outside_do_not(monkeypatch):
    walks = []
    real = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *classes: walks.append(1) or real(*classes))
    with alive.one_walk():
        assert not walks, "none before there is a question"
        alive.instances(_Layer)
        alive.instances(_Layer)
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
