"""What ``test_verify_processes`` lets its processes do: cheap questions, no library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from bnb_patches.verification.worker import Answer

SERVED = os.getpid()
"""The process that has imported this module: the fork server, where there is one."""


def answer(name: str, argument: str = "") -> Answer:
    return QUESTIONS[name](argument)


_prepared_by = 0


def prepare() -> None:
    """Called in the fork server, once."""
    global _prepared_by
    assert not _prepared_by
    _prepared_by = os.getpid()


def prepared(argument: str) -> Answer:
    """Which process was prepared, and which one forked this one."""
    return True, f"{_prepared_by} {os.getppid()}"


def echo(argument: str) -> Answer:
    return True, argument


def noise(argument: str) -> Answer:
    """Print in every way there is, in no encoding that all know, and close what can be closed."""
    print("{} \u2026")
    print("[]", file=sys.stderr)
    os.write(1, b"noise")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    sys.stdout.close()
    os.close(1)
    return False, "heard \u2026"


def die(argument: str) -> Answer:
    os._exit(int(argument))


def kill(argument: str) -> Answer:
    os.kill(os.getpid(), getattr(signal, argument))
    raise AssertionError("not killed")


def leave(argument: str) -> Answer:
    sys.exit("I leave")


def fail(argument: str) -> Answer:
    raise ValueError(f"{argument}\non two lines")


def sleep(argument: str) -> Answer:
    time.sleep(float(argument))
    return False, "slept"


def until(argument: str) -> Answer:
    """Wait until the file is there."""
    while not os.path.exists(argument):
        time.sleep(0.01)
    return True, "it is there"


def span(argument: str) -> Answer:
    """When it ran."""
    before = time.time()
    time.sleep(0.3)
    return True, f"{before} {time.time()}"


def environment(argument: str) -> Answer:
    return True, os.environ.get(argument, "")


def where(argument: str) -> Answer:
    """Our parent, and the process that imported this module."""
    return True, f"{os.getppid()} {SERVED} {os.getpid()}"


def linger(argument: str) -> Answer:
    """Start a process that outlives its parent, say that all are there, and wait to be killed."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(argument, "w"):
        time.sleep(60)
    raise AssertionError("a minute has passed")


QUESTIONS: dict[str, Callable[[str], Answer]] = {
    question.__name__: question
    for question in (echo, prepared, noise, die, kill, leave, fail, sleep, until, span, environment, where, linger)
}
