"""``python -m tools.gpu``: what the plugin does on a GPU, in minutes, without a network, what is worth most first.

Needs a machine with CUDA, torch, transformers, peft, accelerate and pytest, and the wheels of ``make gpu-wheels``. Builds
the plugin from this checkout and installs it with these wheels into a temporary folder, so that entry points work and
nothing of the machine changes. Every step has a limit and writes its results as it goes into a file of ``--output``;
``run.json`` there says how each step ended, with the end of what it printed. At most eight files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import device as simulated

from . import each_test
from .steps import MINUTES, ROOT, Step, steps

WHEELS = ROOT / ".gpu" / "wheels"
GRACE = 10
"""Seconds from Ctrl-C to the end of a step that is over its limit."""
LEAST = 5
"""Seconds below which no step begins."""
PACKAGE = ("patches", "bnb_patches", "bnb_patches_autoload.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    plan = steps(os.cpu_count() or 1)
    names = ", ".join(step.name for step in plan)
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {names}; default all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--rehearse", action="store_true", help="run it without a GPU: all steps, with tiny models")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.steps if name not in names.split(", ")]:
        return _refuse(f"no step is named {unknown[0]}; there are {names}")
    if options.minutes <= 0:
        return _refuse(f"--minutes must be more than 0, not {options.minutes:g}")
    if not options.rehearse and (problem := _no_wheels() or no_device()):
        return _refuse(problem)
    known = {"run.json", *(step.file for step in plan)}
    there = {path.name for path in options.output.glob("*")}
    if there - known:
        return _refuse(f"{options.output} holds other files, such as {min(there - known)}: name a new folder")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in there:
        (options.output / name).unlink()
    with tempfile.TemporaryDirectory(prefix="bnb-patches-gpu-") as site:
        run = Run(options, began, Path(site))
        if problem := run.install():
            return _refuse(problem)
        for step in plan:
            if not options.steps or step.name in options.steps:
                run.step(step)
    return int(any(step["ended"] != "passed" for step in run.said["steps"].values()))


class Run:
    """The steps of one run, and what is said of them in ``run.json``."""

    def __init__(self, options: argparse.Namespace, began: float, site: Path) -> None:
        self.folder: Path = options.output.resolve()
        self.rehearsed: bool = options.rehearse
        self.began, self.seconds, self.site = began, 60 * options.minutes, site
        self.said: dict[str, Any] = {"minutes": options.minutes, "rehearsed": options.rehearse, "steps": {}}

    def install(self) -> str:
        """Install the plugin and the wheels; what is wrong, empty if nothing is."""
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "source"
            source.mkdir()
            for name in PACKAGE:  # a copy: setuptools leaves folders beside what it builds
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, source / name)
            wheels = [] if self.rehearsed else sorted(map(str, WHEELS.glob("*.whl")))
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
            done = subprocess.run(
                [*pip, "--target", str(self.site), str(source), *wheels], capture_output=True, text=True
            )
        self.said["installed_s"] = round(time.monotonic() - self.began, 1)
        return f"pip cannot install the plugin: {done.stderr}" if done.returncode else ""

    def step(self, step: Step) -> None:
        """Run one, for as long as it may, and write how it ended."""
        left = self.seconds - (time.monotonic() - self.began)
        limit = min(step.seconds * self.seconds / 60 / MINUTES, left - GRACE)
        said = self.said["steps"][step.name] = {"file": step.file, "limit": round(limit, 1), "ended": "not begun"}
        if limit >= LEAST or self.rehearsed and left > GRACE:
            print(f"== {step.name}: {step.text} ({limit:.0f} s)", flush=True)
            said["ended"] = "running"
            self._write()
            started = time.monotonic()
            said["ended"], said["output"] = self._ran(step, limit)
            said["seconds"] = round(time.monotonic() - started, 1)
        took = f" in {said['seconds']:.0f} s" if "seconds" in said else ""
        print(f"   {said['ended']}{took}", flush=True)
        self._write()

    def _ran(self, step: Step, limit: float) -> tuple[str, str]:
        """How it ended, and the end of what it printed."""
        file = self.folder / step.file
        file.touch()
        command = [sys.executable, "-W", "ignore", *step.arguments(self.folder, self.rehearsed)]
        with tempfile.TemporaryFile("w+") as printed, file.open("r+") as kept:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ(step), stdout=kept if step.printed else printed, stderr=printed,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
                ended = "passed" if code == 0 else f"failed, exit code {code}"
            except subprocess.TimeoutExpired:
                ended = "cut off"
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE / 2)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            return ended, printed.read()[-6000:]

    def _environ(self, step: Step) -> dict[str, str]:
        path = os.pathsep.join([str(self.site), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environ = {
            **os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for devices otherwise forbids CUDA in forks
            each_test.VARIABLE: str(self.folder / step.file), **step.environ,
        }  # fmt: skip
        environ.pop("PATCHES_AUTOLOAD", None)
        if self.rehearsed and step.simulated:
            environ[simulated.VARIABLE] = "cuda"
        return environ

    def _write(self) -> None:
        (self.folder / "run.json").write_text(json.dumps(self.said, indent=1) + "\n")


def _no_wheels() -> str:
    if any(WHEELS.glob("bitsandbytes-*.whl")):
        return ""
    return f"there are no wheels in {WHEELS}: run `make gpu-wheels` where there is a network, and bring it"


def no_device() -> str:
    """Why nothing can be measured here; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device; --rehearse runs all steps without one"
    return ""


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
