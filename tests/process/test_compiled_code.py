"""When torch.compile is made to forget, and when that must wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import patches
from patches.process import compiled_code

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
ID = "bitsandbytes-bias-written-in-forward"


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def test_nothing_is_reset_before_something_was_compiled(monkeypatch):
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("a reset costs, and there is nothing to reset"))
    assert compiled_code.forget_compiled_code() == ""


def test_it_waits_while_another_thread_is_in_compiled_code():
    """torch itself can crash if what a thread runs is freed under it."""
    entered, leave = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def wait(x):
        entered.set()
        assert leave.wait(60)
        return x

    compiled = torch.compile(lambda x: wait(x.sin()).cos(), backend="eager")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(compiled, torch.ones(2))
        assert entered.wait(60)
        try:
            assert compiled_code.forget_compiled_code() is None
            report = patches.apply(ID)
            assert any("still run the old code" in note for note in report.notes)
        finally:
            leave.set()
        running.result()
    report = patches.revert(ID)
    assert any("reset() was called" in note for note in report.notes), "as soon as it can be"
    assert not any("still run the old code" in note for note in report.notes)


def test_it_waits_where_the_call_comes_from_compiled_code_itself():
    said = []

    @torch._dynamo.disable
    def forget(x):
        said.append(compiled_code.forget_compiled_code())
        return x

    torch.compile(lambda x: forget(x.sin()), backend="eager")(torch.ones(2))
    assert said == [None]


def test_workers_of_inductor_that_wait_for_work_do_not_hold_it_up():
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
    assert compiled_code.forget_compiled_code() == compiled_code.FORGOTTEN
