"""The flows of two ranks: cells of ``tests/distributed``, in processes without the plugin and with it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
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


def said(chosen: Collection[str]) -> dict[str, dict[str, str]]:
    """For each cell of ``chosen``, by its name, ``0`` or what the ranks said, without the plugin and with it."""
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for how, plugin in (("unpatched", False), ("patched", True)) if chosen else ():
            here = [cell for cell in chosen if f"/2{'-' if plugin else '+'}/" not in cell]
            train, load = ([cell for cell in here if cell.startswith(part)] for part in ("train", "load"))
            if load:
                _launched(Path(folder), [f"save/{kind}/torch" for kind in KINDS], plugin)
            for names in (train, load):
                for cell, words in _launched(Path(folder), names, plugin).items():
                    found.setdefault(cells()[cell], {})[how] = words
    return found


def _launched(folder: Path, names: Sequence[str], plugin: bool) -> dict[str, str]:
    """For each cell what the two ranks say: ``0`` where both are right, else the first words of one."""
    from tests.distributed.__main__ import environ
    from tests.distributed.launching import launch, together

    if not names:
        return {}
    try:
        said = launch(folder, names, environ(), 2, plugin, timeout=600)
    except RuntimeError as error:  # a rank ended before it answered
        return dict.fromkeys(names, f"no answer: {str(error).splitlines()[-1]}"[:160])
    found = {}
    for cell, answers in said.items():
        words = next((words for _, words in answers if words), "")
        found[cell] = "0" if together(answers) == "right" else f"{together(answers)}: {words}"[:160]
    return found
