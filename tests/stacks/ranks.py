"""The flows of two ranks: cells of ``tests/distributed``, in processes without the plugin and with it."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

KINDS = {"nf4-f32": "4-bit", "int8": "INT8"}
WAYS = {"dcp": "DCP", "full": "full state dict"}


def cells() -> dict[str, str]:
    """What the table calls each cell."""
    found = {
        f"train/fsdp2/{kind}/{method}/{variation}": f"{title}: FSDP2, {method.replace('lora', 'LoRA').replace('dora', 'DoRA')}"
        + (f", {variation}" if variation != "step" else "")
        for (kind, title), method, variation in product(
            KINDS.items(), ("lora", "dora"), ("step", "checkpointing", "compiled")
        )
    }
    return found | {
        f"load/{kind}/torch/2{sign}/{way}/other": f"{title}: FSDP2, checkpoint, {WAYS[way]}"
        for kind, title in KINDS.items()
        for way in WAYS
        for sign in "-+"
    }


def said() -> dict[str, dict[str, str]]:
    """For each flow, ``0`` or what the ranks said, without the plugin and with it."""
    from tests.distributed.__main__ import environ
    from tests.distributed.launching import launch, together

    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        for how, plugin in (("unpatched", False), ("patched", True)):
            sign = "+" if plugin else "-"
            here = [cell for cell in cells() if f"/2{'-' if plugin else '+'}/" not in cell]
            saves = [f"save/{kind}/torch" for kind in KINDS]
            for names in (
                [cell for cell in here if cell.startswith("train")],
                saves,
                [c for c in here if f"/2{sign}/" in c],
            ):
                for cell, answers in launch(Path(name), names, environ(), 2, plugin, timeout=600).items():
                    if cell in cells():
                        words = next((words for _, words in answers if words), "")
                        right = together(answers) == "right"
                        found.setdefault(cells()[cell], {})[how] = (
                            "0" if right else f"{together(answers)}: {words}"[:160]
                        )
    return found
