"""The backward of an INT8 layer reads the layer as it is at that time, not as it was in forward."""

from __future__ import annotations

from ....engine import Finding, Message, Patch
from ....quantized.int8.product_backward import PRODUCT_BACKWARD
from ....quantized.int8.weight_moves import SETTLING


def defect() -> Finding:
    """Give a layer the next weight (streaming of layers) between its forward and its backward."""
    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu")
    other = bnb.nn.Int8Params(torch.randn(64, 64), requires_grad=False).to("cpu")
    x = torch.randn(4, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    y = layer(x).sum()
    layer.weight = other
    with torch.no_grad():
        layer(x)
    (gradient,) = torch.autograd.grad(y, x)
    error = float((gradient - expected).norm() / expected.norm())
    return Finding(error > 1e-2, f"relative error of the gradient {error:.1e}")


PATCH = Patch(
    id="bitsandbytes-int8-backward-live-state",
    summary="backward of an offloaded INT8 layer raises an error; saved-tensor hooks and checkpointing miss its weights",
    groups=("offload", "train"),
    silent=True,
    messages=(Message("'NoneType' object has no attribute 'unsqueeze'", "figure"),),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2034",
    ),
    why="""
        ``MatMul8bitLt`` and ``MatMul8bitFp`` keep the layer's ``MatmulLtState`` on ``ctx``, and read its packed
        weights (``CB``) and row scales (``SCB``) in backward. Any change of the layer in between reaches the
        gradients. accelerate's offload hook clears ``state.SCB`` after every forward, so every backward through an
        offloaded INT8 layer raises ``'NoneType' object has no attribute 'unsqueeze'``. A second forward with other
        weights before the first backward gives wrong gradients. The functions also keep the input on ``ctx``, which
        only the gradient of a weight needs: saved-tensor hooks do not see it, and checkpointing keeps every input
        in memory.

        Upstream: #1927 (offload), #2034 (``save_for_backward``). All releases from 0.46.1.
    """,
    repair="""
        With the repair, forward keeps references to the packed weights and scales that it used, and backward reads
        these. It raises autograd's error if one was changed since, directly or through the weight. Two things are
        saved with ``ctx.save_for_backward``, where hooks see them: offloaded weights, so that checkpointing brings
        them again instead of keeping them on the device (``quantized/saved_for_backward.py``), and what the
        gradient of a weight needs, such as the input. Nothing is copied.

        Off CUDA, ``int8_vectorwise_quant`` sets outliers of a float16 input to zero and restores them. torch then
        assumes that the input was modified, and refuses backward if another operation saved it. The repair passes
        the same memory with its own version counter.

        If the forward ran before the patch was applied, its backward is as it was. If the forward ran with the
        patch and the backward runs after a revert, it takes the original code; for tensors that were saved it
        raises an error.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        SETTLING,  # a hook brings a new weight for each forward, and a new weight settles the state anew
        *PRODUCT_BACKWARD,
    ),
    defect=defect,
)
