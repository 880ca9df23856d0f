"""An INT8 weight whose scales were lost is quantized a second time, as if its packed weights were values."""

from __future__ import annotations

from ....engine import CannotShow, Finding, Message, Patch
from ....process import live_objects
from ....quantized.int8 import row_scales
from ....quantized.int8.weight_moves import KEEP_PACKED_WEIGHT


def _damage() -> tuple[str, ...]:
    """Name the layers whose packed weights were quantized a second time: every scale is 127 exactly."""
    from bitsandbytes.nn import Linear8bitLt

    found = []
    for layer in live_objects.find_instances(Linear8bitLt):
        _, scale = row_scales.pair_of_product(layer.state)
        if not layer.state.has_fp16_weights and not row_scales.is_lost(scale) and bool((scale == 127).all()):
            found.append(
                f"{row_scales.name_of(layer)}: its packed INT8 weights were quantized a second time; load weight and SCB again"
            )
    return tuple(found)


def defect() -> Finding:
    """Run a layer under accelerate's offload hook twice, and the same layer without the hook."""
    import bitsandbytes as bnb
    import torch

    try:
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    except ImportError:
        raise CannotShow("the reproducer needs accelerate, which is not installed") from None

    def quantized() -> bnb.nn.Linear8bitLt:
        torch.manual_seed(0)
        return bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()

    x = torch.randn(4, 64)
    expected = quantized()(x)
    layer = add_hook_to_module(quantized(), AlignDevicesHook(torch.device("cpu"), offload=True))
    try:
        outputs = [layer(x), layer(x)]
    except (AttributeError, NotImplementedError) as error:
        return Finding(True, f"forward of an offloaded layer: {error}")
    off = max(float((y - expected).norm() / expected.norm()) for y in outputs)
    return Finding(off > 1e-2, f"relative error of the output {off:.1e}")


PATCH = Patch(
    id="bitsandbytes-int8-scales-lost-on-offload",
    former_ids=("bitsandbytes-int8-requantized-codes",),
    summary="an INT8 weight without SCB is quantized a second time: outputs are 2000 times too large",
    groups=("layers", "offload", "save"),
    silent=True,
    messages=(Message("'NoneType' object has no attribute 'dtype'", "figure"),),
    words=("loss is nan, or does not fall",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        If the packed weights (``CB``) or row scales (``SCB``) of a quantized layer are missing, forward calls
        ``int8_vectorwise_quant`` on whatever the weight holds. Packed weights stay the same, but every scale
        becomes 127: outputs are off by a factor of about 2000, without an error. Programs reach this in two ways.
        accelerate's offload hook brings a weight back without its scales. And ``Int8Params.to`` itself quantizes
        again on 0.46.1, or drops the scales on 0.47.0 (so that transformers loads INT8 checkpoints wrongly there).

        Upstream: #1927, which proposes ``SCB = CB.abs().amax(1) / 127``. That is 1.0 for every row.
    """,
    repair="""
        The repair never computes a scale. ``init_8bit_state`` takes it from where it is (the weight, accelerate's
        offloaded weights, the state that holds these packed weights) and also stores it on the weight, so that both
        move together. Packed weights are never quantized. If a weight has no scales anywhere, an error names the
        layer. 0.48.0 and 0.48.1 raise an error in the forward of an offloaded layer. There the repair of its
        backward, ``bitsandbytes-int8-backward-live-state``, is part of this patch.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=KEEP_PACKED_WEIGHT,
    defect=defect,
    damage=_damage,
)
