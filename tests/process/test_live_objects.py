"""What is alive: every instance, from one walk where several questions follow each other, and from none where none is."""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
import threading
import weakref
from types import ModuleType

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


def test_where_nothing_is_alive_there_is_no_walk(walks):
    for made in (0, 1):
        for _ in range(made):
            del _Kind().weight, _Below().bias
            _Weight(torch.zeros(2))
        with alive.one_walk():
            assert (
                not alive.find_instances(_Kind)
                and not alive.find_instances(_Below)
                and not alive.find_instances(_Weight)
            )
        assert not walks
    with alive.one_walk():
        assert not alive.find_instances(torch.nn.Bilinear) and len(walks) == 1, "nobody had asked for it"


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
        assert not alive.find_instances(_Kind) and not alive.find_instances(_Weight) and len(walks) == 1


def test_who_else_names_the_class_is_taken_for_an_instance_at_most(walks, monkeypatch):
    elsewhere = ModuleType("elsewhere")
    elsewhere._Kind = elsewhere._Weight = _Kind
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    monkeypatch.setitem(sys.modules, "elsewhere_again", elsewhere)
    for count in (0, 1, 5):
        others = [_Kind] * count
        for made in (0, 1, 2):
            layers = [_Kind() for _ in range(made)]
            with alive.one_walk():
                assert len(alive.find_instances(_Kind)) == made
            assert len(walks) == (made + count > 0)
            walks.clear()
            del layers
        del others


def test_where_modules_that_know_none_of_them_name_one_it_is_found_all_the_same(walks, monkeypatch):
    """They are left out of what is counted, as most of all modules."""
    for name in (f"{start}made_up" for start in alive._UNAWARE):
        knowing = ModuleType(name)
        knowing._Kind = knowing._Weight = _Kind
        monkeypatch.setitem(sys.modules, name, knowing)
        with alive.one_walk():
            assert not alive.find_instances(_Kind)
        layer = _Kind()
        with alive.one_walk():
            assert alive.find_instances(_Kind) == [layer]
        del layer


def test_one_walk_in_another_is_the_same_and_knows_what_was_absent_when_it_began(walks):
    with alive.one_walk():
        names = [_Kind, _Weight]  # as a change does that notes what it edits
        with alive.one_walk():
            assert not alive.find_instances(_Kind)
        assert not alive.find_instances(_Weight) and not walks
    with alive.one_walk():
        assert not alive.find_instances(_Kind) and walks
    del names


def test_a_module_that_loads_when_it_is_looked_into_is_not(walks, monkeypatch, tmp_path):
    """As those of ``importlib.util.LazyLoader``, and objects that stand for a module."""
    (tmp_path / "lazily.py").write_text("raise AssertionError('it was loaded')")
    spec = importlib.util.spec_from_file_location("lazily", tmp_path / "lazily.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)

    class Proxy:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"it was asked for {name}")

    monkeypatch.setitem(sys.modules, "lazily", lazy)
    monkeypatch.setitem(sys.modules, "stands_for_one", Proxy())
    with alive.one_walk():
        assert not alive.find_instances(_Kind) and not walks


def test_threads_know_nothing_of_each_others_walk(walks):
    with alive.one_walk():
        layer = _Kind()
        found = []
        thread = threading.Thread(target=lambda: found.extend(alive.find_instances(_Kind)))
        thread.start()
        thread.join()
        assert found == [layer] and not alive.find_instances(_Kind)
