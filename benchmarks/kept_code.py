"""How much time the kept code saves: ``python -m benchmarks.kept_code``. A minute on an idle machine.

Fresh processes import the stack, and then make the code of all patches for it: first from the sources, later from the
file that the first one wrote (:mod:`patches.engine.compiler`). All times are those of the processor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from .present import markdown

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import os, sys, time
from pathlib import Path
start = time.process_time()
import torch, bitsandbytes, accelerate, transformers, peft
imported = time.process_time() - start
from patches import REGISTRY
from patches.engine.build import Builder
from patches.engine.compiler import KeepingCompiler
REGISTRY.import_targets(*REGISTRY.patches.values())
REGISTRY._builder = Builder(KeepingCompiler(Path(sys.argv[1])))
start = time.process_time()
REGISTRY.prepare()
print(imported * 1000, (time.process_time() - start) * 1000)
"""


def run(kept: Path) -> tuple[float, float]:
    """Return the milliseconds of the imports, and of making the code with the file ``kept``."""
    env = {**os.environ, "PATCHES_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the file is not written with it
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(kept)], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    imported, made = done.stdout.split()[-2:]
    return float(imported), float(made)


def main() -> None:
    """Run both in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    imports, from_source, from_file = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            kept = Path(folder, f"kept.{number}")
            for times in (from_source, from_file):
                imported, made = run(kept)
                imports.append(imported)
                times.append(made)
    rows = [
        ("import of the stack", imports),
        ("code made from source", from_source),
        ("code read from the file", from_file),
    ]
    print(markdown(("", "ms"), [(name, f"{median(times):.0f}") for name, times in rows]))


if __name__ == "__main__":
    main()
