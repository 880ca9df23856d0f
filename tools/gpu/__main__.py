"""``make gpu``: the suite, every reproducer, the demo and the benchmarks on a CUDA device, without a network.

Installs nothing but the wheels of ``make gpu-wheels``, into a folder of this checkout. Every step runs, whatever the
one before said; the exit code is 1 if one failed. Figures go to ``benchmarks/results/cuda*``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".gpu" / "wheels"
SITE = ROOT / ".gpu" / "site"
STEPS = {
    "suite": ("-m", "pytest", "-q", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"),
    "verify": ("-m", "patches", "verify"),
    "demo": ("examples/demo.py",),
    "benchmarks": ("-m", "benchmarks", "--rounds", "5"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; default all")
    options = parser.parse_args(argv)
    if unknown := [step for step in options.steps if step not in STEPS]:
        return _refuse(f"no step is named {unknown[0]}; there are {', '.join(STEPS)}")
    if not any(WHEELS.glob("bitsandbytes-*.whl")):
        return _refuse(f"there are no wheels in {WHEELS}: run `make gpu-wheels` where there is a network, and bring it")
    if problem := _no_gpu():
        return _refuse(problem)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*install, "--target", str(SITE), *map(str, sorted(WHEELS.glob("*.whl")))], check=True)
    codes = {step: _run(step) for step in options.steps or STEPS}
    for step, (code, took) in codes.items():
        print(f"{step:<12} {'passed' if code == 0 else f'failed, exit code {code}'} in {took:.0f} s")
    return int(any(code for code, _ in codes.values()))


def _no_gpu() -> str:
    """Why nothing can be measured here; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return ""


def _run(step: str) -> tuple[int, float]:
    """Exit code and seconds of one step; what it prints is shown."""
    print(f"\n== {step}", flush=True)
    path = os.pathsep.join([str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environ = {**os.environ, "PYTHONPATH": path, "PATCHES_AUTOLOAD": "0", "TOKENIZERS_PARALLELISM": "false"}
    started = time.monotonic()
    code = subprocess.run([sys.executable, *STEPS[step]], env=environ, cwd=ROOT).returncode
    return code, time.monotonic() - started


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
