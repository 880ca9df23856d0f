"""Whether the ranks that save or load a checkpoint together all have the plugin.

The first rank, which receives all plans, sees it in them. The others see which ranks have said that they have it: once a
rank has its part of the plan, all ranks have been there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine import Rewrite
from . import rank_agreement

_STATE_OF_4_BITS = re.compile(r"(.*)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)")
_STATE_OF_INT8 = re.compile(r"(.*\.|)(SCB|weight_format)")
_HERE = "checkpoint"
_LACKING = "_patches_lacking"
Step = Callable[..., Any]


def weight_key_of_statistic(key: str) -> str:
    """Return the key of the packed weight whose quantization state ``key`` is a part of; empty if it is none."""
    if found := _STATE_OF_4_BITS.fullmatch(key):
        return found[1]
    return f"{found[1]}weight" if (found := _STATE_OF_INT8.fullmatch(key)) else ""


def ranks_lacking_state(plans: Sequence[set[str]]) -> list[int]:
    """Return the ranks whose plan has a packed weight without its quantization state, which another rank's plan has."""
    statistics = {key: weight for plan in plans for key in plan if (weight := weight_key_of_statistic(key))}
    return [
        rank
        for rank, plan in enumerate(plans)
        if any(key not in plan and weight in plan for key, weight in statistics.items())
    ]


def _message(ranks: list[int], verb: str) -> str:
    return (
        f"bnb-patches is active on some ranks only: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
        f"would not {verb} the quantization state of quantized layers (absmax, SCB). Start all ranks with the same packages and "
        "PATCHES_* variables; patches.check_ranks() says what differs."
    )


def check_saved_by_all(plans: list[Any]) -> list[Any]:
    """Return ``plans`` of all ranks; warn where some lack a quantization state, which another rank saves."""
    if ranks := ranks_lacking_state([{item.index.fqn for item in plan.items} for plan in plans]):
        warnings.warn(_message(ranks, "save"), stacklevel=2)
    return plans


def check_loaded_by_all(plans: list[Any]) -> list[Any]:
    """Return ``plans`` of all ranks; raise where some would keep a quantization state under other packed weights."""
    if ranks := ranks_lacking_state([{item.dest_index.fqn for item in plan.items} for plan in plans]):
        raise RuntimeError(_message(ranks, "load"))
    return plans


def _others(wrapper: Any, state: Mapping[str, Any]) -> list[int]:
    """Return the other ranks of this checkpoint that share a packed weight whose quantization state is in ``state``."""
    import torch.distributed as dist

    weights = {weight for key in state if (weight := weight_key_of_statistic(key))} & state.keys()
    meshes = [state[weight].device_mesh.mesh for weight in weights if hasattr(state[weight], "device_mesh")]
    sharing = {rank for mesh in meshes for rank in mesh.flatten().tolist()}
    return sorted(sharing & {*dist.get_process_group_ranks(wrapper.group or dist.group.WORLD)} - {dist.get_rank()})


def plan_on_rank(wrapper: Any, planner: Any, local_step: Step, global_step: Step) -> tuple[Any, list[int]]:
    """Return this rank's part of the plan, and the ranks that lack the plugin: none on the first rank, which sees the plans.

    Ranks tell each other nothing where no quantized layer is sharded.
    """
    others: list[int] = []

    def here() -> Any:
        plan = local_step()
        if wrapper.use_dist:
            others.extend(_others(wrapper, getattr(planner, "state_dict", {})))
        if others:
            rank_agreement.tell_ranks(_HERE)
        return plan

    plan = wrapper.reduce_scatter("plan", here, global_step)
    return plan, rank_agreement.absent_ranks(_HERE, others) if others and not wrapper.is_coordinator else []


def plan_save(wrapper: Any, planner: Any, local_step: Step, global_step: Step) -> Any:
    """Return the plan of :func:`plan_on_rank`; warn of ranks that lack the plugin."""
    plan, ranks = plan_on_rank(wrapper, planner, local_step, global_step)
    if ranks:
        warnings.warn(_message(ranks, "save"), stacklevel=2)
    return plan


def plan_load(wrapper: Any, planner: Any, local_step: Step, global_step: Step) -> Any:
    """Return the plan of :func:`plan_on_rank`; leave the error to the next step, whose errors reach all ranks."""
    plan, ranks = plan_on_rank(wrapper, planner, local_step, global_step)
    if ranks:
        setattr(planner, _LACKING, ranks)
    return plan


def raise_left_error(planner: Any) -> None:
    """Raise the error that :func:`plan_load` has left."""
    if ranks := getattr(planner, _LACKING, None):
        delattr(planner, _LACKING)
        raise RuntimeError(_message(ranks, "load"))


_PLAN = 'distW.reduce_scatter("plan", local_step, global_step)'

SAME_ON_ALL_RANKS = (
    Rewrite.to_call(
        "torch.distributed.checkpoint.state_dict_saver:_save_state_dict",
        _PLAN,
        plan_save,
        "distW, planner, local_step, global_step",
    ),
    Rewrite.to_call(
        "torch.distributed.checkpoint.state_dict_loader:_load_state_dict",
        _PLAN,
        plan_load,
        "distW, planner, local_step, global_step",
    ),
    Rewrite(
        "torch.distributed.checkpoint._dedup_save_plans:dedup_save_plans",
        find="enumerate(all_plans)",
        replace="enumerate(_patches_saved_by_all(all_plans))",
        names={"_patches_saved_by_all": check_saved_by_all},
    ),
    Rewrite(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.create_global_plan",
        find="create_default_global_load_plan(global_plan)",
        replace="create_default_global_load_plan(_patches_loaded_by_all(global_plan))",
        names={"_patches_loaded_by_all": check_loaded_by_all},
    ),
)
"""Saving and loading, on the first rank and on the others."""
