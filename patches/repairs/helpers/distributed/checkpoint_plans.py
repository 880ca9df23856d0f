"""Whether the ranks that save or load a checkpoint together all have the plugin: told by their plans, on the first rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from ....engine import Rewrite

_OF_4_BITS = re.compile(r"(.*)\.(absmax|quant_state\.bitsandbytes__\w+)")
_OF_INT8 = re.compile(r"(.*\.|)SCB")


def _weight_of(key: str) -> str:
    """The packed weight that is read with ``key``; empty if that is no quantization state."""
    if found := _OF_4_BITS.fullmatch(key):
        return found[1]
    return f"{found[1]}weight" if (found := _OF_INT8.fullmatch(key)) else ""


def lacking(plans: Sequence[set[str]]) -> list[int]:
    """The ranks whose plan has a packed weight and lacks its quantization state, where another rank's plan has that."""
    statistics = {key: weight for plan in plans for key in plan if (weight := _weight_of(key))}
    return [
        rank
        for rank, plan in enumerate(plans)
        if any(key not in plan and weight in plan for key, weight in statistics.items())
    ]


def _message(ranks: list[int]) -> str:
    return (
        f"bnb-patches is active on some ranks only: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
        "would not {} the quantization state of quantized layers (absmax, SCB). Start all ranks with the same packages and "
        "PATCHES_* variables; patches.check_ranks() says what differs."
    )


def saved_by_all(plans: list[Any]) -> list[Any]:
    """``plans`` of all ranks, with a warning where some lack a quantization state; another rank saves it."""
    if ranks := lacking([{item.index.fqn for item in plan.items} for plan in plans]):
        warnings.warn(_message(ranks).format("save"), stacklevel=2)
    return plans


def loaded_by_all(plans: list[Any]) -> list[Any]:
    """``plans`` of all ranks, or an error where some would keep a quantization state under other packed weights."""
    if ranks := lacking([{item.dest_index.fqn for item in plan.items} for plan in plans]):
        raise RuntimeError(_message(ranks).format("load"))
    return plans


SAME_ON_ALL_RANKS = (
    Rewrite(
        "torch.distributed.checkpoint._dedup_save_plans:dedup_save_plans",
        find="enumerate(all_plans)",
        replace="enumerate(_patches_saved_by_all(all_plans))",
        names={"_patches_saved_by_all": saved_by_all},
    ),
    Rewrite(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.create_global_plan",
        find="create_default_global_load_plan(global_plan)",
        replace="create_default_global_load_plan(_patches_loaded_by_all(global_plan))",
        names={"_patches_loaded_by_all": loaded_by_all},
    ),
)
"""The first rank looks at the plans of all."""
