"""``python -m tests.from_pretrained [WORD ...]``: run every program, and print each that breaks a rule with the plugin.

It is run without the plugin, then with it, on the transformers that is installed; with ``--some N`` only N programs, and
only with the plugin. ``python -m tests.from_pretrained.releases`` does so on older releases.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests import processor

processor.pretend("plain")  # before bitsandbytes is imported

import transformers  # noqa: E402

import patches  # noqa: E402

from .programs import Program, everything, some  # noqa: E402
from .runner import outcome, quiet  # noqa: E402


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.from_pretrained")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--some", type=int, default=0)
    asked = parser.parse_args(arguments)
    quiet()
    chosen = some(asked.some) if asked.some else list(everything())
    chosen = [program for program in chosen if all(word in str(program) for word in asked.words)]
    wrong: dict[Program, list[list[str]]] = {program: [] for program in chosen}
    for patched in (True,) if asked.some else (False, True):
        if patched:
            patches.apply()
        with tempfile.TemporaryDirectory() as folder:
            for program in chosen:
                wrong[program].append(outcome(program, Path(folder)))
    for program, found in wrong.items():
        if found[-1]:
            print(f"{program}: {found[-1][0]} ({len(found[-1])} in all{_before(found)})")
    right = [sum(not found[at] for found in wrong.values()) for at in range(1 if asked.some else 2)]
    print(f"transformers {transformers.__version__}: of {len(chosen)} programs {', '.join(map(str, right))} right"
          f"{' (without the plugin, with it)' if len(right) == 2 else ''}")  # fmt: skip
    return int(right[-1] < len(chosen))


def _before(found: list[list[str]]) -> str:
    return f"; without the plugin {len(found[0])}" if len(found) == 2 else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
