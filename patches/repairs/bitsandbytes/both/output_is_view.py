"""The output of a quantized layer cannot be modified in place.

``ReLU(inplace=True)`` behind a layer, peft's C3A, or a ``+=`` in a user's module, in training:
``Output 0 of MatMul8bitLt is a view and is being modified inplace. This view was created inside a custom Function …``,
eager and compiled. With ``nn.Linear`` the same programs run.

The autograd functions of bitsandbytes return views of tensors that nobody else has: ``MatMul8bitLt`` reshapes what
it computed for the rows of a 3-D input, and ``F.linear`` with a bias does the same inside of itself for whatever is not
2-D, in ``MatMul8bitFp`` (from 0.47) and ``MatMul4Bit``. Autograd cannot tell that no base is left that the write would
have to reach, and refuses it; torch 2.15 does not. All releases: INT8 in three dimensions; 4-bit, and INT8 in training on
a CPU, with a bias and not in two.
(#736)

The repair returns the same memory by ``detach()``: a tensor that autograd does not follow back to another, which
it never does inside of a function. No value changes, nothing is copied, a compiler drops it. It costs half a
microsecond where there is a view. Who gave ``out`` gets it back itself.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/736
"""

from __future__ import annotations

from ....engine import Finding, Patch, Rewrite


def defect() -> Finding:
    """An activation in place behind each layer, on (batch, sequence, features)."""
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    torch.manual_seed(0)
    four = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    eight = Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    refused = []
    for name, layer in (("4-bit", four), ("INT8", eight)):
        x = torch.randn(2, 3, 64, requires_grad=True)
        try:
            torch.nn.Sequential(layer, torch.nn.ReLU(inplace=True))(x).sum().backward()
        except RuntimeError as error:
            if "is a view and is being modified inplace" not in str(error):
                raise
            refused.append(name)
    return Finding(bool(refused), f"ReLU(inplace=True) refused after {' and '.join(refused) or 'no'} layers")


_FUNCTIONS = "bitsandbytes.autograd._functions"
# A product without a bias is a view of nothing. Dynamo cannot ask, and drops a detach.
_VIEW = "bias is not None and (torch.compiler.is_compiling() or output._is_view())"

PATCH = Patch(
    id="bitsandbytes-output-is-view",
    summary="ReLU(inplace=True), += and peft's C3A raise an error on the output of a quantized layer",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/736",),
    requires=("bitsandbytes>=0.46.1", "torch<2.15"),
    tested_up_to="0.50.2",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            f"{_FUNCTIONS}:MatMul8bitLt.forward",
            "output.reshape(output_shape)",
            "output.reshape(output_shape).detach()",  # always a view
        ),
        Rewrite(
            f"{_FUNCTIONS}:MatMul8bitFp.forward",
            "return output",
            f"return output.detach() if {_VIEW} else output",
            when="bitsandbytes>=0.47",
        ),
        # Before 0.50 `out` is ignored.
        Rewrite(
            f"{_FUNCTIONS}:MatMul4Bit.forward",
            "return output",
            f"return output.detach() if {_VIEW} else output",
            when="bitsandbytes<0.50",
        ),
        Rewrite(
            f"{_FUNCTIONS}:MatMul4Bit.forward",
            "return output",
            f"return output.detach() if out is None and {_VIEW} else output",
            when="bitsandbytes>=0.50",
        ),
    ),
    defect=defect,
)
