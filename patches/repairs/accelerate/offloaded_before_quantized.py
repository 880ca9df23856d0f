"""A 4-bit layer that is offloaded before it is quantized runs only once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Message, Patch, Rewrite
from ...quantized import accelerate_hooks
from ...quantized.four_bit import quant_states
from ...quantized.weights.parameter_copies import make_like

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module


def move_unquantized(module: Module, name: str, old: Tensor, device: int | str | torch.device, **how: Any) -> Tensor:
    """Return ``old.to(device)``, or the parameter ``name`` of ``module`` on meta and not quantized."""
    import torch

    to_meta = torch.device(device).type == "meta"
    kept = _kept_weights(module, name, old) if to_meta else None
    if kept is None:
        return old if to_meta and old.is_meta else old.to(device, **how)  # not a copy of a tensor that is there already
    # accelerate hands the attributes of the old parameter to the new one.
    module._parameters[name] = make_like(old, old.data, quant_state=None, bnb_quantized=False)
    return torch.empty_like(kept, device="meta")


def _kept_weights(module: Module, name: str, old: Any) -> Tensor | None:
    """Return the floating-point weights that the hook of ``module`` keeps for a parameter that was quantized since."""
    state = quant_states.get_quant_state(old)
    if state is None or quant_states.get_quant_state(module) is not None:
        return None
    for part in accelerate_hooks.hooks_on(module):
        kept: Tensor | None = (getattr(part, "weights_map", None) or {}).get(name)
        if kept is not None and kept.is_floating_point() and kept.shape == state.shape:
            return kept
    return None


def defect() -> Finding:
    """Offload a layer that was just made, and run it twice."""
    import torch
    from accelerate import cpu_offload
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False)
    cpu_offload(layer, execution_device=torch.device("cpu"))
    x = torch.randn(2, 64)
    first = layer(x)
    try:
        error = ((layer(x) - first).norm() / first.norm()).item()
    except (NotImplementedError, RuntimeError) as raised:
        return Finding(True, f"second forward: {str(raised).split(';')[0][:80]}")
    return Finding(not error == 0, f"second forward differs from the first by {error:.1e}")


PATCH = Patch(
    id="accelerate-offloaded-before-quantized",
    summary="a 4-bit layer that was offloaded before it was quantized fails in its second forward",
    groups=("offload",),
    messages=(Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),),
    links=("https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/modeling.py#L345",),
    why="""
        ``Linear4bit`` quantizes when it is moved to a device. Under ``cpu_offload``, ``disk_offload`` and
        ``dispatch_model`` that happens before the first forward, and accelerate keeps what the layer had before:
        the unquantized weight. After the forward it puts the layer on meta as a quantized one, with its
        quantization state. The gradient of that forward is silently computed from uninitialized memory. Before the
        next forward, accelerate casts the unquantized weight to the dtype of packed weights and raises ``Cannot
        copy out of meta tensor; no data!``. accelerate up to 1.15, with any bitsandbytes.
    """,
    repair="""
        The repair puts such a layer on meta as a layer that is not quantized. Every forward then quantizes it
        again, to the same packed weights, and the offloaded copy has the size of the unquantized weight. To avoid
        both, quantize first with ``model.to(device)`` and then offload.

        The repair recognizes such a layer by what its hook keeps: a floating-point tensor in the shape that was
        quantized, which packed weights never have. It looks only at layers that do not know of a quantization of
        their weight.
    """,
    requires=("accelerate>=0.34", "bitsandbytes>=0.46.1"),
    tested_up_to="1.15.0",
    edits=tuple(
        Rewrite.to_call(
            "accelerate.utils.modeling:set_module_tensor_to_device",
            find=f"old_value.to({how})",
            function=move_unquantized,
            arguments=f"module, tensor_name, old_value, {how}",
            when=when,
        )
        for how, when in (("device, non_blocking=non_blocking", "accelerate>=1.9"), ("device", "accelerate<1.9"))
    ),
    defect=defect,
)
