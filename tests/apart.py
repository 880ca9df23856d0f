"""Judge many models, each without the plugin and with it, each in a process of its own that ends with it.

Results go into a file of records one by one: who stops this goes on where it was.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import patches
from tools import records

WAYS = ("patched", "unpatched")
Found = dict[str, Any]
Judge = Callable[[Path, Found, Callable[[], None], str], None]
"""Fill what was found, step by step, with a folder to work in, a function that keeps what there is, and one of ``WAYS``."""


class NotBuilt(Exception):
    """There is no tiny model to judge."""


class Product:
    """All models of one kind: what judges each, by name, and the file of what was found."""

    def __init__(self, judges: Mapping[str, Judge], file: Path, seconds: int, patience: int) -> None:
        self.judges, self.file, self.seconds, self.patience = judges, file, seconds, patience

    def read(self) -> dict[str, Found]:
        return json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}

    def run(self, words: Sequence[str], is_right: Callable[[Found], bool], summary: Callable[[Found], str]) -> None:
        """Run what was not run yet, with the plugin, then without it: there first what is not right with it.

        A word chooses the names that have it; "--patched" and "--unpatched" choose one of the two ways.
        """
        results = self.read()
        only = [word.removeprefix("--") for word in words if word.startswith("--")]
        chosen = [name for name in self.judges if all(word in name for word in words if not word.startswith("--"))]
        for way in only or WAYS:
            if way == "patched":
                patches.apply()
            else:
                patches.revert()
                chosen.sort(key=lambda name: is_right(results.get(name, {}).get("patched", {})))
            for name in chosen:
                entry = results.setdefault(name, {})
                if way not in entry:
                    entry[way] = self.apart(name, way)
                    print(f"{way} {name}: {summary(entry[way])}", flush=True)
                    self.file.write_text(records.dumps(results), "utf-8")

    def apart(self, name: str, way: str) -> Found:
        """What is found about ``name``, in a fork of this process."""
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "answer.json")
            if not (child := os.fork()):
                self._answer(self.judges[name], Path(folder), answer, way)
            ended = self._waited(child)
            found: Found = json.loads(answer.read_text()) if answer.exists() else {}
            if ended:
                found["ended"] = ended
            return found

    def _waited(self, child: int) -> str:
        """Why ``child`` did not end by itself; empty if it did."""
        late = time.monotonic() + self.patience
        while time.monotonic() < late:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGXCPU:
                    return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
                return f"not done in {self.seconds} seconds" if os.WIFSIGNALED(status) else ""
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"not done in {self.seconds} seconds"

    def _answer(self, judge: Judge, folder: Path, answer: Path, way: str) -> None:
        """Write what ``judge`` finds, step by step, and end this process."""
        quiet()
        resource.setrlimit(resource.RLIMIT_CPU, (self.seconds, self.seconds + 5))
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        found: Found = {}
        try:
            judge(folder, found, lambda: void(answer.write_text(json.dumps(found))), way)
        except NotBuilt as error:
            found["not built"] = str(error)
        except BaseException as error:  # noqa: BLE001  (it says so, and ends)
            found["not built"] = f"{type(error).__name__}: {traceback.format_exc().splitlines()[-1][:160]}"
        answer.write_text(json.dumps(found))
        os._exit(0)


def void(_: object) -> None:
    """Drop a result."""


def quiet() -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)


def worse(entry: Found, wrong_steps: Callable[[Found], Mapping[tuple[str, str], str]]) -> list[tuple[str, str]]:
    """The steps that are right without the plugin and wrong with it."""
    if not all(way in entry for way in WAYS):
        return []
    before, after = wrong_steps(entry["unpatched"]), wrong_steps(entry["patched"])
    return [place for place in after if place not in before and place[1] in entry["unpatched"].get(place[0], {})]


def tell(every: Product) -> None:
    """Print what the models are that the arguments name; without the plugin where "unpatched" is among them."""
    way = "unpatched" if "unpatched" in sys.argv else "patched"
    if way == "patched":
        patches.apply()
    print(json.dumps({name: every.apart(name, way) for name in sys.argv[1:] if name in every.judges}))


def found_now(room: str, *arguments: str) -> dict[str, Found]:
    """What ``tests.<room>.worker`` tells, from a process that has run nothing else: forks of others may wait for ever."""
    from tests import forks

    source = f"from tests.{room}.worker import main; main()"
    (done,) = forks.run(forks.Program(["-c", source, *arguments], dict(os.environ)), timeout=500)
    assert done.returncode == 0, done.stderr
    results: dict[str, Found] = json.loads(done.stdout.splitlines()[-1])
    assert {*results, "unpatched"} == {*arguments, "unpatched"}
    return results
