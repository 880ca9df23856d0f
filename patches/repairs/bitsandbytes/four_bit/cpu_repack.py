"""On a CPU with AVX512-BF16, an eval forward changes the layout of 4-bit weights, and other code does not know it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....engine import CannotShow, Finding, Message, Patch, Rewrite
from ....process import live_objects, tracing
from ....quantized import accelerate_hooks
from ....quantized.four_bit import block_scales, quant_states

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

_FORWARD = "bitsandbytes.nn.modules:Linear4bit.forward"
PACKED_COPIES = __name__.partition(".repairs.")[0] + ".operators.packed_copies"
_TILE = 32  # output rows in a tile of the packed layout


def restore_scales(state: QuantState) -> bool:
    """Undo the change of the scales by packing, as far as their rounding to bf16 allows; never nested again."""
    state.absmax = state.absmax.T.reshape(-1).float()
    state.offset = state.state2 = None
    return False


def product_for(layer: Linear4bit, x: torch.Tensor, state: QuantState | None) -> Callable[..., torch.Tensor] | None:
    """Return the function that computes an eval forward on ``x`` instead of ``bitsandbytes.matmul_4bit``, or None."""
    import torch

    if state is None or len(state.shape) != 2:
        return None
    shape = state.shape
    # Upstream raises for such weights here: the computation instead would take wrong scales.
    if block_scales.is_misread(shape, state.blocksize):
        return product_by_blocks
    bias_learns = layer.bias is not None and layer.bias.requires_grad and torch.is_grad_enabled()
    if shape[0] % _TILE or shape[1] % state.blocksize or bias_learns:
        return None
    if torch.compiler.is_compiling():
        return traced_product if tracing.for_this_process() else None
    from ....operators import linear_4bit_packed

    if type(x) is not torch.Tensor or linear_4bit_packed.is_watched():
        return product_by_blocks
    return linear_4bit_packed.kernel_for(x, layer.weight, state, accelerate_hooks.hook_of(layer) is not None)


def product_by_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, quant_state: QuantState
) -> torch.Tensor:
    """Compute ``bitsandbytes.matmul_4bit``, where each block has its own scale, in operators that all of torch knows."""
    return block_scales.linear_4bit(x, weight, quant_state, bias)


def traced_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, quant_state: QuantState
) -> torch.Tensor:
    """Compute ``bitsandbytes.matmul_4bit`` by the operator that chooses the kernel when the graph runs."""
    from ....operators import linear_4bit_packed

    state = quant_state
    statistics, nested_blocksize = block_scales.statistics_of(state)
    return linear_4bit_packed.OPERATOR(
        x, weight, statistics, state.code, bias, state.shape, state.blocksize, nested_blocksize, state.quant_type
    )


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
    figure = f"after an eval forward: relative error of the dequantized weight {error:.2f}, gradient {'there' if learns else 'lost'}"
    return Finding(error > 0 or not learns, figure)


def damage() -> tuple[str, ...]:
    """Name the weights that were repacked before the patch could prevent it."""
    from bitsandbytes.functional import has_avx512bf16
    from bitsandbytes.nn import Linear4bit

    if not has_avx512bf16():
        return ()
    states = (quant_states.get_quant_state(layer.weight) for layer in live_objects.find_instances(Linear4bit))
    packed = [state for state in states if quant_states.is_for_cpu_kernel(state)]
    if not packed:
        return ()
    return (
        f"{len(packed)} Linear4bit weights were repacked by an eval forward before the patch was applied: "
        "their scales are rounded to bfloat16, and each weight stays repacked until its next forward or state_dict(). "
        "Load the model again before merging or dequantizing it",
    )


PATCH = Patch(
    id="bitsandbytes-cpu-repack",
    summary="an eval forward on an AVX512-BF16 CPU corrupts 4-bit weights for training, merging and saving",
    groups=("cpu", "layers", "train", "merge", "save", "move"),
    silent=True,
    messages=(
        Message(
            "a view of a leaf Variable that requires grad is being used in an in-place operation.",
            "torch/lib/libtorch_cpu.so",
            parts=("a view of a leaf Variable that requires grad is being used in an in-place operation",),
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1804",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2078",
    ),
    why="""
        Since 0.49.0, ``Linear4bit.forward`` in eval mode overwrites ``weight.data`` with the layout of its
        AVX512-BF16 kernel, rounds the scales to bf16 and marks the ``QuantState``. After that:

        - ``dequantize_4bit``, ``model.dequantize()`` and peft's merge read the new layout as if it were the old one
          (relative error 1.4);
        - a training forward still uses this inference kernel, which has no backward: the layers before it get no
          gradients, and with a bias it raises ``a view of a leaf Variable … in-place operation``;
        - ``state_dict()`` converts the weight back, but leaves scales that are not double-quantized transposed
          (relative error 0.79), and quantizes the other scales a second time;
        - ``model.to(device)`` moves this layout to a GPU that cannot read it (#2078);
        - shapes that the layout cannot hold raise an error in eval mode (out_features not a multiple of 32,
          in_features not a multiple of the block size), and on 0.49.x also under torch.compile.

        Upstream: #1804 (the kernel), #2078
    """,
    repair="""
        The repair keeps the kernel but never changes ``weight.data`` or its ``QuantState``. The kernel multiplies
        by a repacked copy, which belongs to the weight. The copy is made where it saves time: for inputs of few
        rows (decoding), not for large batches, and not for weights that accelerate brings from the disk in each
        forward. If the weight changes with each call, the copy is made less and less often
        (``patches/operators/packed_copies.py``). Before each use the contents of the weight and its scales are
        compared with the contents that the copy was made from, because many ways to write to them do not raise the
        version counter. Of more than 128 KB a sample is compared, which changes with each use, so a small write
        can be missed at first (``docs/limits.md``). The first training forward frees the copy. A copy that a later
        eval forward makes is kept until the weight is freed.

        While compiling, the layer is the operator ``bnb_patches::linear_4bit_packed``. torch.export, whose programs
        are loaded where that operator does not exist, gets the code of a processor without AVX512-BF16. So do other
        shapes, forwards in which the bias needs a gradient, and calls under a tracer, a transform or a mode.

        If a weight was repacked before the patch was applied, or was loaded from a pickle of such a weight, its
        next forward or ``state_dict()`` converts it back, and the report names it. The packed weights come back
        exactly. The scales come back as the kernel used them, rounded to bf16 (exact for a bf16 weight that is not
        double-quantized).
    """,
    cost="""
        A decoding model holds its 4-bit weights twice (about 0.53 byte more for each weight). Comparing the
        contents takes 10 us a call for 512 x 512 and 75 us for 4096 x 11008, whatever the number of threads, and
        two to three times that if other processes use the caches. The repair also calls the kernel directly, which
        saves about as much for small weights: with one row and one thread a call takes 0.75 to 1.04 of the
        unpatched time (``python -m benchmarks.cpu_repack``). If the width is not a multiple of the block size,
        which raises an error unpatched, the layer takes the time of a processor without AVX512-BF16.

        Inputs of many rows (more than 16 for most weights; without AMX 64) are multiplied by the dequantized weight, and so are
        weights that come from the disk. Such outputs are rounded as on other processors, not as by the kernel.
    """,
    requires=("bitsandbytes>=0.49",),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            _FORWARD,
            "quant_state = self.weight.quant_state",
            f"""
                quant_state = _patches_canonical_state(self, torch.compiler.is_compiling, {PACKED_COPIES!r})
                _patches_product = None
            """,
            names={"_patches_canonical_state": quant_states.canonical_state},
        ),
        Rewrite(
            _FORWARD,
            "self.weight.data, quant_state = _convert_weight_packed_for_cpu(self.weight.data, quant_state)",
            "_patches_product = _patches_product_for(self, x, quant_state)",
            names={"_patches_product_for": product_for},
        ),
        Rewrite(
            _FORWARD,
            'self.weight if getattr(quant_state, "packing_format_for_cpu", False) else self.weight.t()',
            "self.weight if _patches_product is not None else self.weight.t()",
            when="bitsandbytes<0.50",
        ),
        Rewrite(_FORWARD, "bnb.matmul_4bit", "(_patches_product or bnb.matmul_4bit)"),
        Rewrite.to_call(
            "bitsandbytes.functional:_convert_weight_packed_for_cpu_inverse",
            "recovered_state.original_nested",
            restore_scales,
            "recovered_state",
        ),
    ),
    defect=defect,
    damage=damage,
)
