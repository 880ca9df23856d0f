"""An INT8 layer that has not run yet breaks compilation, because its forward writes the layer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite
from ....quantized.int8 import row_scales
from ...reproducers.graphs import show_graphs

if TYPE_CHECKING:
    import torch


def traced(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """While tracing, compute ``layer(x)`` without writing anything; return None if that cannot be done."""
    import bitsandbytes as bnb

    state, weight = layer.state, layer.weight
    if state.has_fp16_weights or not row_scales.has_scales(weight):
        return None  # tied, sharded or given by functional_call: the state belongs to another weight
    # The weight first: with `bitsandbytes-int8-scales-lost-on-offload` it shows the scales of the state. So an eager forward in between,
    # which moves them to the state, changes nothing that is read here, and the graph holds. detach(), not .data: an
    # operation that the graph holds too, where torch.export would make a constant of the value that it read.
    scale = row_scales.get_scales(weight)
    if scale is None:
        packed, scale = row_scales.pair_of_product(state)
    else:
        packed = weight.detach()
    if packed is None or scale is None or packed.device != x.device or scale.device != x.device:
        return None
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    product: torch.Tensor = bnb.matmul(x, weight, bias=bias, state=row_scales.make_state(layer, packed, scale))
    return product


def defect() -> Finding:
    """Compile a checkpoint over a layer that has not run yet."""
    import bitsandbytes as bnb
    import torch
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(16, 16, bias=False, has_fp16_weights=False).to("cpu")
    return show_graphs(lambda x: checkpoint(layer, x.sin(), use_reentrant=False), torch.randn(2, 16))


PATCH = Patch(
    id="bitsandbytes-int8-cold-state",
    summary="torch.compile splits the first step of an INT8 model at every layer",
    groups=("compile",),
    messages=(
        Message(
            "HOP: Unsafe side effect: Attempted to mutate UserDefinedObjectVariable(MatmulLtState)",
            "torch/_dynamo/side_effects.py",
            parts=("mutate UserDefinedObjectVariable(MatmulLtState)",),
            holds=("HOP: Unsafe side effect", "Attempted to mutate "),
        ),
        Message(
            "Failed serializing node set_",
            "torch/_export/serde/serialize.py",
            parts=("Failed serializing node set_",),
            holds=("Failed serializing node ",),
        ),
    ),
    words=("recompile", "graph break"),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        The first forward of a ``Linear8bitLt`` moves packed weights and scales from the weight into ``state``, and
        every forward writes ``state.is_training`` and ``weight.data``. Dynamo allows no such write inside a
        checkpoint. So in the first compiled step of a freshly loaded model every decoder layer runs in eager (6
        graphs, 4 breaks). Without checkpointing the second step finds another state than the first, and the model
        is compiled twice. The same happens if the Trainer evaluates in eager between two steps. If the model runs
        once in eager before, none of this is seen. All releases.

        torch.export records these writes too, and the program cannot be saved (``Failed serializing node set_``).
        In training on a CPU, which uses ``MatMul8bitFp``, it also makes a constant of ``state.CB.data``, a tensor
        without values.
    """,
    repair="""
        While compiling or exporting, the repair computes the same product with a temporary state, filled from
        wherever packed weights and scales are. Nothing is written, so the graph is valid for the next step, and a
        program can be saved and loaded without the plugin. A weight that is not quantized yet, or whose scales are
        missing, takes the old path. So do eager calls.
    """,
    requires=("bitsandbytes>=0.46.1", "torch>=2.8"),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Linear8bitLt.forward",
            find="self.state.is_training = self.training",
            replace="""
                if torch.compiler.is_compiling() and (traced := _patches_int8_traced(self, x)) is not None:
                    return traced
                self.state.is_training = self.training
            """,
            names={"_patches_int8_traced": traced},
        ),
        Rewrite(
            "bitsandbytes.autograd._functions:MatMul8bitFp.forward",
            find="state.CB.data",
            replace="state.CB",
            when="bitsandbytes>=0.47",
        ),
    ),
    defect=defect,
)
