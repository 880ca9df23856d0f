"""Patches going in and out for as long as you like: ``python -m benchmarks.soak``. Five minutes on an idle machine.

Each part has a process of its own. ``verbs``: 10,000 rounds of apply and revert, of a few patches at a time and of all.
``steps``: training steps with all patches going in and out in between. ``compiled``: the same, and each time a layer is
compiled; beside it ``control``, with ``torch.compiler.reset()`` in the place of the patches, for compiling again and
again costs torch memory by itself. Exit code 1 if something grows, or more than in the control. The table is kept in
``benchmarks/results/soak.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import linecache
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .present import markdown
from .setting import host, sentence

PARTS = ("verbs", "steps", "compiled", "control")
SAMPLES = 12
"""Looks at the process, after each as many rounds; the first third is for warming up."""
SLACK = {"RSS, MiB": 8, "objects": 200}
"""What may come and go between two looks. Of everything else not one more."""
OF_THE_CONTROL = 1.1
"""Patched code makes graphs of another size, and what torch keeps of a graph goes with it."""
Sample = dict[str, float]


def sample() -> Sample:
    """What must not grow, now."""
    gc.collect()
    found: Sample = {
        "objects": len(gc.get_objects()),
        "linecache": len(linecache.cache),
        "modules": len(sys.modules),
        "finders": len(sys.meta_path),
    }
    if "torch._dynamo" in sys.modules:
        found |= _dynamo()
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return found
    return {"RSS, MiB": psutil.Process().memory_info().rss / 2**20, **found}


def _dynamo() -> Sample:
    from torch._dynamo import convert_frame, eval_frame

    seen = convert_frame.input_codes.seen
    codes = [code for code in (reference() for reference in seen) if code is not None]
    kept = sum(len(eval_frame._debug_get_cache_entry_list(code)) for code in codes)
    return {"codes seen by Dynamo": len(seen), "Dynamo's cache entries": kept}


def rounds(count: int, one: Callable[[int], object], settle: Callable[[], object] = lambda: None) -> list[Sample]:
    """Look at the process ``SAMPLES`` times in ``count`` calls of ``one``, each time after ``settle``."""
    samples: list[Sample] = []
    for number in range(count):
        one(number)
        if (number + 1) * SAMPLES // count > len(samples):
            settle()
            samples.append(sample())
    return samples


def growth(samples: Sequence[Sample]) -> Sample:
    """From the second third of the samples to the last one, the median of each."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return {name: median(s[name] for s in last) - median(s[name] for s in middle) for name in samples[0]}


def grown(found: Sample, control: Sample | None = None) -> list[str]:
    """The names of what grew, and not in ``control`` as much."""
    allowed = {name: SLACK.get(name, 0) + OF_THE_CONTROL * max((control or {}).get(name, 0), 0) for name in found}
    return [name for name, more in found.items() if more > allowed[name]]


def verbs(registry: Any, count: int, seed: int = 0) -> list[Sample]:
    """Rounds of apply and revert of up to four patches of ``registry``; in one of fifty, of all."""
    choose = random.Random(seed)
    ids = list(registry.patches)

    def one(number: int) -> None:
        chosen = () if number % 50 == 0 else tuple(choose.sample(ids, choose.randint(1, min(4, len(ids)))))
        registry.apply(*chosen)
        registry.revert(*chosen)

    return rounds(count, one)


def steps(folder: str, count: int, patched: bool, compiled: bool) -> list[Sample]:
    """Rounds of two training steps with the patches and two without; ``compiled``: a layer too, in one of five."""
    import torch

    import patches

    from .cases import CASES, SIZES, Configuration, Job
    from .worker import Worker, save_model

    save_model(folder, SIZES["tiny"])
    configuration = Configuration("soak", patched=False, compiled=False)
    worker = Worker(Job(CASES[0], SIZES["tiny"], configuration, "cpu", "float32", "eager", folder))
    worker.start()
    layer = worker.model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    call = torch.compile(layer, backend="eager")  # the whole model takes ten seconds
    inputs = torch.randn(2, layer.in_features)
    go_in, go_out = (patches.apply, patches.revert) if patched else (torch.compiler.reset,) * 2

    def one(number: int) -> None:
        for change in (go_in, go_out):
            change()
            worker.steps(2)
            if compiled and number % 5 == 0:
                call(inputs).sum().backward()

    return rounds(count, one, settle=worker.model.zero_grad)


def _part(part: str, count: int) -> list[Sample]:
    """In a process of its own."""
    if part == "verbs":
        import patches

        for patch in patches.REGISTRY.patches.values():
            patches.REGISTRY.import_targets(patch)
        return verbs(patches.REGISTRY, count)
    with tempfile.TemporaryDirectory(prefix="bnb-patches-bench-") as folder:
        return steps(folder, count, patched=part != "control", compiled=part != "steps")


def _asked(part: str, count: int) -> list[Sample]:
    arguments = ["--part", part, "--rounds" if part == "verbs" else "--steps", str(count)]
    command = [sys.executable, "-m", "benchmarks.soak", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATCHES_AUTOLOAD": "0"})
    if done.returncode:
        raise SystemExit(f"{part}: it ended with {done.returncode}")
    samples: list[Sample] = json.loads(done.stdout.splitlines()[-1])
    return samples


def _rows(part: str, samples: Sequence[Sample], bad: Sequence[str]) -> Iterator[tuple[str, ...]]:
    more = growth(samples)
    for name in samples[0]:
        values = (f"{samples[i][name]:.0f}" for i in (0, len(samples) // 2, -1))
        yield (part, name, *values, f"{more[name]:+.1f}", "GROWS" if name in bad else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000, help="of apply and revert; 0 leaves them out")
    parser.add_argument("--steps", type=int, default=120, help="rounds of training; 0 leaves them out")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    counts = {part: options.rounds if part == "verbs" else options.steps for part in PARTS}
    if options.part:
        print(json.dumps(_part(options.part, counts[options.part])))
        return 0
    here = host()
    found = {part: _asked(part, count) for part, count in counts.items() if count}
    more = {part: growth(samples) for part, samples in found.items()}
    against = {"compiled": more.get("control")}
    bad = {part: grown(more[part], against.get(part)) for part in found if part != "control"}
    rows = [row for part, samples in found.items() for row in _rows(part, samples, bad.get(part, ()))]
    table = markdown(("part", "what", "first", "half way", "last", "growth", ""), rows)
    asked = f"{options.rounds:,} rounds of apply and revert, {options.steps} of training steps"
    (options.output / "soak.md").write_text(f"{sentence(here)}; {asked}.\n\n{table}\n", "utf-8")
    print(table)
    return 1 if any(bad.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
