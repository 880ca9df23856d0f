"""A quantized layer with an integer input computes in integers and returns integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ....engine import Finding, Message, Patch, Rewrite
from ....quantized.int8 import row_scales

if TYPE_CHECKING:
    from torch import Tensor


def refuse_of_state(x: Tensor, state: Any) -> Any:
    """Raise for integers ``x`` if ``state`` is that of a ``Linear8bitLt``; return ``state``, which is None without a layer."""
    if state is not None:
        refuse(row_scales.layer_of(state), x)
    return state


def refuse(layer: Any, x: Tensor) -> NoReturn:
    """Raise, because ``layer`` cannot compute with integers ``x``."""
    which = "matmul" if layer is None else f"{type(layer).__name__} {row_scales.name_of(layer)!r}"
    raise TypeError(
        f"{which} expected a floating-point input, got {x.dtype}. If the model casts activations to the dtype of this "
        "layer's weight, which is the dtype of packed weights, do not quantize the layer: add its name to "
        "llm_int8_skip_modules."
    )


def defect() -> Finding:
    """Cast activations to the dtype of the weight, as the code of a model does, in a 4-bit layer."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    layer.to("cpu")
    x = torch.randn(2, 64)
    try:
        out = layer(x.to(layer.weight.dtype))
    except TypeError as error:
        return Finding(False, str(error).partition(".")[0])
    return Finding(True, f"an input of torch.uint8 is accepted, the output is {out.dtype}")


_ASKED = "self.compute_dtype is not None"

PATCH = Patch(
    id="bitsandbytes-integer-input",
    former_ids=("bitsandbytes-whole-numbers",),
    summary="4-bit layers accept integer activations, and return wrong outputs where a model casts to weight.dtype",
    groups=("from_pretrained", "layers"),
    silent=True,
    messages=(
        Message(
            "result type Float can't be cast to the desired output type Byte",
            "torch/lib/libtorch_cpu.so",
            parts=(" can't be cast to the desired output type ",),
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/longt5/modeling_longt5.py#L293",
    ),
    why="""
        Model files cast activations to the dtype of the next layer's weight (``x.to(self.wo.weight.dtype)``). The
        weight of a 4-bit layer is ``torch.uint8``, so the activations lose their fractions and signs. The layer
        accepts them, and there is no message (LongT5 in 4 bits: outputs are off by 1.5 of their norm).
        ``nn.Linear`` raises an error for integers. An INT8 layer does too, without naming the layer: ``result type
        Float can't be cast to the desired output type Byte``. 0.46.1 to 0.50.2.
    """,
    repair="""
        With the repair, ``Linear4bit`` and ``Linear8bitLt`` raise an error that names the layer.
    """,
    cost="""
        A look at the dtype in each forward.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Linear4bit.forward",
            find=_ASKED,
            replace=f"(x.dtype.is_floating_point or _patches_refuse_integers(self, x)) and {_ASKED}",
            names={"_patches_refuse_integers": refuse},
        ),
        Rewrite(
            "bitsandbytes.autograd._functions:matmul",
            find="state or MatmulLtState()",
            replace="(state if A.dtype.is_floating_point else _patches_refuse_of_state(A, state)) or MatmulLtState()",
            names={"_patches_refuse_of_state": refuse_of_state},
        ),
    ),
    defect=defect,
)
