"""A 4-bit layer whose weight was never quantized raises an ``AssertionError`` without a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....engine import Finding, Message, Part, Patch, Rewrite, SetAttribute
from ....quantized.four_bit import foreign_weights
from ....quantized.weights import dequantized_in_place, meta_weights
from ....quantized.weights.weight_assignment import make_setattr

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit
    from torch import Tensor


def plain_linear(layer: Linear4bit, x: Tensor) -> Tensor:
    """Compute ``layer(x)`` as ``nn.Linear`` does, in the dtype of ``x``."""
    import torch

    meta_weights.refuse_meta_weight(x, layer.weight, torch._C.DisableTorchFunctionSubclass)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)


def _tied_head() -> Linear4bit:
    """Make a head of shape (32, 64) with the weight of an embedding, as transformers does it."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    head = Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    head.weight = torch.nn.Embedding(32, 64).weight
    return head


def defect() -> Finding:
    """Run a tied head."""
    import torch

    head = _tied_head()
    x = torch.randn(4, 64)
    expected = x @ head.weight.detach().t()
    try:
        y = head(x)
    except AssertionError:
        return Finding(True, "forward of a tied head: AssertionError")
    error = float((y - expected).norm() / expected.norm())
    return Finding(error > 1e-6, f"relative error of the output of a tied head {error:.1e}")


def defect_saving() -> Finding:
    """Save a tied head."""
    try:
        _tied_head().state_dict()
    except AttributeError as error:
        return Finding(True, f"state_dict of a tied head: {error}")
    return Finding(False, "state_dict of a tied head finishes")


PATCH = Patch(
    id="bitsandbytes-linear4bit-plain-weight",
    summary="4-bit layers with a plain 16-bit weight (tied heads, old skip lists) raise a bare AssertionError",
    groups=("layers",),
    messages=(Message("assert module.weight.shape[1] == 1", "bitsandbytes/nn/modules.py"),),
    links=(
        "https://github.com/huggingface/transformers/issues/45674",
        "https://github.com/unslothai/unsloth/issues/4208",
    ),
    why="""
        If a weight has no quantization state, ``Linear4bit.forward`` assumes that FSDP has wrapped it, and asserts
        that it has one column, as packed weights do. A plain 16- or 32-bit weight gets there in two ways:

        - transformers ties ``lm_head`` to the embedding, and a ``llm_int8_skip_modules`` of the user replaced the
          default list that named ``lm_head``: the head becomes a ``Linear4bit`` whose weight is the embedding;
        - a checkpoint keeps some layers in 16 bits and lists them under the names of transformers 4. If a layer has
          another name today, it becomes a ``Linear4bit`` and gets the plain weight of the checkpoint.

        All releases. On 0.49.0 saving such a layer raises an error, too: ``'Parameter' object has no attribute
        'quant_state'``. ``bitsandbytes-int8-plain-weight`` repairs the forward of ``Linear8bitLt``.
    """,
    repair="""
        The repair computes such a layer as ``nn.Linear``, in the dtype of the input. It does not change the layer
        or the weight, so a tied embedding stays tied and is trained by both uses. A weight counts as plain if it is
        floating point with at least two bytes and has the shape ``(out_features, in_features)``. Packed weights
        never do, also not in floating-point storage (FSDP): they have a quarter of the bytes at most. Any other
        weight, and a ``Params4bit`` that was not quantized, is refused as before.

        If a program replaces the weight of a layer by the packed weight of another one as a plain tensor, the layer
        computes with its own quantization state, and the output is silently wrong. The repair compares both packed
        weights when the weight is replaced, and the next forward raises an error that names the layer. The layer's own
        packed weights as a plain tensor compute as before.
    """,
    cost="""
        0.1 us a call, for a layer with a quantization state; 0.4 us for each attribute that is set on a layer.
    """,
    parts=(
        Part(
            "forward",
            ("bitsandbytes>=0.46.1",),
            "0.50.2",
            (
                # Not `self.weight`: that is a call of Module.__getattr__. If there is no such parameter, the helpers look, and
                # the one of bitsandbytes does nothing for a weight that has a state.
                Rewrite(
                    "bitsandbytes.nn.modules:Linear4bit.forward",
                    find="fix_4bit_weight_quant_state_from_module(self)",
                    replace="""
                        if getattr(self._parameters.get("weight"), "quant_state", None) is None:
                            if _patches_was_never_quantized(self):
                                return _patches_plain_linear(self, x)
                            _patches_refuse_foreign(self)
                            fix_4bit_weight_quant_state_from_module(self)
                    """,
                    names={
                        "_patches_was_never_quantized": dequantized_in_place.was_never_quantized,
                        "_patches_plain_linear": plain_linear,
                        "_patches_refuse_foreign": foreign_weights.refuse_foreign_weight,
                    },
                ),
                SetAttribute(
                    "bitsandbytes.nn.modules:Linear4bit.__setattr__",
                    make=make_setattr("Linear4bit", foreign_weights.record_replaced_weight),
                ),
            ),
            defect,
        ),
        Part(
            "saving",
            ("bitsandbytes==0.49.0",),
            "0.49.0",
            (
                Rewrite(
                    "bitsandbytes.nn.modules:Linear4bit._save_to_state_dict",
                    find='getattr(self.weight.quant_state, "packing_format_for_cpu", False)',
                    replace="""
                        not _patches_was_never_quantized(self) and getattr(self.weight.quant_state, "packing_format_for_cpu", False)
                    """,
                    names={"_patches_was_never_quantized": dequantized_in_place.was_never_quantized},
                ),
            ),
            defect_saving,
        ),
    ),
)
