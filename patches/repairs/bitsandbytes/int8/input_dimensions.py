"""An INT8 layer raises an error for an input of four or more dimensions, which ``nn.Linear`` accepts."""

from __future__ import annotations

from ....engine import Finding, Message, Patch, Rewrite


def defect() -> Finding:
    """Run an INT8 layer in eval mode on (batch, heads, sequence, features), and a backward."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False).to("cpu").eval()
    x = torch.randn(2, 4, 8, 64, requires_grad=True)
    try:
        output = layer(x)
        output.sum().backward()
    except (RuntimeError, ValueError) as error:
        return Finding(True, str(error))
    off = float((output - layer(x.flatten(0, 2)).view_as(output)).norm() / output.norm())
    return Finding(
        not off < 1e-6 or x.grad is None, f"relative difference of the output from that of each row alone {off:.0e}"
    )


_LT = "bitsandbytes.autograd._functions:MatMul8bitLt"

PATCH = Patch(
    id="bitsandbytes-int8-input-dimensions",
    summary="an INT8 layer raises an error for inputs of four dimensions (WavLM, ProphetNet, Aya Vision)",
    groups=("layers",),
    messages=(
        Message(
            "Only two or three dimensional matrices are supported for argument A", "bitsandbytes/backends/cuda/ops.py"
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/autograd/_functions.py",),
    why="""
        ``MatMul8bitLt`` flattens an input of three dimensions, and passes any other to kernels for two: ``The size
        of tensor a (8) must match the size of tensor b (64)`` on a CPU, ``Only two or three dimensional matrices
        are supported`` on CUDA. Models with such a layer fail in INT8: WavLM (its position bias), ProphetNet, Aya
        Vision, Cohere2 Vision, GOT-OCR2, HY-V4 and others. On a CPU only in eval mode. All releases; compiled
        graphs of the plugin accepted such inputs already.
    """,
    repair="""
        The repair flattens all leading dimensions of the input and of the gradient. Inputs of one to three
        dimensions take the old path.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(f"{_LT}.forward", "len(A.shape) == 3", "len(A.shape) > 2"),
        Rewrite(f"{_LT}.forward", "len(input_shape) == 3", "len(input_shape) > 2"),
        Rewrite(f"{_LT}.backward", "len(grad_output.shape) == 3", "len(grad_output.shape) > 2"),
    ),
    defect=defect,
)
