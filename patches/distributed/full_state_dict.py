"""Loading a full state dict on all ranks from rank 0, where it has more than parameters and buffers (torch #149516)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

from ..engine import Rewrite
from ..quantized.four_bit import quant_states
from ..quantized.int8 import row_scales
from ..quantized.own_packed_weights import has_bits_of
from . import checkpoint_plans, rank_agreement

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_TARGET = "torch.distributed._state_dict_utils:_broadcast_state_dict"
_MOVE = "local_state_dict[key] = local_state_dict[key].cpu()"
_MARK = "bnb_patches"


class WatchedWeights:
    """The packed weights that one broadcast may overwrite without sending their quantization state."""

    def __init__(self, model: Module) -> None:
        self.layers = {id(layer.weight): layer for layer in _sharded_layers(model)}
        self.snapshots: list[tuple[Any, Tensor]] = []
        call = next(_CALLS)
        self.plugin_present, self.weights_unchanged = f"plugin present/{call}", f"weights unchanged/{call}"
        self.took_quant_states = False
        rank_agreement.tell_ranks(self.plugin_present)

    def take_snapshot(self, key: str, sent: dict[str, Any], weight: Any) -> None:
        """Keep a copy of ``weight``, if ``key`` was sent without its quantization state."""
        layer = self.layers.get(id(weight))
        if layer is None or key not in sent:
            return
        if sent[key].dtype != weight.dtype:
            raise RuntimeError(
                f"{type(layer).__name__} {row_scales.name_of(layer)!r} stores its packed weight as {weight.dtype}, and rank 0 "
                f"sends {sent[key].dtype}. A cast would destroy the weight, so nothing was loaded. Quantize the model with "
                f"quant_storage={sent[key].dtype} (bnb_4bit_quant_storage)."
            )
        if (key.removesuffix("weight") + "SCB" if _is_int8(layer) else key + ".absmax") not in sent:
            self.snapshots.append((layer, weight.to_local().detach().clone()))

    def restore_and_raise_if_changed(self) -> None:
        """If a packed weight has changed on any rank, restore the weights on every rank and raise there."""
        if self.took_quant_states and (ranks := rank_agreement.silent_ranks(self.plugin_present)):
            warnings.warn(
                f"Ranks {ranks} seem to run without bnb-patches: they would drop the quantization states that rank 0 sends. "
                "Call patches.check_ranks() on every rank.",
                stacklevel=2,
            )
        if not self.snapshots:
            return
        changed = [layer for layer, old in self.snapshots if not has_bits_of(layer.weight.to_local().detach(), old)]
        if rank_agreement.all_agree(not changed, self.weights_unchanged, self.plugin_present):
            return
        for layer, old in self.snapshots:
            layer.weight.to_local().detach().copy_(old)
        layer = changed[0] if changed else self.snapshots[0][0]
        raise RuntimeError(
            f"{type(layer).__name__} {row_scales.name_of(layer)!r}: rank 0 sent packed weights without their "
            "quantization state (absmax, SCB), and they differ from those of this model. No packed weight was changed on "
            "any rank. The state dict was saved sharded without bnb-patches: load it into a model that was "
            "quantized from the same base weights, and save it again."
        )


_WATCHED: ContextVar[WatchedWeights | None] = ContextVar("_WATCHED", default=None)
_CALLS = count()


def _is_int8(layer: Any) -> bool:
    from bitsandbytes.nn import Linear8bitLt

    return isinstance(layer, Linear8bitLt)


def _sharded_layers(model: Module) -> Iterator[Any]:
    """Yield the quantized layers of ``model`` whose weight FSDP2 has sharded."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for layer in model.modules():
        if not hasattr(getattr(layer, "weight", None), "to_local"):
            continue
        if isinstance(layer, Linear4bit) and quant_states.get_quant_state(layer) is not None:
            yield layer
        elif isinstance(layer, Linear8bitLt) and layer.weight.dtype == torch.int8:
            yield layer


def watch_broadcast(model: Module, broadcast: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``broadcast``: it raises if it overwrites packed weights whose quantization state it does not send."""

    def run(*args: Any, **options: Any) -> None:
        watched = WatchedWeights(model)
        token = _WATCHED.set(watched)
        try:
            broadcast(*args, **options)
        except BaseException:
            rank_agreement.give_up(watched.weights_unchanged)
            raise
        finally:
            _WATCHED.reset(token)
        watched.restore_and_raise_if_changed()

    return run


def mark_sent_keys(sent: dict[str, Any]) -> dict[str, Any]:
    """Add a marker to the keys that rank 0 sends: it runs the plugin. Ranks without the plugin ignore it."""
    return {**sent, _MARK: True} if sent else sent


def take_quant_states(sent: dict[str, Any], local: dict[str, Any]) -> None:
    """Let ``local``, the parameters and buffers of this rank, take quantization states that rank 0 sends as well."""
    import torch

    if sent and sent.pop(_MARK, None) is None:
        warnings.warn(
            "Rank 0 runs without bnb-patches and this rank runs with it: call patches.check_ranks() on every rank, and "
            "start all of them with the same packages and PATCHES_* variables.",
            stacklevel=2,
        )
    took = False
    for key in sent:
        if key in local:
            continue
        if checkpoint_plans.weight_key_of_statistic(key) in local:
            local[key] = torch.empty(0)  # the sent tensor takes its place
            took = True
    if (watched := _WATCHED.get()) is not None:
        watched.took_quant_states = took
        for key, weight in local.items():
            watched.take_snapshot(key, sent, weight)


SKIP_UNKNOWN_KEYS = Rewrite(
    _TARGET,
    find=_MOVE,
    replace=f"if key in local_state_dict:\n    {_MOVE}",
    count=2,
    when="torch>=2.7",
)
"""With ``cpu_offload``, move to the CPU what the sharded model has, and leave the rest to ``load_state_dict``."""

TAKE_STATISTICS = (
    Rewrite(_TARGET, "[ret]", "[_patches_marked(ret)]", names={"_patches_marked": mark_sent_keys}, when="torch>=2.6"),
    Rewrite(
        _TARGET,
        "ret = broadcast_list[0]",
        "ret = broadcast_list[0]\n_patches_take(ret, local_state_dict)",
        names={"_patches_take": take_quant_states},
        when="torch>=2.6",
    ),
)
"""The other ranks keep the quantization states that rank 0 sends."""

WATCH_PACKED_WEIGHTS = Rewrite.to_call(
    "torch.distributed.checkpoint.state_dict:_load_model_state_dict",
    "_broadcast_state_dict",
    watch_broadcast,
    "model, _broadcast_state_dict",
)
"""Packed weights that are sent without a quantization state must be equal to the model's own; else every rank raises."""
