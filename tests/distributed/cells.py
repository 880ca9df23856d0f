"""The tables, and what of them a slice runs. Nothing is imported here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import combinations, product

WRAPS = ("ddp", "fsdp1", "fsdp2")
KINDS = ("nf4-u8", "nf4-bf16", "nf4-f16", "nf4-f32", "fp4", "nested", "int8", "int8-outliers")
VARIATIONS = ("step", "clip", "accumulate", "checkpointing", "compiled")
METHODS = (
    "lora", "dora", "lora_bias", "rslora", "ia3", "adalora", "oft", "boft", "vera", "randlora", "road", "hira", "miss",
    "unilora", "c3a", "hra", "deft", "waveft", "fourier", "peanut", "shira", "delora", "loha", "lokr",
)  # fmt: skip
"""Methods of peft; not PVeRA, whose noise depends on the size of the batch that a rank has."""

EMBEDDINGS = ("nf4-u8", "nf4-bf16", "nf4-f32", "fp4", "int8")
SAVED = ("nf4-u8", "nf4-f32", "nested", "int8")
OPTIMIZERS = ("torch", "AdamW8bit", "Lion8bit", "AdEMAMix8bit", "AdamW")
WORLDS = (0, 1, 2, 3)
"""Ranks; 0 is one process whose model is not sharded."""
WAYS = ("dcp", "async", "partial", "full", "broadcast", "broadcast-lenient", "broadcast-offload")
BASES = ("same", "other")


def training() -> Iterator[str]:
    for wrap, kind, method, variation in product(WRAPS, KINDS, METHODS, VARIATIONS):
        yield f"train/{wrap}/{kind}/{method}/{variation}"


def embeddings() -> Iterator[str]:
    for wrap, kind, policy in product(WRAPS, EMBEDDINGS, ("whole", "mixed")):
        if policy == "whole" or wrap == "fsdp2":
            yield f"embedding/{wrap}/{kind}/{policy}"


def adapters() -> Iterator[str]:
    for kind, method, what in product(SAVED, METHODS, ("save", "merge")):
        yield f"adapters/{kind}/{method}/{what}"


def saving() -> Iterator[str]:
    for kind, optimizer in product(SAVED, OPTIMIZERS):
        yield f"save/{kind}/{optimizer}"


def loading() -> Iterator[str]:
    """Of what was saved by each number of ranks (with ``+`` by ranks with the plugin)."""
    for kind, optimizer, writer, plugin, way, base in product(SAVED, OPTIMIZERS, WORLDS, "-+", WAYS, BASES):
        yield f"load/{kind}/{optimizer}/{writer}{plugin}/{way}/{base}"


def is_written(name: str) -> bool:
    """Whether the writer of a cell of :func:`loading` can train and save.

    Without the plugin no state dict of INT8 layers is made (``'Linear8bitLt' object has no attribute 'SCB'``), and no
    optimizer of bitsandbytes steps on shards.
    """
    _, kind, optimizer, writer, *_ = name.split("/")
    return writer[1] == "+" or (kind != "int8" and (writer == "0-" or optimizer == "torch"))


def in_pairs(names: Iterable[str], seed: int = 0) -> list[str]:
    """A few of ``names`` that have among them whatever two parts occur together; another choice for each ``seed``."""
    rows = [name.split("/") for name in names]
    chance = random.Random(seed)
    chance.shuffle(rows)
    pairs = {"/".join(row): set(combinations(enumerate(row), 2)) for row in rows}
    left, found = set().union(*pairs.values()), []
    while left:
        some = chance.sample(sorted(pairs), min(len(pairs), 200))
        best = max(some, key=lambda name: len(pairs[name] & left))
        left -= pairs.pop(best)
        found.append(best)
    return found


def slice_of_training() -> list[str]:
    """Each wrap with each kind, each kind with each variation, each method in 4 bits and in 8 under FSDP2."""
    found = [f"train/{w}/{k}/lora/step" for w, k in product(WRAPS, KINDS) if w != "fsdp1"]
    found += [f"train/fsdp2/{KINDS[i % len(KINDS)]}/dora/{v}" for i, v in enumerate(VARIATIONS[1:])]
    found += [f"train/fsdp2/{k}/{m}/step" for k, m in product(("nf4-u8", "int8"), METHODS)]
    found += [f"train/fsdp1/{k}/lora/step" for k in ("nf4-f32", "nf4-u8", "int8")]
    found += [f"train/fsdp2/int8/{m}/{v}" for m in ("dora", "hra", "peanut") for v in ("checkpointing", "compiled")]
    return list(dict.fromkeys(found))


def slice_of_adapters() -> list[str]:
    return [f"adapters/{k}/{m}/{w}" for k, m, w in product(("nested", "int8"), ("lora", "dora"), ("save", "merge"))]


def slice_of_embeddings() -> list[str]:
    return [name for name in embeddings() if "/fsdp2/" in name]


SLICE_SAVED = ("save/nf4-u8/torch", "save/nested/torch", "save/nested/AdamW8bit", "save/int8/AdEMAMix8bit")


def slice_of_loading(world: int) -> list[str]:
    """Rows 1 and 3 to 6 of the table of what was found on 1.0.0, and each way with each base."""
    found = [f"load/nested/torch/2+/{way}/{base}" for way, base in product(WAYS, BASES)]
    found += [f"load/nf4-u8/torch/2-/{way}/{base}" for way, base in product(WAYS, BASES)]
    found += [f"load/nested/AdamW8bit/{writer}+/{way}/other" for writer, way in product((0, 1, 2), WAYS)]
    found += [
        f"load/int8/AdEMAMix8bit/{writer}+/{way}/other"
        for writer, way in product((0, 1, 2), ("dcp", "full", "broadcast"))
    ]
    found += [f"load/nested/torch/{writer}/{way}/other" for writer, way in product(("0+", "0-"), ("dcp", "full"))]
    return found
