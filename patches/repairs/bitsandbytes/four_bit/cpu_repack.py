"""An eval forward on a CPU with AVX512-BF16 leaves 4-bit weights repacked, and nothing else knows.

Since 0.49.0, ``Linear4bit.forward`` in eval mode overwrites ``weight.data`` with the layout of its
AVX512-BF16 kernel, rounds the scales to bf16 and marks the ``QuantState``. From then on

- ``dequantize_4bit``, ``model.dequantize()`` and peft's merge read the packed bytes as if nothing had
  happened (relative error 1.4);
- a training forward stays on the inference kernel, which has no backward: gradients of the layers before
  it are lost, with a bias it raises ``a view of a leaf Variable … in-place operation``;
- ``state_dict()`` unpacks the live weight, but its inverse leaves the scales of weights that are not
  double-quantized transposed (0.79), and quantizes the others anew;
- ``model.to(device)`` moves the packed bytes to a GPU that cannot read them (#2078);
- shapes that the layout cannot hold raise in eval mode (out_features not a multiple of 32, in_features
  not of the block size), and on 0.49.x so does torch.compile.

The repair keeps the kernel and gives up the bookkeeping: ``weight.data`` and its ``QuantState`` are never
touched. The packed copy is a memo of the canonical weight (see ``helpers/operators/linear_4bit_packed.py``): made in the first
eval forward, checked against storage, address and version of weight and statistics at each use, freed by
the next training forward and together with the weight. Its price is memory: while a model does nothing
but infer, its 4-bit weights are held twice (about 0.53 byte more a weight). Other shapes, and forwards
whose bias wants a gradient, take the way of a processor without the instruction.

A weight that was repacked before the patch was applied, or loaded from a pickle of one, is unpacked by
its next forward or ``state_dict()``. Its codes come back exactly, its scales as the kernel used them,
rounded to bf16 (which is exact for a bf16 weight that is not double-quantized); the report names them.

Upstream: #1804 (the kernel), #2078
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ...helpers import live_objects
from ....engine import CannotShow, Finding, Patch, Rewrite

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

_FORWARD = "bitsandbytes.nn.modules:Linear4bit.forward"
_ASKED = "support_avx512bf16_for_cpu"
_FLAG = "packing_format_for_cpu"
_TILE = 32  # output rows in a tile of the packed layout


def canonical_state(layer: Linear4bit) -> QuantState:
    """The layer's quantization state, unpacked if it was packed; training frees the packed copy."""
    import torch

    weight = layer.weight
    if getattr(weight.quant_state, _FLAG, False):
        from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

        weight.data, weight.quant_state = _convert_weight_packed_for_cpu_inverse(
            weight.data, weight.quant_state
        )
    # Layers that were pickled by an older release have no such attribute.
    if layer.training and getattr(layer, _ASKED, False) and not torch.compiler.is_compiling():
        from ...helpers.operators.linear_4bit_packed import release

        release(weight)
    return weight.quant_state


def restore_scales(state: QuantState) -> bool:
    """Undo what packing did to the scales, as far as their rounding to bf16 allows; never nested again."""
    state.absmax = state.absmax.T.reshape(-1).float()
    state.offset = state.state2 = None
    return False


def packs(x: torch.Tensor, bias: torch.Tensor | None, state: QuantState) -> bool:
    """Whether the packed kernel can compute this product, ``x`` being without gradient."""
    import torch

    rows, columns = state.shape if len(state.shape) == 2 else (0, 0)
    bias_learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    return (
        x.numel() > 0
        and x.shape[-1] == columns
        and rows > 0
        and rows % _TILE == 0
        and columns % state.blocksize == 0
        and not bias_learns
    )


def packed_matmul_4bit(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, quant_state: QuantState
) -> torch.Tensor:
    """``bitsandbytes.matmul_4bit`` by the packed kernel. ``weight`` in either orientation."""
    import torch

    from ...helpers.operators import linear_4bit_packed

    state, nested = quant_state, quant_state.state2
    stats = [state.absmax] if nested is None else [state.absmax, state.offset, nested.absmax, nested.code]
    # As an op only for those who trace: the way through the dispatcher costs more than all the rest.
    eager = type(x) is torch.Tensor and not torch.compiler.is_compiling()
    product = linear_4bit_packed.linear if eager else torch.ops.bnb_patches.linear_4bit_packed
    result = product(
        x, weight, stats, state.code, state.shape, state.blocksize, 0 if nested is None else nested.blocksize
    )
    return result if bias is None else result.add_(bias)


def defect() -> Finding:
    """Evaluate a layer once, then read its weight and train through it, as a Trainer or a merge does."""
    import torch
    from bitsandbytes import functional
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    # Releases that do not ask the processor do not repack.
    if not getattr(functional, "has_avx512bf16", lambda: True)():
        raise CannotShow("this processor has no AVX512-BF16")
    torch.manual_seed(0)
    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.eval()(x)
    after = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    error = ((after.float() - weight.float()).norm() / weight.float().norm()).item()

    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unpatched, autograd says that the kernel has no backward
        layer.train()(x).sum().backward()
    learns = x.grad is not None
    figure = f"dequantized weight off by {error:.2f} after eval, gradient {'there' if learns else 'lost'}"
    return Finding(error > 0 or not learns, figure)


def damage() -> tuple[str, ...]:
    """Weights that were repacked before the patch could prevent it."""
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn import Linear4bit

    if not has_avx512bf16():
        return ()
    packed = [x for x in live_objects.instances(Linear4bit) if getattr(getattr(x.weight, "quant_state", None), _FLAG, False)]
    if not packed:
        return ()
    return (
        f"{len(packed)} Linear4bit weights were repacked by an eval forward before the patch was applied: "
        "their scales are rounded to bfloat16, and their bytes stay packed until the next forward or "
        "state_dict() of each; load the model again before merging or dequantizing it",
    )


PATCH = Patch(
    id="bitsandbytes-cpu-repack",
    summary="an eval forward on an AVX512-BF16 CPU corrupts 4-bit weights for training, merging and saving",
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1804",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2078",
    ),
    requires=("bitsandbytes>=0.49",),
    tested_up_to="0.50.2",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            _FORWARD,
            "quant_state = self.weight.quant_state",
            "quant_state = _patches_canonical_state(self)\n_patches_packed = False",
            names={"_patches_canonical_state": canonical_state},
        ),
        Rewrite(
            _FORWARD,
            "self.weight.data, quant_state = _convert_weight_packed_for_cpu(self.weight.data, quant_state)",
            "_patches_packed = _patches_packs(x, self.bias, quant_state)",
            names={"_patches_packs": packs},
        ),
        Rewrite(
            _FORWARD,
            "bnb.matmul_4bit",
            "(_patches_packed_matmul_4bit if _patches_packed else bnb.matmul_4bit)",
            names={"_patches_packed_matmul_4bit": packed_matmul_4bit},
        ),
        Rewrite(
            "bitsandbytes.functional:_convert_weight_packed_for_cpu_inverse",
            "recovered_state.original_nested",
            "_patches_restore_scales(recovered_state)",
            names={"_patches_restore_scales": restore_scales},
        ),
    ),
    defect=defect,
    damage=damage,
)
