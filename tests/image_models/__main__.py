"""``python -m tests.image_models [WORD ...]``: run what was not run yet, with the plugin, then without it.

Results go into ``docs/image_models.json`` (:mod:`tests.apart`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import diffusers

from tests import processor
from tests.apart import Found, Judge, NotBuilt, Product, quiet, worse
from tools.docs.architectures import is_right, wrong_steps
from tools.docs.image_models import RESULTS

from .found import TABLE, USED_MOST, classes
from .judged import LEFT_OUT, judge
from .models import PRECISIONS, Plain

SECONDS, PATIENCE = 90, 400
"""Of the processor, and of the clock, for one class."""


def product(seconds: int = SECONDS) -> Product:
    """All classes, with ``seconds`` of the processor for each."""
    return Product({name: _judge(name, kind) for name, kind in classes().items()}, RESULTS, seconds, PATIENCE)


def main(words: list[str]) -> int:
    processor.pretend("plain")  # its kernels compute in float32
    import bitsandbytes  # noqa: F401  (before the fork)
    import peft  # noqa: F401

    silent()
    every = product()
    every.run(words, is_right, summary)
    results = every.read()
    wrong = {name: places for name, entry in results.items() if (places := worse(entry, wrong_steps))}
    print(f"diffusers {diffusers.__version__}: {len(results)} models, worse with the plugin: {wrong or 0}")
    return int(bool(wrong))


def silent() -> None:
    """Let neither transformers nor diffusers write anything."""
    quiet()
    diffusers.utils.logging.disable_progress_bar()


def _judge(name: str, kind: Any) -> Judge:
    def run(folder: Path, found: Found, keep: Any, way: str) -> None:
        tiny = TABLE.get(name.partition(": ")[2], "nobody has written a tiny configuration of it")
        if isinstance(tiny, str):
            raise NotBuilt(tiny)
        plain = Plain(kind, tiny, folder / "plain")
        for precision in PRECISIONS:
            steps = found[precision] = {}
            left_out = (
                *LEFT_OUT.get(precision, ()),
                *(() if way == "patched" or kind.__name__ in USED_MOST else ("graphs",)),
            )
            for step, wrong in judge(plain, precision, folder / precision, left_out):
                steps[step] = wrong
                keep()

    return run


def summary(result: dict[str, Any]) -> str:
    if "not built" in result:
        return f"not built: {result['not built']}"
    wrong = "; ".join(f"{precision} {step}: {text}" for (precision, step), text in wrong_steps(result).items())
    return "; ".join(filter(None, (wrong, result.get("ended", "")))) or "right"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
