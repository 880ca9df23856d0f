"""``python -m benchmarks.merges``: what merging one adapter takes, unpatched and patched in turn. A minute and a half.

One quantized layer of 1024x1024, one thread, processor time. In each round every adapter is merged and unmerged four times.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .cost import quiet
from .present import markdown, write

HIDDEN = 1024
TARGET = 1.3
"""Times of a merge, patched over unpatched, at most."""
KINDS = ("NF4", "INT8")
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "VeRA": ("VeraConfig", {}),
    "RandLoRA": ("RandLoraConfig", {}),
    "HRA": ("HRAConfig", {}),
}
"""By the method's name: peft's configuration class, and what it is given beside ``target_modules``."""
STATES = ("unpatched", "patched")


def measure(seconds: float) -> dict[str, dict[str, Any]]:
    """By adapter and kind, for each of ``STATES``: the ``seconds`` of each merge, and the class of the ``error`` it ended in."""
    import patches

    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for state, change in zip(STATES, (patches.revert, patches.apply)):
            change()
            for kind in KINDS:
                for adapter in ADAPTERS:
                    row = found.setdefault(f"{kind}, {adapter}", {s: {"seconds": [], "error": ""} for s in STATES})
                    merged, error = _merge(kind, adapter)
                    row[state]["seconds"] += merged
                    row[state]["error"] = row[state]["error"] or error
    patches.revert()
    return found


def _merge(kind: str, adapter: str) -> tuple[list[float], str]:
    """Seconds of four merges of a new model, and the class of the error that one ended in."""
    import peft

    config, given = ADAPTERS[adapter]
    model = peft.get_peft_model(_model(kind), getattr(peft, config)(target_modules=["linear"], **given)).base_model
    seconds, error = [], ""
    for _ in range(4):
        begin = time.process_time()
        try:
            model.merge_adapter()
        except Exception as refused:
            error = type(refused).__name__
        seconds.append(time.process_time() - begin)
        with contextlib.suppress(Exception):  # what was not merged
            model.unmerge_adapter()
    return seconds, error


def _model(kind: str) -> Any:
    """A model of one layer, as ``from_pretrained`` marks it."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    model: Any = torch.nn.Module()
    if kind == "INT8":
        model.linear = bnb.nn.Linear8bitLt(HIDDEN, HIDDEN, False, has_fp16_weights=False)
        model.is_loaded_in_8bit = True
    else:
        model.linear = bnb.nn.Linear4bit(HIDDEN, HIDDEN, False, compute_dtype=torch.float32, quant_type="nf4")
        model.is_loaded_in_4bit = True
    return model.to("cpu").eval()


def table(data: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, row in data.items():
        times = {state: row[state]["seconds"] for state in STATES}
        ms = [f"{median(times[state]) * 1000:.1f}" for state in STATES]
        ends = [row[state]["error"] or "merged" for state in STATES]
        same = f"{median(times['patched']) / median(times['unpatched']):.2f}" if ends[0] == ends[1] else ""
        rows.append((name, *ms, same, *ends))
    return markdown((f"merge, {HIDDEN}x{HIDDEN}, CPU ms", *STATES, f"ratio (target {TARGET})", *STATES), rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merges", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="to go on beginning rounds (default 90)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a merge into 8 bits says that it rounds
    quiet()
    data = measure(options.seconds)
    write(options.output / "merges", data, table(data))
    print(table(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
