"""Verbs beside everything that may happen at the same time: threads, first imports, calls, forks, signals.

Each runs in a process of its own, under a watchdog that ends it with the stacks of all threads: a deadlock is
an error in bounded time.
"""

from __future__ import annotations

import os
import signal

import pytest

WATCHDOG = "import faulthandler; faulthandler.dump_traceback_later(300, exit=True)\n"

TOYS = """
import sys, threading, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "toys.py").write_text("".join(f"def f{i}(x):\\n    return x + 1\\n\\n\\n" for i in range(20)))
sys.path.insert(0, str(folder))
sys.setswitchinterval(1e-5)
import toys
from patches.engine.edits import Rewrite
from patches.engine.registry import Registry
from patches.engine.report import Status
from tests.engine.conftest import patch

def two(x):
    return x + 2

functions = [vars(toys)[f"f{i}"] for i in range(20)]
codes = [f.__code__ for f in functions]
registry = Registry(
    patch(f"p{i}", Rewrite(f"toys:f{i}", "x + 1", "_patches_two(x)", names={"_patches_two": two})) for i in range(20)
)
"""


def test_calls_go_on_in_other_threads_while_patches_go_in_and_out(fresh, tmp_path):
    """No call misses the helper that its code names, and each gives the one result or the other."""
    script = """
errors, calls, stop = [], [0], threading.Event()

def call():
    while not stop.is_set():
        for f in functions:
            try:
                assert f(1) in (2, 3)
                calls[0] += 1
            except BaseException as error:
                errors.append(repr(error))

threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
[t.start() for t in threads]
for _ in range(50):
    registry.apply(strict=True)
    registry.revert()
stop.set()
[t.join() for t in threads]
assert not errors, (len(errors), set(errors))
assert calls[0] > 1000
registry.revert()
assert [f.__code__ for f in functions] == codes and "_patches_two" not in vars(toys), "and all of it is gone"
"""
    fresh(WATCHDOG + TOYS + script, str(tmp_path))


def test_a_frame_that_was_entered_before_the_revert_keeps_its_helper(fresh, tmp_path):
    script = """
(folder / "slow.py").write_text('''
def waits(gate, x):
    gate()
    return x + 1


def generates(x):
    yield x
    yield x + 1


def makes(x):
    def inner():
        return x + 1
    return inner
''')
import slow
names = {"_patches_two": two}
registry = Registry([patch("a", *(Rewrite(f"slow:{n}", "x + 1", "_patches_two(x)", names=names) for n in ("waits", "generates", "makes")))])
registry.apply(strict=True)
entered, leave, got = threading.Event(), threading.Event(), []
thread = threading.Thread(target=lambda: got.append(slow.waits(lambda: (entered.set(), leave.wait()), 1)))
thread.start()
entered.wait()
generator, inner = slow.generates(1), slow.makes(1)
next(generator)
registry.revert()
assert slow.waits(lambda: None, 1) == 2, "who calls now gets the original"
leave.set()
thread.join()
assert got == [3] and list(generator) == [3] and inner() == 3
assert "_patches_two" in vars(slow)
del generator
registry.revert()
assert "_patches_two" in vars(slow), "a function that was made there is alive"
del inner
registry.report(), registry.revert()
assert "_patches_two" not in vars(slow)
"""
    fresh(WATCHDOG + TOYS + script, str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_forks_while_a_thread_is_at_work(fresh, tmp_path):
    script = """
import os, signal
stop = threading.Event()

def work():
    while not stop.is_set():
        registry.apply(), registry.revert()

threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
[t.start() for t in threads]
for k in range(30):
    time.sleep(0.003 * (k % 5))
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            said = [r.status is Status.APPLIED for r in registry.report()]
            assert said == [f.__code__ is not c for f, c in zip(functions, codes)], "the child finds a whole state"
            assert {f(1) for f in functions} <= {2, 3}
            import colorsys  # an import that a finder sees
            assert all(r.status is Status.APPLIED for r in registry.apply(strict=True))
            registry.revert()
            assert [f.__code__ for f in functions] == codes
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, (k, status)
stop.set()
[t.join() for t in threads]
"""
    fresh(WATCHDOG + TOYS + script, str(tmp_path))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no interval timers on this system")
def test_a_verb_in_a_signal_handler(fresh, tmp_path):
    script = """
import signal, time
calls = [0]

def handler(*_):
    calls[0] += 1
    (registry.apply if calls[0] % 2 else registry.revert)()
    registry.report()

signal.signal(signal.SIGALRM, handler)
registry.apply(), registry.revert()
started = time.perf_counter()
registry.apply(), registry.revert()
took = time.perf_counter() - started
k = 0
while calls[0] < 60:  # the watchdog ends it where none is called
    k += 1
    signal.setitimer(signal.ITIMER_REAL, took * (1 + k % 40) / 40)  # once: a handler is not interrupted by the next
    registry.apply(), registry.revert()
    signal.setitimer(signal.ITIMER_REAL, 0)
registry.revert()
assert [f.__code__ for f in functions] == codes
assert all(r.status is Status.APPLIED for r in registry.apply(strict=True))
"""
    fresh(WATCHDOG + TOYS + script, str(tmp_path))


def test_a_verb_in_an_import_that_a_verb_triggers(fresh, tmp_path):
    """``make`` imports a module, whose import calls ``apply``."""
    script = """
(folder / "later.py").write_text("import __main__\\n__main__.registry.apply()\\n")
from patches.engine.edits import SetAttribute

def make(original):
    import later
    return lambda x: original(x) + 10

registry = Registry([patch("a", SetAttribute("toys:f0", make=make, original_contains="x + 1")), patch("b", Rewrite("toys:f1", "x + 1", "x + 2"))])
registry.apply(strict=True)
assert (toys.f0(1), toys.f1(1)) == (12, 3)
registry.revert()
assert (toys.f0, toys.f1) == tuple(functions[:2])
"""
    fresh(WATCHDOG + TOYS + script, str(tmp_path))


def test_a_submodule_that_is_awaited_is_imported_while_another_thread_imports_its_package(fresh, tmp_path):
    """Python calls finders under the global import lock: one that imports the package there waits for ever."""
    script = """
import sys, threading
from pathlib import Path
folder = Path(sys.argv[1]) / "package"
folder.mkdir()
(folder / "__init__.py").write_text("import __main__; __main__.begun.set(); __main__.searched.wait(); import json.tool")
(folder / "part.py").write_text("")
sys.path.insert(0, sys.argv[1])
from patches.engine import imports

class Searched:
    def find_spec(self, name, path=None, target=None):
        if name == "package.part":
            searched.set()

begun, searched, told = threading.Event(), threading.Event(), []
sys.meta_path.insert(0, Searched())
imports.after_import("package.part", lambda: told.append(sys.modules["package.part"]))
whole = threading.Thread(target=__import__, args=("package",))
whole.start()
begun.wait()
__import__("package.part")
whole.join()
assert told == [sys.modules["package.part"]], "once, when the package was whole too"
"""
    fresh(WATCHDOG + script, str(tmp_path))


@pytest.mark.parametrize("threads", [8, pytest.param(28, marks=pytest.mark.release("eight threads"))])
def test_verbs_in_threads_beside_the_first_imports_of_the_stack(fresh, threads):
    """As a server does that loads models in threads: everybody ends, and what is in is whole."""
    pytest.importorskip("torch", reason="the stack cannot be imported without torch")
    fresh(
        WATCHDOG
        + """
import random, sys, threading
sys.setswitchinterval(1e-4)
import patches
from patches.engine.report import Status
some = ["bitsandbytes-int8-copies", "bitsandbytes-params4bit-copies", "peft-dora-cache", "transformers-warning-once"]
errors, stop = [], threading.Event()

def verbs(seed):
    choose = random.Random(seed)
    while not stop.is_set():
        try:
            ids = choose.choice([(), (), (choose.choice(some),)])
            getattr(patches, choose.choice(["apply", "apply", "revert", "report"]))(*ids)
            stop.wait(choose.random() * 6)
        except BaseException as error:
            errors.append(repr(error))

def imports(*names):
    try:
        for name in names:
            __import__(name)
    except BaseException as error:
        errors.append(f"import {name}: {error!r}")

importing = [threading.Thread(target=imports, args=names) for names in (
    ("bitsandbytes", "peft"), ("bitsandbytes", "bitsandbytes.nn.modules"), ("peft",),
)]  # nor submodules of bitsandbytes, transformers and torch._inductor: without the plugin they deadlock as well
threads = [threading.Thread(target=verbs, args=(seed,), daemon=True) for seed in range(int(sys.argv[1]))]
[t.start() for t in (*threads, *importing)]
[t.join() for t in importing]
stop.set()
[t.join() for t in threads]
assert not errors, errors[:3]
report = patches.apply()
bad = report.with_status(Status.CONFLICT, Status.FAILED, Status.SHADOWED)
assert not bad, [(r.id, r.reason) for r in bad]
import bitsandbytes
assert report["bitsandbytes-int8-plain-weight"].status is Status.APPLIED
patches.revert()
import gc
gc.collect()  # a name stays while a function that was made inside rewritten code is alive, in garbage too
patches.revert()
left = [f"{name}.{key}" for name, module in list(sys.modules.items()) if name.split(".")[0] in ("bitsandbytes", "peft")
        for key in list(vars(module)) if key.startswith("_patches_")]
assert not left, left
""",
        str(threads),
    )
