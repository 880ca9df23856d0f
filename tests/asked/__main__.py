"""Run every program without the plugin and with it, and print each that breaks a rule: ``python -m tests.asked [WORD ...]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import transformers

import patches

from .programs import Program, everything
from .runner import outcome, quiet


def main(words: list[str]) -> int:
    quiet()
    chosen = [program for program in everything() if all(word in str(program) for word in words)]
    wrong: dict[Program, list[list[str]]] = {program: [] for program in chosen}
    for patched in (False, True):
        if patched:
            patches.apply()
        with tempfile.TemporaryDirectory() as folder:
            for program in chosen:
                wrong[program].append(outcome(program, Path(folder)))
    for program, (before, after) in wrong.items():
        if after:
            print(f"{program}: {after[0]} ({len(after)} in all; without the plugin {len(before)})")
    right = [sum(not found[at] for found in wrong.values()) for at in (0, 1)]
    print(
        f"transformers {transformers.__version__}: of {len(chosen)} programs {right[0]} right as is, {right[1]} patched"
    )
    return int(right[1] < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
