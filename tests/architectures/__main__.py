"""``python -m tests.architectures [WORD ...]``: run what was not run yet, with the plugin, then without it.

A process for each architecture, forked from this one, ends with it. Results go into ``docs/architectures.json`` one by
one: who stops this goes on where it was. Without the plugin those come first that are not all right with it.
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
from pathlib import Path
from typing import Any

import transformers

import patches
from tests import processor
from tools import records
from tools.docs.architectures import RESULTS, is_right, wrong_steps

from .found import Architecture, everything
from .judged import PRECISIONS, NotBuilt, judge, plain

SECONDS, PATIENCE = 40, 400
"""Of the processor, and of the clock, for one architecture."""
WAYS = ("patched", "unpatched")


def main(words: list[str]) -> int:
    processor.pretend("plain")  # its kernels compute in float32
    import bitsandbytes  # noqa: F401  (before the fork)
    import peft  # noqa: F401

    quiet()
    results = read()
    chosen = [each for each in everything() if all(word in str(each) for word in words)]
    for way in WAYS:
        if way == "patched":
            patches.apply()
        else:
            patches.revert()
            chosen.sort(key=lambda each: is_right(results.get(str(each), {}).get("patched", {})))
        for architecture in chosen:
            entry = results.setdefault(str(architecture), {})
            if way in entry:
                continue
            entry[way] = apart(architecture)
            print(f"{way} {architecture}: {summary(entry[way])}", flush=True)
            RESULTS.write_text(records.dumps(results), "utf-8")
    wrong = [name for name, entry in results.items() if is_worse(entry)]
    print(f"transformers {transformers.__version__}: {len(results)} architectures, worse with the plugin: {wrong or 0}")
    return int(bool(wrong))


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)


def read() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def apart(architecture: Architecture) -> dict[str, Any]:
    """The result of ``architecture``, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        if not (child := os.fork()):
            _answer(architecture, Path(folder), answer)
        ended = _waited(child)
        found = json.loads(answer.read_text()) if answer.exists() else {}
        if ended:
            found["ended"] = ended
        return found


def _waited(child: int) -> str:
    """Why ``child`` did not end by itself; empty if it did."""
    late = time.monotonic() + PATIENCE
    while time.monotonic() < late:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGXCPU:
                return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
            return f"not done in {SECONDS} seconds" if os.WIFSIGNALED(status) else ""
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"not done in {SECONDS} seconds"


def _answer(architecture: Architecture, folder: Path, answer: Path) -> None:
    """Write what ``architecture`` does, step by step, and end this process."""
    quiet()
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    found: dict[str, Any] = {}
    try:
        original = plain(architecture, folder / "plain")
        found["called with"] = original.how
        for precision in PRECISIONS:
            steps = found[precision] = {}
            for step, wrong in judge(architecture, original, precision, folder / precision):
                steps[step] = wrong
                answer.write_text(json.dumps(found))
    except NotBuilt as error:
        found["not built"] = str(error)
    except BaseException as error:  # noqa: BLE001  (it says so, and ends)
        found["not built"] = f"{type(error).__name__}: {traceback.format_exc().splitlines()[-1][:160]}"
    answer.write_text(json.dumps(found))
    os._exit(0)


def is_worse(entry: dict[str, Any]) -> bool:
    """Whether a step is right without the plugin and wrong with it."""
    if not all(way in entry for way in WAYS):
        return False
    before, after = (wrong_steps(entry[way]) for way in WAYS[::-1])
    return any(place not in before and place[1] in entry["unpatched"].get(place[0], {}) for place in after)


def summary(result: dict[str, Any]) -> str:
    if "not built" in result:
        return f"not built: {result['not built']}"
    wrong = "; ".join(f"{precision} {step}: {text}" for (precision, step), text in wrong_steps(result).items())
    return "; ".join(filter(None, (wrong, result.get("ended", "")))) or f"right ({result['called with']})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
