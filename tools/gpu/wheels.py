"""``make gpu-wheels``: what a machine with a GPU and no network needs to run ``make gpu``, in one small folder.

torch, transformers, peft and accelerate are there. What goes in is bitsandbytes with the library of one CUDA version
(a whole wheel holds eighteen of them) and what the suite needs beside the stack.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 64
"""MiB that fit through what carries the folder."""
BESIDE = (
    "packaging",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
    "pluggy",
    "iniconfig",
    "hypothesis",
    "sortedcontainers",
)
LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(?P<kind>[a-z]+)(?P<version>\d*)\.")


def slim(wheel: Path, folder: Path, wanted: Callable[[str], bool]) -> Path:
    """The same wheel without the native libraries that are not ``wanted`` ("cuda128", "cpu"); its RECORD follows.

    Raises ``ValueError``, and writes nothing, if no library for an accelerator is left.
    """
    with zipfile.ZipFile(wheel) as source:
        kept = [name for name in source.namelist() if _stays(name, wanted)]
        if not any((found := LIBRARY.match(name)) and found["kind"] != "cpu" for name in kept):
            there = sorted(
                found["kind"] + found["version"] for name in source.namelist() if (found := LIBRARY.match(name))
            )
            raise ValueError(f"{wheel.name} holds no such library; there are {', '.join(there) or 'none'}")
        with zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as target:
            for name in kept:
                data = source.read(name)
                if name.endswith(".dist-info/RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(line for line in lines if _stays(line.partition(",")[0], wanted)).encode()
                target.writestr(source.getinfo(name), data)
    return folder / wheel.name


def _stays(name: str, wanted: Callable[[str], bool]) -> bool:
    found = LIBRARY.match(name)
    return found is None or wanted(found["kind"] + found["version"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("--bitsandbytes", default="0.50.2", metavar="RELEASE")
    parser.add_argument("--cuda", nargs="+", default=["126", "128", "130"], metavar="VERSION",
                        help="the CUDA versions that torch may be built for on that machine, 12.8 as 128")  # fmt: skip
    parser.add_argument("--python", default="3.12", help="the Python of that machine")
    parser.add_argument("--output", type=Path, default=ROOT / ".gpu" / "wheels", metavar="FOLDER")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for old in options.output.glob("*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                    "--python-version", options.python]  # fmt: skip
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*download, "--dest", scratch, f"bitsandbytes=={options.bitsandbytes}"], check=True)
        subprocess.run([*download, *constraints, "--dest", str(options.output), *BESIDE], check=True)
        (wheel,) = Path(scratch).glob("bitsandbytes-*.whl")
        libraries = {"cpu", *(f"cuda{version}" for version in options.cuda)}
        try:
            slim(wheel, options.output, libraries.__contains__)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    size = sum(path.stat().st_size for path in options.output.iterdir()) / 2**20
    print(
        f"{options.output}: {size:.0f} MiB"
        + (f", over the {LIMIT} that fit: name fewer --cuda" if size > LIMIT else "")
    )
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
