"""An INT8 layer cannot run with a weight that is not an ``Int8Params``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite, SetAttribute
from ....quantized.int8 import plain_weights, row_scales, scale_ownership
from ....quantized.weights import meta_weights
from ....quantized.weights.module_moves import follow_moves
from ....quantized.weights.weight_assignment import make_setattr

if TYPE_CHECKING:
    from torch import Tensor


def _plain_forward(layer: Any, x: Tensor) -> Tensor:
    """Run the forward of ``layer`` with a weight that carries no packed weights or scales of its own."""
    import bitsandbytes as bnb
    import torch

    weight, bias = layer.weight, layer.bias
    meta_weights.refuse_meta_weight(x, weight, torch._C.DisableTorchFunctionSubclass)
    if bias is not None:
        bias = bias.to(x.dtype)
    if weight.is_floating_point() and not layer.state.has_fp16_weights:
        plain_weights.refuse_packed_values(layer, weight)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
    own = () if weight.is_floating_point() else (weight.detach(), plain_weights.find_scale_of_plain(layer, weight))
    product: Tensor = bnb.matmul(x, weight, bias=bias, state=row_scales.make_state(layer, *own))
    return product


def _record_quantized(layer: Any, old: dict[str, Any], address: int) -> None:
    plain_weights.record_quantized_to(layer)


def defect() -> Finding:
    """Tie a head to its embedding, as transformers does it."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(32, 64)
    head = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    head.weight = embedding.weight
    x = torch.randn(4, 64)
    expected = x @ embedding.weight.detach().t()
    try:
        y = head(x)
    except AttributeError as error:
        return Finding(True, f"forward of a tied head: {error}")
    off = float((y - expected).norm() / expected.norm())
    return Finding(off > 1e-2, f"relative error of the output of a tied head {off:.1e}")


_LAYER = "bitsandbytes.nn.modules:Linear8bitLt"

PATCH = Patch(
    id="bitsandbytes-int8-plain-weight",
    summary="INT8 layers crash with tied, sharded or functional weights: 'Parameter' object has no attribute 'CB'",
    groups=("layers", "shard"),
    messages=(Message("'Parameter' object has no attribute 'CB'", "figure"),),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1634",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",
    ),
    why="""
        ``Linear8bitLt.forward`` reads ``self.weight.CB``, but other code puts plain tensors there. transformers
        ties ``lm_head`` to the embedding if ``llm_int8_skip_modules`` does not name it (#1634). FSDP2 replaces
        every parameter. ``functional_call`` uses the tensors that it is given. In all three cases forward raises
        ``'Parameter' object has no attribute 'CB'``. All releases.
    """,
    repair="""
        The repair gives such a weight its own forward, which leaves layer and weight as they were (the normal path
        would write packed weights into the embedding that the head is tied to). A plain floating-point weight is
        not quantized: the layer computes as ``nn.Linear``, or, with ``has_fp16_weights``, quantizes it for the
        call, as always. A plain int8 tensor uses the scales of this layer. FSDP2 drops the quantized weight, so the
        layer stores these scales as soon as it gets one.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            f"{_LAYER}.forward",
            "if self.weight.CB is not None:\n    self.init_8bit_state()",
            """
            _patches_weight = self._parameters.get("weight")  # an attribute of a module takes 0.6 us
            if _patches_weight is None:
                _patches_weight = self.weight
            if not hasattr(_patches_weight, "CB"):
                return _patches_plain_forward(self, x)
            if _patches_weight.CB is not None:
                self.init_8bit_state()
            """,
            names={"_patches_plain_forward": _plain_forward},
        ),
        scale_ownership.SCALES_OF_THE_LAYER,
        SetAttribute(f"{_LAYER}.__setattr__", make=make_setattr("Linear8bitLt", plain_weights.keep_replaced_weight)),
        follow_moves("Linear8bitLt", settle=_record_quantized),
    ),
    defect=defect,
)
