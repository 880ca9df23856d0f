"""Every instance that is alive is found, by one walk where several questions follow each other."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest

from patches.process import live_objects as alive

torch = pytest.importorskip("torch", reason="torch is not installed")


class _Layer(torch.nn.Linear):
    pass


class _Weight(torch.nn.Parameter):
    pass


def test_modules_and_tensors_by_class_and_below():
    layer, other = _Layer(2, 2), torch.nn.Linear(2, 2)
    layer.weight = weight = _Weight(torch.zeros(2, 2))
    linears = alive.find_instances(torch.nn.Linear)
    assert any(x is layer for x in linears) and any(x is other for x in linears)
    assert list(alive.find_instances(_Layer)) == [layer]
    assert len(alive.find_instances(_Weight)) == 1 and alive.find_instances(_Weight)[0] is weight


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
        alive.find_instances(_Layer)
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
        alive.find_instances(_Layer)
        alive.find_instances(_Layer)
        assert len(walks) == 1
        late = _Layer(2, 2)
        assert alive.find_instances(_Layer) == [], "what came after the walk is not seen"
    assert alive.find_instances(_Layer) == [late] and len(walks) == 2


def test_collect_forgets_what_only_a_cycle_or_the_walk_held():
    layer = _Layer(2, 2)
    layer.itself = [layer]
    gone = weakref.ref(layer)
    with alive.one_walk():
        assert len(alive.find_instances(_Layer)) == 1
        del layer
        alive.collect_garbage()
        assert gone() is None and alive.find_instances(_Layer) == []
        assert alive.find_instances(_Layer) == []


def test_nothing_is_held_afterwards():
    layer = _Layer(2, 2)
    gone = weakref.ref(layer)
    with alive.one_walk():
        alive.find_instances(_Layer)
        del layer
        assert gone() is not None
    gc.collect()
    assert gone() is None


class _Kind(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


class _Below(_Kind):
    pass


@pytest.fixture
def walks(monkeypatch):
    """How many walks there were; damage is asked of ``_Kind`` and ``_Weight``."""
    gc.collect()
    monkeypatch.setattr(alive, "_ASKED", {__name__: ("_Kind", "_Weight")})
    walks = []
    real = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *classes: walks.append(1) or real(*classes))
    return walks


def cycle() -> weakref.ref:
    layer = _Kind()
    layer.itself = layer
    return weakref.ref(layer)


def held_by_torch() -> torch.Tensor:
    """A product that alone knows its factor: what is left of that in Python is owned by torch."""
    return (_Weight(torch.ones(2)).requires_grad_() * 2).sum()


MADE = {
    "a layer": lambda: _Kind(),
    "one below": lambda: _Below(),
    "a class made later": lambda: type("Later", (_Below,), {})(),
    "a weight": lambda: _Weight(torch.zeros(2)),
    "a weight in a layer": lambda: (
        setattr(layer := torch.nn.Linear(2, 2), "weight", _Weight(torch.zeros(2, 2))) or layer
    ),
    "a copy": lambda: copy.deepcopy(_Kind()),
    "a cycle": cycle,
    "held by torch": held_by_torch,
    "in a closure": lambda: (lambda layer: lambda: layer)(_Kind()),
    "without its constructor": lambda: _Kind.__new__(_Kind),
}


@pytest.mark.parametrize("what", MADE)
def test_whatever_is_alive_is_found(walks, what):
    gc.disable()
    try:
        one = MADE[what]()
        with alive.one_walk():
            assert len(alive.find_instances(_Kind)) + len(alive.find_instances(_Weight)) == 1
        assert len(walks) == 1
        del one
    finally:
        gc.enable()
        gc.collect()
    with alive.one_walk():
        assert not alive.find_instances(_Kind) and not alive.find_instances(_Weight) and len(walks) == 2


def test_one_walk_in_another_is_the_same(walks):
    with alive.one_walk():
        with alive.one_walk():
            assert not alive.find_instances(_Kind)
        late = _Kind()
        assert not alive.find_instances(_Kind) and not alive.find_instances(_Weight) and len(walks) == 1
    with alive.one_walk():
        assert alive.find_instances(_Kind) == [late] and len(walks) == 2


def test_threads_know_nothing_of_each_others_walk(walks):
    with alive.one_walk():
        assert not alive.find_instances(_Kind)
        layer = _Kind()
        found = []
        thread = threading.Thread(target=lambda: found.extend(alive.find_instances(_Kind)))
        thread.start()
        thread.join()
        assert found == [layer] and not alive.find_instances(_Kind)
