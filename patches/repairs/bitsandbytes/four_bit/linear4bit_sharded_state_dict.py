"""The state dict of a 4-bit layer that FSDP2 has sharded lacks its quantization state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....distributed.full_state_dict import SKIP_UNKNOWN_KEYS, TAKE_STATISTICS
from ....engine import CannotShow, Finding, Patch, SetAttribute
from ....quantized.four_bit import foreign_weights, quant_states
from ....quantized.four_bit.quant_state_dict import bytes_of_packed_weight, read_quantized_weight
from ....quantized.four_bit.quant_state_names import NESTED, OWN, packed_key
from ....quantized.own_packed_weights import is_own_packed_weight

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit


def saving(original: Callable[..., None]) -> Callable[..., None]:
    """``Linear4bit._save_to_state_dict`` that also finds the state of a sharded weight."""

    def _save_to_state_dict(self: Linear4bit, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        state = quant_states.get_quant_state(self)
        foreign_weights.refuse_foreign_weight(self)
        if state is not None and _is_sharded(self):
            _lend(state, self.weight)
            original(self, destination, prefix, keep_vars)
        else:
            original(self, destination, prefix, keep_vars)

    return _save_to_state_dict


def loading(original: Callable[..., None] | None) -> Callable[..., None]:
    """``Linear4bit._load_from_state_dict`` that also takes the statistics of a sharded weight."""
    from bitsandbytes.nn.modules import Linear4bit

    def _load_from_state_dict(
        self: Linear4bit,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        load = super(Linear4bit, self)._load_from_state_dict if original is None else partial(original, self)
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        weight = prefix + "weight"
        if _is_sharded_tensor(state_dict.get(weight)) and not _is_sharded(self):
            # Between forward and backward the weight is whole; a hook that FSDP2 has put into the load of
            # nn.Module shards it again. Nothing to load, so nothing but the hook happens.
            load({}, prefix, local_metadata, False, [], [], [])
        if not _is_sharded(self) or weight not in state_dict:
            load(state_dict, prefix, *rest)
            return
        statistics = {k[len(weight) + 1 :]: v for k, v in state_dict.items() if k.startswith(weight + ".")}
        try:
            state = _statistics(self, state_dict[weight], statistics)
        except ValueError as error:
            error_msgs.append(f"The sharded 4-bit weight {weight!r} was not loaded and not changed: {error}")
            return
        known = len(error_msgs)
        load({k: v for k, v in state_dict.items() if not k.startswith(weight + ".")}, prefix, *rest)
        if len(error_msgs) == known:
            quant_states.set_quant_state(state, self)

    return _load_from_state_dict


def _is_sharded(layer: Linear4bit) -> bool:
    """Whether FSDP2 has taken the weight of a quantized layer and left its state behind on the layer."""
    return quant_states.get_quant_state(layer) is not None and _is_sharded_tensor(layer.weight)


def _is_sharded_tensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # the program that sharded has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _lend(state: QuantState, weight: Any) -> None:
    """Make the names of the state dict attributes of ``weight``."""
    quant_states.set_quant_state(state, weight)
    for names, source in ((OWN, state), (NESTED, state.state2)):
        for name, attribute in names.items():
            setattr(weight, name, getattr(source, attribute, None))


def _statistics(layer: Linear4bit, codes: torch.Tensor, saved: dict[str, torch.Tensor]) -> QuantState:
    """The state that ``codes`` are to be read with. Raises ``ValueError`` if it cannot be known."""
    import torch

    own = quant_states.get_quant_state(layer)
    if saved:
        if not any(key.startswith("quant_state.") for key in saved):
            raise ValueError("the state dict lacks 'weight.quant_state.bitsandbytes__...'")
        if own is not None and codes.dtype != layer.weight.dtype:  # torch copies them into the layer's by value
            raise ValueError(
                f"its packed weights have dtype {codes.dtype}, the layer's quant_storage is {layer.weight.dtype}"
            )
        stand_in = torch.empty(1, dtype=torch.uint8).expand(
            bytes_of_packed_weight(layer)
        )  # the packed weights are loaded by torch
        return read_quantized_weight(layer, {"": stand_in, **saved}, assign=False)[1]
    if own is None or not is_own_packed_weight(codes, layer.weight):
        raise ValueError(
            "the state dict has packed weights without their quantization state ('weight.absmax' ...), and they differ from "
            "the packed weights of this layer. A sharded model was saved without bnb-patches: load it into a model that was "
            "quantized from the same base weights"
        )
    return own


def defect() -> Finding:
    import tempfile

    import torch
    import torch.distributed as dist
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def sharded(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
        try:
            model: torch.nn.Module = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
            return model
        except RuntimeError as error:  # torch 2.8
            if "floating point dtype can require gradients" not in str(error):
                raise
            raise CannotShow("FSDP2 of this torch cannot shard integer weights") from error

    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            trained, fresh = sharded(0), sharded(1)
            x = torch.randn(2, 64)
            try:
                trained.state_dict()
            except AttributeError as error:
                return Finding(True, f"state_dict: {error}")
            set_model_state_dict(fresh, get_model_state_dict(trained))
            off = ((fresh(x) - trained(x)).norm() / trained(x).norm()).item()
        finally:
            dist.destroy_process_group()
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
        SetAttribute(
            "bitsandbytes.nn.modules:Linear4bit._save_to_state_dict",
            make=saving,
            over="super()._save_to_state_dict(destination, prefix, keep_vars)",
        ),
        SetAttribute("bitsandbytes.nn.modules:Linear4bit._load_from_state_dict", make=loading),
        SetAttribute("bitsandbytes.functional:QuantState.__getattr__", value=packed_key, keep=True),
        SKIP_UNKNOWN_KEYS,  # with statistics in it, a full state dict has more than parameters
        *TAKE_STATISTICS,
    ),
    defect=defect,
)
