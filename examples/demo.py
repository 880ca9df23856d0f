"""``make demo``: what the stack does without the plugin, and with it, with the same program.

    python examples/demo.py

Makes a small Llama on disk and runs `examples/finetune.py` on it in two processes, one of which has the plugin
switched off by PATCHES_AUTOLOAD=0. A minute on two cores; no GPU and no network are needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import DEVICE, fast_dtype, quiet, save_llama

PROGRAM = Path(__file__).with_name("finetune.py")
PACKAGES = ("bitsandbytes", "torch", "transformers", "peft", "accelerate")
Figures = dict[str, dict[str, Any]]


def main() -> int:
    begin = time.perf_counter()
    quiet()
    print(", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES))
    print(
        f"{os.cpu_count()} cores, {DEVICE}, {str(fast_dtype()).removeprefix('torch.')}.\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_llama(base := Path(folder) / "base", hidden=256, layers=6, dtype=fast_dtype())
        with ThreadPoolExecutor() as pool:
            without, repaired = pool.map(lambda plugin: figures(base, plugin), (False, True))
    for title, said in TASKS:
        print(title)
        for word, each in (("without", without), ("with", repaired)):
            text = each[said.__name__].get("error", "").partition(" If you want")[0] or said(each[said.__name__])
            print(textwrap.fill(text, width(), initial_indent=f"  {word:<9}", subsequent_indent=" " * 11))
        print()
    print(
        f"Program: examples/finetune.py, run twice: with PATCHES_AUTOLOAD=0 and without; {time.perf_counter() - begin:.0f} s."
    )
    print("Read on: README.md; `.venv/bin/python -m patches report` says what is repaired here,")
    print('`.venv/bin/python -m patches explain "MESSAGE"` what an error message means.')
    return 0 if right(without, repaired) else 1


def figures(base: Path, plugin: bool) -> Figures:
    """What the program says of each task, in a process with the plugin or without."""
    env = {**os.environ, "PATCHES_AUTOLOAD": str(int(plugin))}
    done = subprocess.run([sys.executable, str(PROGRAM), str(base)], capture_output=True, text=True, env=env)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"task"')]
    if done.returncode:
        raise SystemExit(f"{PROGRAM} failed:\n{done.stderr}")
    return {line.pop("task"): line for line in lines}


def does_not_fit(said: dict[str, Any]) -> str:
    return (
        f"loss {said['first']:.2f} -> {said['last']:.2f} in {said['steps']} steps of {said['seconds']:.2f} s of processor time, with "
        f"{said['away']:.1f} of {said['total']:.1f} MB of weights on disk; the saved adapter, loaded on such a model "
        f"and on one that is whole in memory: outputs differ by {said['difference']}"
    )


def compiled(said: dict[str, Any]) -> str:
    return f"{said['graphs']} graphs, {said['breaks']} graph breaks, first step {said['seconds']:.0f} s of processor time".replace(
        "1 graphs", "1 graph"
    )


def four_bit_t5(said: dict[str, Any]) -> str:
    return f"outputs differ from those in full precision by {said['off']:.0%} of their norm; no message"


TASKS = (
    ("1. 4-bit LoRA on a model that does not fit: `max_memory` leaves half of its layers on disk", does_not_fit),
    ("2. 4-bit QLoRA with gradient checkpointing under torch.compile", compiled),
    ("3. LongT5 loaded in 4 bits", four_bit_t5),
)


def right(without: Figures, repaired: Figures) -> bool:
    """Whether all went right with the plugin."""
    first = repaired["does_not_fit"]
    return (
        not any("error" in each for each in repaired.values())
        and first["last"] < first["first"]
        and first["difference"] == 0
        and repaired["compiled"]["graphs"] == 1
        and repaired["four_bit_t5"]["off"] < 0.5
    )


def width() -> int:
    return min(shutil.get_terminal_size((110, 24)).columns, 110)


if __name__ == "__main__":
    sys.exit(main())
