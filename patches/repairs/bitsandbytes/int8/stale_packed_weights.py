"""With ``has_fp16_weights=True``, an INT8 layer goes on computing with the packed weights of an older weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import CannotShow, Finding, Patch, Rewrite
from ....engine.gate import satisfied
from ....process.tensor_bits import fingerprint

if TYPE_CHECKING:
    from torch import Tensor


def _must_quantize(B: Tensor, state: Any) -> bool:
    """Tell whether the packed weights in ``state`` may belong to another weight than ``B``."""
    import torch

    if not state.has_fp16_weights or state.is_training or torch.compiler.is_compiling():
        state._patches_quantized = None
        return True
    known, state._patches_quantized = getattr(state, "_patches_quantized", None), _contents(B)
    return known is None or known != state._patches_quantized


def _contents(weight: Tensor) -> tuple[int, int, int] | None:
    """Return address, size in bytes and checksum of ``weight``; None if they do not identify it."""
    if not weight.is_cpu or not weight.is_contiguous() or not weight.nbytes:
        return None
    return weight.data_ptr(), weight.nbytes, fingerprint(weight)


def defect() -> Finding:
    """Take two training steps, and set the gradients to zero between them."""
    import bitsandbytes as bnb
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not satisfied("bitsandbytes>=0.48"):
        raise CannotShow("before 0.48 no CPU kernel trains such a weight, and there is no CUDA device")
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False).to(device)
    x = torch.randn(8, 64, device=device)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.weight.normal_()
    layer.zero_grad(set_to_none=False)
    expected = x @ layer.weight.detach().t()
    error = float((layer(x).detach() - expected).norm() / expected.norm())
    return Finding(error > 0.05, f"relative error of the output in the second step {error:.1e}")


PATCH = Patch(
    id="bitsandbytes-int8-stale-packed-weights",
    former_ids=("bitsandbytes-int8-stale-codes",),
    summary="with has_fp16_weights=True, zero_grad(set_to_none=False) keeps the old quantized weights in use",
    groups=("train", "layers"),
    silent=True,
    words=("loss is nan, or does not fall",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        Forward quantizes the weight again unless ``weight.grad`` exists: it assumes that gradients are then being
        accumulated. ``zero_grad(set_to_none=False)`` leaves zeros there, so every later step computes with the
        packed weights of the first one. An eval forward uses the packed weights of the last training forward, from
        before the optimizer's step. Both are silent. All releases; before 0.48 such a layer can be trained only on
        an accelerator.
    """,
    repair="""
        The repair quantizes in every training forward (the same weight gives the same packed weights, so right
        results stay bit-identical). In eval it quantizes if the weight differs from the weight of the last eval
        forward. It compares contents, because ``weight.data``, numpy and the optimizer kernels of bitsandbytes
        write without raising version counters. On a CPU it compares a checksum (CRC-32) of the whole weight; two
        weights share one by chance once in 4e9. On other devices it quantizes in each eval forward, because reading
        a checksum would wait for the device.
    """,
    cost="""
        In eval on a CPU 0.23 ms a MB, so 1.9 ms for 2048 x 2048 in bfloat16. Quantizing takes 20 ms there, and a
        product 0.5 ms with one row and 3 ms with 128 rows. On other devices an eval forward quantizes the weight,
        which takes less time than a product.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=tuple(
        Rewrite.to_call(
            f"bitsandbytes.autograd._functions:{function}.forward",
            "state.is_training and not has_grad",
            _must_quantize,
            "B, state",
            when=when,
        )
        for function, when in (("MatMul8bitLt", ""), ("MatMul8bitFp", "bitsandbytes>=0.48"))
    ),
    defect=defect,
)
