"""The output of a quantized layer cannot be modified in place."""

from __future__ import annotations

from ....engine import Finding, Message, Patch, Rewrite


def defect() -> Finding:
    """Run an activation in place behind each layer, on (batch, sequence, features)."""
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
    return Finding(bool(refused), f"ReLU(inplace=True) raises an error after {' and '.join(refused) or 'no'} layers")


_FUNCTIONS = "bitsandbytes.autograd._functions"
# A product without a bias is a view of nothing. Dynamo cannot ask, and drops a detach.
_VIEW = "bias is not None and (torch.compiler.is_compiling() or output._is_view())"

PATCH = Patch(
    id="bitsandbytes-output-is-view",
    summary="ReLU(inplace=True), += and peft's C3A raise an error on the output of a quantized layer",
    groups=("layers", "train"),
    messages=(
        Message(
            "Output 0 of MatMul8bitLt is a view and is being modified inplace. This view was created inside a custom Function",
            "torch/lib/libtorch_cpu.so",
            parts=("This view was created inside a custom Function",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/736",),
    why="""
        In training, ``ReLU(inplace=True)`` after a quantized layer, peft's C3A, or a ``+=`` in a user's module
        raises ``Output 0 of MatMul8bitLt is a view and is being modified inplace. This view was created inside a
        custom Function …``, in eager mode and compiled. With ``nn.Linear`` the same programs run.

        The autograd functions of bitsandbytes return views. ``MatMul8bitLt`` reshapes the rows of a 3-D input. In
        ``MatMul8bitFp`` (from 0.47) and ``MatMul4Bit``, ``F.linear`` with a bias reshapes inputs that are not 2-D.
        Nothing else uses the base of such a view, but autograd does not know this and refuses the write; torch 2.15
        does not. All releases: INT8 with three dimensions; 4-bit, and INT8 in training on a CPU, with a bias and an
        input that is not 2-D. (#736)
    """,
    repair="""
        The repair returns the same memory through ``detach()``, which gives a tensor that is no view for autograd.
        Inside an autograd function no gradient passes there anyway. No value changes, nothing is copied, and a
        compiler removes the call. If the caller passed ``out``, that tensor itself is returned.
    """,
    cost="""
        Half a microsecond if there is a view.
    """,
    requires=("bitsandbytes>=0.46.1", "torch<2.15"),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            f"{_FUNCTIONS}:MatMul8bitLt.forward",
            "output.reshape(output_shape)",
            "output.reshape(output_shape).detach()",  # always a view
        ),
        *(
            Rewrite(
                f"{_FUNCTIONS}:{function}.forward",
                "return output",
                f"return output.detach() if {condition} else output",
                when=when,
            )
            for function, condition, when in (
                ("MatMul8bitFp", _VIEW, "bitsandbytes>=0.47"),
                ("MatMul4Bit", _VIEW, "bitsandbytes<0.50"),  # there `out` is ignored
                ("MatMul4Bit", f"out is None and {_VIEW}", "bitsandbytes>=0.50"),
            )
        ),
    ),
    defect=defect,
)
