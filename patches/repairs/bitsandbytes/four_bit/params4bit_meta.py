"""Moving one copy of a 4-bit weight to the meta device moves the quantization state of all copies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....engine import Finding, Message, Patch, Rewrite
from ....process import live_objects
from ....quantized.four_bit import quant_states
from ....quantized.weights import meta_weights

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit


def _moves_with(device: torch.device | None, state: QuantState) -> bool:
    """Tell whether the statistics follow a weight to ``device``. If it is repacked, they fit its own bytes only."""
    return device is None or device.type != "meta" or quant_states.is_for_cpu_kernel(state)


def _holds_packed(weight: Params4bit) -> bool:
    """Tell whether ``weight`` need not be quantized any more. Raises if its contents cannot be a weight."""
    state, quantized = quant_states.get_quant_state(weight), quant_states.is_marked_quantized(weight)
    if not quantized or state is None or state.shape is None:
        return quantized
    size = quant_states.packed_bytes(state.shape)
    if weight.shape != state.shape or weight.nbytes == size:
        return True
    if weight.module is not None and any(each is weight for each in weight.module.parameters()):
        return True  # in its layer, also if pruned, so it was not made just now: `.data` was set
    if weight.is_floating_point():
        return False
    raise RuntimeError(
        f"a 4-bit weight of shape {tuple(state.shape)} should hold {size} bytes of packed weights and "
        f"holds {weight.nbytes} bytes of {weight.dtype}: the layer was offloaded before it was quantized, so its "
        "values were cast to the storage dtype. Quantize the model first (model.to(device)), then offload it"
    )


def damage() -> tuple[str, ...]:
    """Name the weights whose statistics went to meta before the patch was applied."""
    from bitsandbytes.nn import Params4bit

    states = map(quant_states.get_quant_state, live_objects.find_instances(Params4bit))
    lost = {id(state): state for state in states if state is not None and state.absmax.is_meta}
    return tuple(
        f"the quantization state of a 4-bit weight of shape {tuple(state.shape)} is on the meta device and lost: "
        "load the model again"
        for state in lost.values()
    )


def defect() -> Finding:
    """Make a skeleton of a model, then save and run the model."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    x = torch.randn(2, 64)
    expected = layer(x)
    skeleton = {name: parameter.to("meta") for name, parameter in layer.named_parameters()}
    try:
        lost = [name for name, saved in layer.state_dict().items() if saved.is_meta]
    except RuntimeError as raised:
        return Finding(True, f"state_dict after {len(skeleton)} parameter to meta: {str(raised).split(';')[0][:80]}")
    if lost:  # the result is uninitialized memory then, which may well be right
        return Finding(True, f"{', '.join(lost)} on meta after a copy of the weight went there")
    error = (layer(x) - expected).norm().item()
    return Finding(not error == 0, f"relative error of the output after a copy of the weight went to meta {error:.1e}")


_TO = "bitsandbytes.nn.modules:Params4bit.to"

PATCH = Patch(
    id="bitsandbytes-params4bit-meta",
    summary="4-bit models cannot be offloaded: moving one copy of a weight to meta drops the quantization state of all copies",
    groups=("offload", "move"),
    messages=(
        Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),
        Message("Tensor.item() cannot be called on meta tensors", "figure"),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1525",),
    why="""
        ``Params4bit.to(device)`` returns a new parameter that shares the ``QuantState`` of the old one, and moves
        that state in place. If the new parameter is on meta, the old one, which keeps its packed weights, loses its
        quantization state. accelerate's ``cpu_offload``, ``disk_offload`` and ``dispatch_model`` keep the packed
        weights, put the layer on meta between two forwards, and raise ``Cannot copy out of meta tensor; no data!``
        in the next forward (#1525, 0.46.1 to 0.50.2). After ``{name: p.to("meta") for name, p in
        model.named_parameters()}``, which makes a skeleton of a model, the model itself cannot be saved, and on a
        CPU returns uninitialized memory.
    """,
    repair="""
        The repair leaves the quantization state where it is if the target is meta, so that code which brings the packed
        weights back finds it.

        A quantization state that stays must not be used with other data. accelerate casts the tensors that it keeps
        to the dtype of the weight on meta. For a layer that was offloaded before it was quantized, these are the
        unquantized values, which are meaningless as uint8. They have the shape of the unquantized weight, which
        packed weights never have, so this is an error now. Unquantized values that were not cast are quantized as
        before. Scales that fit only the layout of the AVX512-BF16 kernel (0.49 and later, without
        ``bitsandbytes-cpu-repack``) still go to meta, and the error stays. Values that a user wrote into the
        weight, ``weight.data = dequantized``, are moved as before.
    """,
    cost="""
        The quantization state stays on the device: 1/8 of the bytes of the packed weights with blocks of 64 values, 1/32
        with double quantization.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            _TO,
            find="self.quant_state is not None",
            replace="self.quant_state is not None and _patches_moves_with(device, self.quant_state)",
            names={"_patches_moves_with": _moves_with},
        ),
        Rewrite(
            _TO,
            find="not self.bnb_quantized",
            replace="not _patches_holds_packed(self)",
            names={"_patches_holds_packed": _holds_packed},
        ),
        *meta_weights.FOUR_BIT,
    ),
    defect=defect,
    damage=damage,
)
