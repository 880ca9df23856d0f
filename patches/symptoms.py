"""By what a user sees: the groups of symptoms, and the messages and words by which a patch is found."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .registry import REGISTRY

GROUPS = {
    "train": "Training: gradients, memory, checkpointing",
    "asked": "Loading: what is quantized, and in which dtype the rest is",
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
"""Words that people search for, and other spellings of them. A patch names those that it is found by."""

_LEAST = 8
"""Characters of a message that are enough to look for it."""
_RUN = 5
"""Words in a row that a pasted text and a message must share: part of a long message is enough to find it."""


@dataclass(frozen=True)
class Said:
    """A message, the parts of it that everyone sees, the patches that it may mean, and strings that prove it."""

    text: str
    parts: tuple[str, ...]
    patches: tuple[str, ...]
    where: str
    holds: tuple[str, ...]

    def fits(self, pasted: str) -> bool:
        """Whether ``pasted`` holds this message, is a piece of it, or shares some words in a row with it."""
        said, wanted = _plain(self.text), _plain(pasted)
        if all(_plain(part) in wanted for part in self.parts) or len(wanted) >= _LEAST and wanted in said:
            return True
        return any(f" {run} " in f" {wanted} " for run in runs_of_words(said))


@dataclass(frozen=True)
class Words:
    """Words that people search for, other spellings of them, and the patches that they may mean."""

    text: str
    also: tuple[str, ...]
    patches: tuple[str, ...]

    def fits(self, pasted: str) -> bool:
        """Whether ``pasted`` has these words, in one of their spellings."""
        wanted = _plain(pasted)
        return any(re.search(rf"\b{re.escape(_plain(each))}", wanted) for each in (self.text, *self.also))


@dataclass(frozen=True)
class Symptoms:
    """All messages and words of the patches, and their groups."""

    messages: tuple[Said, ...]
    words: tuple[Words, ...]

    groups = GROUPS

    def said(self, patch_id: str) -> list[str]:
        """The messages that ``patch_id`` repairs."""
        return [message.text for message in self.messages if patch_id in message.patches]

    def grouped(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """``ids`` by the group in which each is listed; "" for unknown ones."""
        found: dict[str, list[str]] = {key: [] for key in (*GROUPS, "")}
        for patch_id in sorted(ids):
            patch = REGISTRY.patches.get(patch_id)
            found[patch.groups[0] if patch is not None and patch.groups else ""].append(patch_id)
        return {key: own for key, own in found.items() if own}


def runs_of_words(text: str) -> list[str]:
    """Every :data:`_RUN` words of ``text`` that stand in a row."""
    words = text.split()
    return [" ".join(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]


@functools.cache
def read_symptoms() -> Symptoms:
    """Collect the messages and words that the patches declare."""
    messages: dict[str, Said] = {}
    words: dict[str, list[str]] = {text: [] for text in WORDS}
    for patch in REGISTRY.patches.values():
        for text, where, parts, holds in patch.messages:
            before = messages[text].patches if text in messages else ()
            parts = parts or (text,)
            messages[text] = Said(text, parts, (*before, patch.id), where, holds or parts)
        for text in patch.words:
            words[text].append(patch.id)
    in_order = sorted(messages.values(), key=lambda message: message.text.strip("'`").lower())
    return Symptoms(tuple(in_order), tuple(Words(text, WORDS[text], tuple(ids)) for text, ids in words.items()))


def _plain(text: str) -> str:
    return " ".join(text.split()).lower()
