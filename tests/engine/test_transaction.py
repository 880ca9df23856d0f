"""One indivisible change: all steps or none, whatever fails, and never on top of someone else's."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from patches.engine.transaction import Stale, Step, StepFailed, Store


class Place:
    """Somewhere to write to; refuses ``bad``."""

    value: object = "before"

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, BaseException):
            raise value
        super().__setattr__(name, value)


def step(place: Place, value: object) -> Step:
    return Step(place, partial(setattr, place, "value", value), partial(setattr, place, "value", place.value))


def test_all_steps_and_the_state():
    store, places = Store("old"), [Place(), Place()]
    store.commit("old", "new", [step(place, "after") for place in places])
    assert [place.value for place in places] == ["after", "after"] and store.read() == "new"


def test_from_a_state_that_is_no_more_nothing_is_written():
    old, place = object(), Place()
    store = Store(old)
    store.commit(old, "newer")
    with pytest.raises(Stale):
        store.commit(old, "new", [step(place, "after")])
    assert place.value == "before" and store.read() == "newer"


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError])
def test_a_step_that_fails_undoes_those_before_it_and_is_named(at, error):
    store, places = Store("old"), [Place(), Place(), Place()]
    steps = [step(place, error("no") if i == at else "after") for i, place in enumerate(places)]
    with pytest.raises(StepFailed) as caught:
        store.commit("old", "new", steps)
    assert caught.value.step is steps[at] and isinstance(caught.value.__cause__, error)
    assert {place.value for place in places} == {"before"} and store.read() == "old"


def test_an_interrupt_in_a_step_passes_and_undoes_those_before_it():
    store, first, second = Store("old"), Place(), Place()
    with pytest.raises(KeyboardInterrupt):
        store.commit("old", "new", [step(first, "after"), step(second, KeyboardInterrupt())])
    assert (first.value, store.read()) == ("before", "old")


def test_a_place_that_cannot_be_put_back_does_not_keep_the_others_from_it():
    store, places = Store("old"), [Place(), Place(), Place()]
    steps = [step(place, "after") for place in places[:2]]
    steps[1] = Step(places[1], steps[1].do, partial(setattr, places[1], "value", RuntimeError("stuck")))
    with pytest.raises(StepFailed):
        store.commit("old", "new", [*steps, step(places[2], RuntimeError("no"))])
    assert [place.value for place in places] == ["before", "after", "before"]


def test_an_interrupted_undoing_goes_on_at_the_next_read():
    store, first, second = Store("old"), Place(), Place()
    undone: list[object] = []
    back = Step(first, partial(setattr, first, "value", "after"), partial(_interrupted_once, first, undone))
    with pytest.raises(KeyboardInterrupt):
        store.commit("old", "new", [back, step(second, RuntimeError("no"))])
    assert first.value == "after", "the interrupt came before it was put back"
    assert store.read() == "old" and first.value == "before"


def _interrupted_once(place: Place, seen: list[object]) -> None:
    seen.append(place)
    if len(seen) == 1:
        raise KeyboardInterrupt
    place.value = "before"


AUDITED = """
import sys
at, error, seen = int(sys.argv[1]), eval(sys.argv[2]), 0

def hook(event, arguments):
    global seen
    if armed and event == "object.__setattr__" and arguments[1] == "__code__":
        seen += 1
        if seen == at:
            raise error("refused")

armed = False
sys.addaudithook(hook)
import toys
from patches.engine.edits import Rewrite
from patches.engine.registry import Registry
from patches.engine.report import Status
from tests.engine.conftest import patch

functions = (toys.one, toys.two, toys.three)
before = [f.__code__ for f in functions]
edits = (Rewrite(f"toys:{f.__name__}", "1", "_patches_n", names={"_patches_n": 2}) for f in functions)
registry = Registry([patch("a", *edits)])
verb = sys.argv[3]
if verb == "revert":
    registry.apply()
after = None
armed = True
try:
    getattr(registry, verb)()
except error:
    pass
armed = False
now = [f.__code__ for f in functions]
assert seen >= at, "the hook was reached"
same = [a is b for a, b in zip(now, before)]
assert len(set(same)) == 1, same
status = registry.report()["a"].status
assert (status is Status.APPLIED) == (not same[0]), status
assert all(f() == (1 if same[0] else 2) for f in functions)
getattr(registry, verb)()
assert [f() for f in functions] == ([2] * 3 if verb == "apply" else [1] * 3)
now = None  # who keeps code of ours has a use for its names
registry.revert()
assert [f.__code__ for f in functions] == before and "_patches_n" not in vars(toys)
"""


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize(
    "error",
    ["RuntimeError", "KeyboardInterrupt", pytest.param("ValueError", marks=pytest.mark.release("RuntimeError"))],
)
def test_an_error_in_the_midst_of_the_writes(tmp_path, monkeypatch, verb, error):
    """Only an audit hook can raise between two writes: they are one call into C."""
    (tmp_path / "toys.py").write_text("".join(f"def {n}():\n    return 1\n\n\n" for n in ("one", "two", "three")))
    for at in (1, 2, 3):
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{AUDITED}",
            str(at),
            error,
            verb,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"write {at}: {done.stderr}"
