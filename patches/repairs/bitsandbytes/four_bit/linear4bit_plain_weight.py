"""A 4-bit layer cannot run with a weight that was never quantized: a bare ``AssertionError``.

``Linear4bit.forward`` takes a weight without a quantization state for one that FSDP has wrapped, and asserts that it
has one column, as packed codes do. Two kinds of users put a plain 16- or 32-bit weight there:

- transformers ties ``lm_head`` to the embedding, and ``llm_int8_skip_modules`` replaces the default list that had
  ``lm_head`` in it: the head becomes a ``Linear4bit`` whose weight is that of the embedding;
- a checkpoint with some layers left in 16 bits names them in its list of skipped modules, as transformers 4 called
  them. Where they go by another name today, they become ``Linear4bit`` and get the plain weight of the checkpoint.

All releases. ``Linear8bitLt`` had the same, see ``bitsandbytes-int8-plain-weight``.

The repair computes such a layer as ``nn.Linear``, in the dtype of the input, and leaves weight and layer as they
are, so that a tied embedding stays what it is and learns from both. A plain weight is one of floating point, of
two bytes or more, whose shape is ``(out_features, in_features)``. Packed codes never are, also not those in
floating point storage (FSDP): they have a quarter of the bytes at most. What is neither, and a ``Params4bit`` that
nobody quantized, is refused as before. Whoever has a quantization state, which is every healthy layer, pays for
looking it up: 0.1 us a call.

Upstream: https://github.com/huggingface/transformers/issues/45674, https://github.com/unslothai/unsloth/issues/4208
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....engine import Finding, Patch, Rewrite
from ...helpers.weights import in_place

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit
    from torch import Tensor


def plain_linear(layer: Linear4bit, x: Tensor) -> Tensor:
    """``layer(x)`` as ``nn.Linear`` computes it, in the dtype of ``x``."""
    import torch

    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)


def defect() -> Finding:
    """A head tied to its embedding, as transformers does it."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(32, 64)
    head = Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    head.weight = embedding.weight
    x = torch.randn(4, 64)
    expected = x @ embedding.weight.detach().t()
    try:
        y = head(x)
    except AssertionError:
        return Finding(True, "forward of a tied head: AssertionError")
    error = float((y - expected).norm() / expected.norm())
    return Finding(error > 1e-6, f"relative error of a tied head {error:.1e}")


PATCH = Patch(
    id="bitsandbytes-linear4bit-plain-weight",
    summary="4-bit layers with a plain 16-bit weight (tied heads, old skip lists) raise a bare AssertionError",
    links=(
        "https://github.com/huggingface/transformers/issues/45674",
        "https://github.com/unslothai/unsloth/issues/4208",
    ),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.13", "2.15"),
    edits=(
        # Not `self.weight`: that is a call of Module.__getattr__. Where there is no such parameter the helpers look, of
        # which the one of bitsandbytes does nothing where there is a state.
        Rewrite(
            "bitsandbytes.nn.modules:Linear4bit.forward",
            find="fix_4bit_weight_quant_state_from_module(self)",
            replace="""
                if getattr(self._parameters.get("weight"), "quant_state", None) is None:
                    if _patches_was_never_quantized(self):
                        return _patches_plain_linear(self, x)
                    fix_4bit_weight_quant_state_from_module(self)
            """,
            names={"_patches_was_never_quantized": in_place.was_never_quantized, "_patches_plain_linear": plain_linear},
        ),
    ),
    defect=defect,
)
