"""What the patches cost in eager: ``python -m benchmarks.eager``. Pairs of fresh processes, in turn; three minutes.

For each case: the time of a step, also in one process, with the patches out and in; the matrix products in it, and what
``save_on_cpu`` carries without checkpointing; the functions that it calls, which no other program on the machine can
change. Then the time of one call of a small layer, in the patched process, with the patches out and in. All times are
those of the processor, on one thread, for what the patches cost there is Python.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .cases import CASES, SIZES, Case, Configuration, Job, Size
from .present import markdown, write
from .run import Process
from .setting import host, sentence

ALL = (*CASES, Case("nf4-qv-checkpoint", "4-bit, LoRA on q and v, checkpointing", bits=4, checkpointing=True,
                    targets=("q_proj", "v_proj")))  # fmt: skip
STATES = ("unpatched", "patched")
TARGETS = {"step": 1.02, "forward": 3.0, "forward and backward": 5.0}
"""Ratio of a step; microseconds that a call may take more."""


def measure(size: Size, *, pairs: int, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """``cases`` and ``calls`` by name; in each, for each pair, what :func:`_pair` found."""
    found = [
        _pair(size, rounds, lambda text, turn=turn: tell(f"pair {turn + 1} of {pairs}: {text}"))
        for turn in range(pairs)
    ]
    return {kind: {name: [one[kind][name] for one in found] for name in found[0][kind]} for kind in ("cases", "calls")}


def _pair(size: Size, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Two processes, one with the patches, each working while the other waits."""
    with tempfile.TemporaryDirectory(prefix="bnb-patches-bench-") as name:
        folder = Path(name)
        pair = {state: Process(folder / f"{state}.log", OMP_NUM_THREADS="1") for state in STATES}
        try:
            _ask(pair["unpatched"], "save", str(folder / "model"), vars(size))
            cases = {}
            for case in ALL:
                tell(case.name)
                for state, process in pair.items():
                    configuration = Configuration(state, patched=state == "patched", compiled=False)
                    _ask(
                        process,
                        "job",
                        Job(case, size, configuration, "cpu", "float32", "", str(folder / "model")).to_dict(),
                    )
                    problems = _ask(process, "start")["problems"]
                    if problems:
                        raise RuntimeError(f"not all patches are in: {problems}")
                    _ask(process, "settle", 2)
                turns = _in_turn(pair, rounds, "steps", 1)
                steps = {state: [answer["cpu_s"][0] for answer in answers] for state, answers in turns.items()}
                here = _ask(pair["patched"], "turns", rounds)
                counts = {state: _ask(process, "count") for state, process in pair.items()}
                cases[case.name] = {"text": case.text, "cpu_s": steps, "in_one_process": here, "counts": counts}
            tell("calls")
            calls = [_ask(pair["patched"], "calls") for _ in range(rounds)]
            best = {name: {state: min(a[name][state] for a in calls) for state in STATES} for name in calls[0]}
            return {"cases": cases, "calls": best}
        finally:
            for process in pair.values():
                process.end()


def _in_turn(pair: dict[str, Process], rounds: int, *command: Any) -> dict[str, list[dict[str, Any]]]:
    """What both answer to ``command`` in each round; in every other round the patched one is first."""
    found: dict[str, list[dict[str, Any]]] = {state: [] for state in STATES}
    for turn in range(rounds):
        for state in STATES if turn % 2 == 0 else reversed(STATES):
            found[state].append(_ask(pair[state], *command))
    return found


def _ask(process: Process, *command: Any) -> dict[str, Any]:
    answer = process(*command)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def table(data: dict[str, Any]) -> str:
    """All figures: of a pair the median of its rounds (of calls the best), and over pairs the median."""
    return "\n\n".join(
        [sentence(data["host"]), _steps(data["cases"]), _functions(data["cases"]), _calls(data["calls"])]
    )


def _steps(cases: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for pairs in cases.values():
        ratios, here = ([_ratio(one[kind]) for one in pairs] for kind in ("cpu_s", "in_one_process"))
        ms = [f"{median(median(one['cpu_s'][s]) for one in pairs) * 1000:.0f}" for s in STATES]
        counts = [pairs[0]["counts"][s] for s in STATES]
        mib = [f"{c[key] / 2**20:.1f}" for key in ("carried", "carried_weights") for c in counts]
        spread = (f"{median(all_of):.3f} ({min(all_of):.3f} to {max(all_of):.3f})" for all_of in (ratios, here))
        rows.append((pairs[0]["text"], *ms, *spread, *(c["products"] for c in counts), *mib))
    both = [f"{name}{state}" for name in ("products, ", "carried MiB, ", "of it weights, ") for state in STATES]
    head = ("eager step, CPU ms", *STATES, f"ratio (target {TARGETS['step']})", "ratio in one process", *both)
    return markdown(head, rows)


def _ratio(seconds: dict[str, list[float]]) -> float:
    return median(a / b for a, b in zip(seconds["patched"], seconds["unpatched"]))


def _functions(cases: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for pairs in cases.values():
        unpatched, patched = (pairs[0]["counts"][state] for state in STATES)
        both = [n for key in ("python", "c") for n in (unpatched[key], patched[key])]
        rows.append((pairs[0]["text"], *both[:2], f"{both[1] / both[0]:.3f}", patched["ours"], *both[2:]))
    head = ("functions called in a step", "Python, unpatched", "Python, patched", "ratio", "of the plugin",
            "C, unpatched", "C, patched")  # fmt: skip
    return markdown(head, rows)


def _calls(calls: dict[str, list[dict[str, float]]]) -> str:
    rows = []
    for name, pairs in calls.items():
        more = [one["patched"] - one["unpatched"] for one in pairs]
        target = TARGETS["forward and backward" if "backward" in name else "forward"]
        us = [f"{median(one[state] for one in pairs):.1f}" for state in STATES]
        rows.append((name, *us, f"{median(more):+.1f} ({min(more):+.1f} to {max(more):+.1f})", target))
    return markdown(("eager call, CPU us", *STATES, "more", "target"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4, help="of fresh processes (default 4)")
    parser.add_argument("--rounds", type=int, default=8, help="of each pair (default 8)")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(argv)
    here = host()  # before the load is that of the measurement
    data = {"host": here} | measure(
        SIZES[options.size], pairs=options.pairs, rounds=options.rounds, tell=lambda text: print(text, file=sys.stderr)
    )
    write(options.output / "eager", data, table(data))
    print(table(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
