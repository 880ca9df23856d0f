"""Find patches by the symptoms that a user sees: in groups, by an error message, or by words that people search for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .engine.patch import Message, Patch

GROUPS = {
    "train": "Training: gradients, memory, checkpointing",
    "from_pretrained": "Loading: quantized layers, and the dtype of the others",
    "compile": "torch.compile and torch.export",
    "offload": "A model that does not fit: layers on the CPU or the disk",
    "save": "Saving, loading and copying",
    "layers": "Layers that crash or compute wrong numbers",
    "merge": "Merging and unmerging adapters",
    "experts": "Mixtures of experts",
    "move": "Casting and moving",
    "shard": "FSDP and distributed checkpoints",
    "cpu": "On a CPU",
}
"""The title of each group by its name, in the order in which groups are shown. A patch is listed in its first."""
FORMER_GROUPS = {"asked": "from_pretrained"}
"""The name of a group by the one that it had in an earlier release. ``PATCHES_DISABLE`` takes both."""
WORDS = {
    "recompile": ("recompiles", "recompilation", "cache_size_limit", "recompile_limit", "torch.compile is slow"),
    "graph break": ("graph breaks", "fullgraph", "torch._dynamo.exc.Unsupported"),
    "OOM (out of memory)": ("oom", "out of memory", "OutOfMemoryError", "memory leak"),
    "loss is nan, or does not fall": (
        "nan",
        "loss is nan",
        "nan loss",
        "loss is inf",
        "loss does not fall",
        "loss does not decrease",
        "loss is 0",
    ),
}
"""Words that people search for, with other spellings. ``Patch.words`` names the ones that lead to the patch."""

ENOUGH_CHARACTERS = 8
"""Shorter pieces of a message find nothing."""
RUN_LENGTH = 5
"""Words in a row that a pasted text and a message must share: part of a long message is enough to find it."""


def group_patches(patches: Iterable[Patch]) -> dict[str, list[Patch]]:
    """Return ``patches``, sorted by id, by the group in which each is listed; only groups that have one."""
    found: dict[str, list[Patch]] = {key: [] for key in GROUPS}
    for patch in sorted(patches, key=lambda patch: patch.id):
        found[patch.groups[0]].append(patch)
    return {key: own for key, own in found.items() if own}


def common_parts(message: Message) -> tuple[str, ...]:
    """Return the parts of ``message`` that everyone sees."""
    return message.parts or (message.text,)


def message_fits(message: Message, pasted: str) -> bool:
    """Tell whether ``pasted`` holds the message, is a piece of it, or shares some words in a row with it."""
    said, wanted = _plain(message.text), _plain(pasted)
    if all(_plain(part) in wanted for part in common_parts(message)):
        return True
    if len(wanted) >= ENOUGH_CHARACTERS and wanted in said:
        return True
    words = said.split()
    runs = (" ".join(words[i : i + RUN_LENGTH]) for i in range(len(words) - RUN_LENGTH + 1))
    return any(f" {run} " in f" {wanted} " for run in runs)


def words_fit(words: str, pasted: str) -> bool:
    """Tell whether ``pasted`` has these words, an entry of :data:`WORDS`, in one of their spellings."""
    wanted = _plain(pasted)
    return any(re.search(rf"\b{re.escape(_plain(each))}", wanted) for each in (words, *WORDS[words]))


def _plain(text: str) -> str:
    return " ".join(text.split()).lower()
