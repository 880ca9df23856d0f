"""What the plugin adds to ``import torch``: ``python -m benchmarks.torch_import``. Two minutes on an idle machine.

Fresh processes in turn, with the entry point and without it. An import of seconds cannot show a millisecond, so the
call that torch makes is timed too, by itself: `torch._import_device_backends`, after an import that has left it out.
All times are those of the processor. Without garbage collection: when it runs shifts with every allocation, and it
takes tens of milliseconds.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from .present import markdown

ROOT = Path(__file__).resolve().parent.parent
IMPORT = "import gc, time; gc.disable(); start = time.process_time(); import torch; print(time.process_time() - start)"
CALL = """
import os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
import importlib.metadata
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
start = time.process_time()
torch._import_device_backends()
print(time.process_time() - start)
"""
POINT = "[torch.backends]\nbnb_patches = bnb_patches_autoload:wait\n"


def install(folder: Path, point: str) -> Path:
    """The plugin as an index would install it, compiled, with the entry point ``point``."""
    for name in ("bnb_patches", "patches"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "bnb_patches_autoload.py", folder)
    info = folder / "bnb_patches-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bnb-patches\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(point)
    compileall.compile_dir(folder, quiet=1)
    return folder


def milliseconds(source: str, folder: Path) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PATCHES_")}
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, env={**env, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout) * 1000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_import", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    pairs = parser.parse_args(argv).pairs
    rows = []
    with tempfile.TemporaryDirectory(prefix="bnb-patches-bench-") as name:
        folders = [install(Path(name) / "without", ""), install(Path(name) / "with", POINT)]
        for what, source in (("import torch", IMPORT), ("the call of the entry points", CALL)):
            for folder in folders:
                milliseconds(source, folder)  # brings the files into memory
            turns = [folders if turn % 2 else folders[::-1] for turn in range(pairs)]
            times: dict[Path, list[float]] = {folder: [] for folder in folders}
            for turn in turns:
                for folder in turn:
                    times[folder].append(milliseconds(source, folder))
            before, after = (times[folder] for folder in folders)
            added = median(b - a for a, b in zip(before, after))
            figures = (median(before), median(after), added, min(after) - min(before))
            rows.append((what, *(f"{ms:.2f}" for ms in figures)))
    head = ("CPU time in ms", "without, median", "with, median", "pairwise difference, median", "of the fastest")
    print(markdown(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
