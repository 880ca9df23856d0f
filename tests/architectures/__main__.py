"""``python -m tests.architectures [WORD ...]``: run what was not run yet, with the plugin, then without it.

Results go into ``docs/architectures.json`` (:mod:`tests.apart`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

from tests import processor
from tests.apart import Found, Judge, Product, quiet, worse
from tools.docs.architectures import RESULTS, is_right, wrong_steps

from .found import Architecture, everything
from .judged import PRECISIONS, judge, plain

SECONDS, PATIENCE = 40, 400
"""Of the processor, and of the clock, for one architecture."""


def product(seconds: int = SECONDS) -> Product:
    """All architectures, with ``seconds`` of the processor for each."""
    return Product({str(each): _judge(each) for each in everything()}, RESULTS, seconds, PATIENCE)


def main(words: list[str]) -> int:
    processor.pretend("plain")  # its kernels compute in float32
    import bitsandbytes  # noqa: F401  (before the fork)
    import peft  # noqa: F401

    quiet()
    every = product()
    every.run(words, is_right, summary)
    results = every.read()
    wrong = [name for name, entry in results.items() if worse(entry, wrong_steps)]
    print(f"transformers {transformers.__version__}: {len(results)} architectures, worse with the plugin: {wrong or 0}")
    return int(bool(wrong))


def _judge(architecture: Architecture) -> Judge:
    def run(folder: Path, found: Found, keep: Any, _: str) -> None:
        original = plain(architecture, folder / "plain")
        found["called with"] = original.how
        for precision in PRECISIONS:
            steps = found[precision] = {}
            for step, wrong in judge(architecture, original, precision, folder / precision):
                steps[step] = wrong
                keep()

    return run


def summary(result: dict[str, Any]) -> str:
    if "not built" in result:
        return f"not built: {result['not built']}"
    wrong = "; ".join(f"{precision} {step}: {text}" for (precision, step), text in wrong_steps(result).items())
    return "; ".join(filter(None, (wrong, result.get("ended", "")))) or f"right ({result['called with']})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
