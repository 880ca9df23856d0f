"""What the patches themselves cost: a call, an import, an apply and a revert. Each in fresh processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .run import ROOT, environment

_IMPORT = """
import importlib.metadata, sys, time
known = importlib.metadata.entry_points
hidden = sys.argv[1:]
importlib.metadata.entry_points = lambda **keys: [p for p in known(**keys) if p.name not in hidden]
begin = time.process_time()
import bitsandbytes
print(time.process_time() - begin)
"""
_NAME = "bnb_patches"
"""Of our entry point."""


def measure(device: str, *, rounds: int, folder: str = "") -> dict[str, Any]:
    """Seconds, by name: see the functions below."""
    return {
        "import": imports(rounds, folder),
        **json.loads(_run([sys.executable, "-m", "benchmarks.cost", device, str(rounds)], environment(folder))),
    }


def imports(rounds: int, folder: str = "") -> dict[str, Any]:
    """``import bitsandbytes``, torch with it: without our entry point, with it but turned off, and with it.

    Seconds of the processor: all files are in memory after the first round, and other work disturbs them less.
    """
    ways = {"without": (_NAME, "0"), "off": ("", "0"), "autoload": ("", "1")}
    found: dict[str, list[float]] = {way: [] for way in ways}
    with _entry_point() as env:
        for turn in range(rounds + 1):
            for way in ways if turn % 2 == 0 else reversed(ways):
                hidden, autoload = ways[way]
                env_of_way = {**environment(folder), **env(folder), "PATCHES_AUTOLOAD": autoload}
                env_of_way["PYTHONDONTWRITEBYTECODE"] = ""  # an installed package has its bytecode
                seconds = float(_run([sys.executable, "-c", _IMPORT, hidden], env_of_way))
                if turn:  # the first reads from the disk and writes bytecode
                    found[way].append(seconds)
    ratios = [a / b for a, b in zip(found["autoload"], found["without"])]
    return {**{way: statistics.median(t) for way, t in found.items()}, "ratio": statistics.median(ratios)}


@contextlib.contextmanager
def _entry_point() -> Iterator[Callable[[str], dict[str, str]]]:
    """The environment in which our entry point is known: as it is, or with metadata made for it."""
    if any(p.name == _NAME for p in importlib.metadata.entry_points(group="bitsandbytes.backends")):
        yield lambda folder: {}
        return
    with tempfile.TemporaryDirectory(prefix="bnb-patches-bench-") as name:
        info = Path(name) / "bnb_patches-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bnb-patches\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text(f"[bitsandbytes.backends]\n{_NAME} = bnb_patches_autoload:start\n")
        yield lambda folder: {"PYTHONPATH": os.pathsep.join([environment(folder)["PYTHONPATH"], name])}


def _run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[1:3]} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip().splitlines()[-1]


# -- in the fresh process ----------------------------------------------------------------------------


def calls(device: str, rounds: int) -> dict[str, Any]:
    """One eager call of what patches touch, in microseconds, unpatched and patched in alternation."""
    import patches

    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for state, change in (("unpatched", patches.revert), ("patched", patches.apply)):
            change()
            for name, subject in subjects(device).items():  # made anew: where they lie in memory matters
                both = found.setdefault(name, {"unpatched": [], "patched": []})
                both[state].append(microseconds(subject, device))
    patches.revert()
    rows = {}
    for name, both in found.items():
        pairs = list(zip(both["patched"], both["unpatched"]))
        rows[name] = {state: statistics.median(values) for state, values in both.items()}
        rows[name]["ratio"] = statistics.median(a / b for a, b in pairs)
        rows[name]["overhead"] = statistics.median(a - b for a, b in pairs)
    return rows


def apply_and_revert(rounds: int) -> dict[str, float]:
    """Seconds of ``patches.apply()`` and ``revert()`` with everything imported; the first apply reads sources."""
    import patches

    found: dict[str, list[float]] = {"apply": [], "revert": []}
    for _ in range(rounds + 1):
        for name, change in (("apply", patches.apply), ("revert", patches.revert)):
            begin = time.perf_counter()
            report = change()
            found[name].append(time.perf_counter() - begin)
            if name == "apply":
                count = len(report.with_status(patches.Status.APPLIED))
    return {
        "patches": count,
        "first_apply": found["apply"][0],
        "apply": statistics.median(found["apply"][1:]),
        "revert": statistics.median(found["revert"]),
    }


def quiet() -> None:
    """Unpatched, an INT8 layer logs a line in each call: what that takes is not to be counted as our gain."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def subjects(device: str) -> dict[str, Callable[[], Any]]:
    """Calls by name, each the smallest that reaches what is patched."""
    import bitsandbytes as bnb
    import torch
    from bitsandbytes import functional

    quiet()
    torch.manual_seed(0)
    hidden = 64 if device == "cpu" else 2048
    x = torch.randn(4, hidden, device=device, dtype=torch.bfloat16)

    def layers(bias: bool) -> tuple[Any, Any]:
        four = bnb.nn.Linear4bit(hidden, hidden, bias, compute_dtype=torch.bfloat16, quant_type="nf4").to(device)
        return four, bnb.nn.Linear8bitLt(hidden, hidden, bias, has_fp16_weights=False, threshold=6.0).to(device)

    four, eight = layers(bias=False)
    biased_four, biased_eight = layers(bias=True)

    def train(layer: Any) -> Callable[[], Any]:
        leaf = x.clone().requires_grad_()
        return lambda: layer(leaf).sum().backward()

    def infer(layer: Any) -> Callable[[], Any]:
        return torch.no_grad()(lambda: layer(x))

    weight = four.weight
    return {
        f"dequantize_4bit {hidden}x{hidden}": lambda: functional.dequantize_4bit(weight.data, weight.quant_state),
        f"Linear4bit {hidden}, forward": infer(four),
        f"Linear4bit {hidden}, forward and backward": train(four),
        f"Linear8bitLt {hidden}, forward": infer(eight),
        f"Linear8bitLt {hidden}, forward and backward": train(eight),
        # Unpatched, the first forward rounds such a bias for good; patched, it stays and is cast in each.
        f"Linear4bit {hidden}, float32 bias, forward and backward": train(biased_four),
        f"Linear8bitLt {hidden}, float32 bias, forward and backward": train(biased_eight),
    }


def microseconds(subject: Callable[[], Any], device: str, budget: float = 0.05, loops: int = 3) -> float:
    """One call, the best of ``loops`` loops of about ``budget`` seconds; on a CPU of the processor's time."""
    import torch

    clock = time.perf_counter if device != "cpu" else time.process_time
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    for _ in range(3):
        subject()
    begin = clock()
    subject()
    wait()
    count = max(3, int(budget / max(clock() - begin, 1e-6)))
    best = float("inf")
    for _ in range(loops):
        begin = clock()
        for _ in range(count):
            subject()
        wait()
        best = min(best, (clock() - begin) / count)
    return best * 1e6


def main() -> None:
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    device, rounds = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"registry": apply_and_revert(rounds), "calls": calls(device, rounds)}))


if __name__ == "__main__":
    main()
