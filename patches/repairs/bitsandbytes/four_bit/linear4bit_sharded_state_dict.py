"""The state dict of a 4-bit layer that FSDP2 has sharded lacks its quantization state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....distributed.dtensors import is_sharded
from ....distributed.full_state_dict import SKIP_UNKNOWN_KEYS, TAKE_STATISTICS
from ....engine import Finding, Patch, SetAttribute
from ....quantized.four_bit import foreign_weights, quant_states
from ....quantized.four_bit.quant_state_dict import bytes_of_packed_weight, read_quantized_weight
from ....quantized.four_bit.quant_state_names import NESTED, OWN, packed_key
from ....quantized.layer_methods import Load, wrap_method
from ....quantized.own_packed_weights import is_own_packed_weight
from ...reproducers.process_group import one_rank, shard_quantized

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit


def _save_to_state_dict(layer: Linear4bit, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save ``layer`` with the quantization state that it keeps of a sharded weight."""
    foreign_weights.refuse_foreign_weight(layer)
    if (state := _state_of_sharded(layer)) is not None:
        _lend(state, layer.weight)
    save(*args, **kwargs)


def _load_from_state_dict(layer: Linear4bit, *args: Any, **kwargs: Any) -> None:
    """Load ``layer``, and the quantization state of a sharded weight."""
    load = Load(*args, **kwargs)
    weight, state_dict = load.prefix + "weight", load.state_dict
    if is_sharded(state_dict.get(weight)) and _state_of_sharded(layer) is None:
        # Between forward and backward the weight is whole; a hook that FSDP2 has put into the load of
        # nn.Module shards it again. Nothing to load, so nothing but the hook happens.
        load._replace(strict=False, missing_keys=[], unexpected_keys=[], error_msgs=[]).run({})
    if _state_of_sharded(layer) is None or weight not in state_dict:
        load.run()
        return
    statistics = {k[len(weight) + 1 :]: v for k, v in state_dict.items() if k.startswith(weight + ".")}
    try:
        state = _state_for(layer, state_dict[weight], statistics)
    except ValueError as error:
        load.error_msgs.append(f"The sharded 4-bit weight {weight!r} was not loaded and not changed: {error}")
        return
    known = len(load.error_msgs)
    load.run({k: v for k, v in state_dict.items() if not k.startswith(weight + ".")})
    if len(load.error_msgs) == known:
        quant_states.set_quant_state(state, layer)


def _state_of_sharded(layer: Linear4bit) -> QuantState | None:
    """Return the quantization state that ``layer`` has kept if FSDP2 has sharded its packed weight; else None."""
    state = quant_states.get_quant_state(layer)
    return state if state is not None and is_sharded(layer.weight) else None


def _lend(state: QuantState, weight: Any) -> None:
    """Make the names of the state dict attributes of ``weight``."""
    quant_states.set_quant_state(state, weight)
    for names, source in ((OWN, state), (NESTED, state.state2)):
        for name, attribute in names.items():
            setattr(weight, name, getattr(source, attribute, None))


def _state_for(layer: Linear4bit, packed: torch.Tensor, saved: dict[str, torch.Tensor]) -> QuantState:
    """Return the quantization state of the ``packed`` weights: the ``saved`` one, or the layer's if they are its own.

    Raises ``ValueError`` if it cannot be known.
    """
    import torch

    own = quant_states.get_quant_state(layer)
    if saved:
        if not any(key.startswith("quant_state.") for key in saved):
            raise ValueError("the state dict lacks 'weight.quant_state.bitsandbytes__...'")
        if own is not None and packed.dtype != layer.weight.dtype:  # torch copies them into the layer's by value
            raise ValueError(
                f"its packed weights have dtype {packed.dtype}, the layer's quant_storage is {layer.weight.dtype}"
            )
        # torch loads the packed weights themselves; here their number is enough.
        stand_in = torch.empty(1, dtype=torch.uint8).expand(bytes_of_packed_weight(layer))
        return read_quantized_weight(layer, {"": stand_in, **saved}, assign=False)[1]
    if own is None or not is_own_packed_weight(packed, layer.weight):
        raise ValueError(
            "the state dict has packed weights without their quantization state ('weight.absmax' ...), and they differ from "
            "the packed weights of this layer. A sharded model was saved without bnb-patches: load it into a model that was "
            "quantized from the same base weights"
        )
    return own


def defect() -> Finding:
    """Save a sharded layer, and load it into a fresh one."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    layers: list[Any] = []
    with one_rank() as mesh:
        for seed in (0, 1):
            torch.manual_seed(seed)
            layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
            shard_quantized(layer, mesh)
            layers.append(layer)
        trained, fresh = layers
        x = torch.randn(2, 64)
        try:
            trained.state_dict()
        except AttributeError as error:
            return Finding(True, f"state_dict: {error}")
        set_model_state_dict(fresh, get_model_state_dict(trained))
        off = ((fresh(x) - trained(x)).norm() / trained(x).norm()).item()
    return Finding(
        off > 0, f"relative error of the output {off:.3f} after saving sharded and loading into a fresh model"
    )


PATCH = Patch(
    id="bitsandbytes-linear4bit-sharded-state-dict",
    summary="checkpoints of 4-bit models under FSDP2 lack the quantization state; loading one gives wrong weights silently",
    groups=("shard", "save"),
    silent=True,
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1405",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1946",
    ),
    why="""
        ``fully_shard`` replaces the ``Params4bit`` of a layer by a ``DTensor`` without ``quant_state``; the layer
        keeps what its forward needs. ``Linear4bit._save_to_state_dict`` looks only at the weight, so absmax and the
        rest are silently left out in every release (0.46.1 to 0.50.2; 0.49.0 raises ``'DTensor' object has no
        attribute 'quant_state'`` in ``state_dict()``). A checkpoint of such a model (DCP, or a full state dict
        gathered on rank 0) loads into a fresh model without a message. Its packed weights are then read with the
        quantization state of that model, which is right only if both were quantized from the same weights.
    """,
    repair="""
        The repair gives the ``DTensor`` the layer's quantization state while a state dict is made, under the names
        that ``torch.distributed.checkpoint.state_dict`` reads with ``getattr``, and reads it from the state dict on
        loading. Each rank saves and holds the whole quantization state, as in forward; only packed weights are
        sharded. Packed weights without a quantization state are accepted if they equal the layer's (an older
        checkpoint, resumed over the same base). Otherwise they raise an error. So does saving a layer that
        ``bitsandbytes-linear4bit-plain-weight`` has seen to hold the packed weights of another one.

        ``set_model_state_dict(broadcast_from_rank0=True)`` sends everything in the file of rank 0, and the other
        ranks keep only parameters and buffers. With the repair they keep the quantization states too. Without the
        plugin, torch rejects the quantization states of a full state dict in a sharded model, also of one that a
        single process wrote: docs/limits.md has the options that load it.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        wrap_method(
            "Linear4bit",
            "_save_to_state_dict",
            _save_to_state_dict,
            original_contains="super()._save_to_state_dict(destination, prefix, keep_vars)",
        ),
        wrap_method("Linear4bit", "_load_from_state_dict", _load_from_state_dict),
        SetAttribute("bitsandbytes.functional:QuantState.__getattr__", value=packed_key, keep=True),
        SKIP_UNKNOWN_KEYS,  # with statistics in it, a full state dict has more than parameters
        *TAKE_STATISTICS,
    ),
    defect=defect,
)
