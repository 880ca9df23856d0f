"""torch.compile splits the train step at TRL's fused head, and peft's forward runs in eager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers.graphs import show_graphs

if TYPE_CHECKING:
    import torch


def defect() -> Finding:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))  # what SFTTrainer asks for
    ids = torch.arange(8)[None]
    return show_graphs(lambda ids: model(ids, labels=ids, fused_lm_head=True).loss, ids)


def tile(buffer: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the tensor for the product of ``rows`` tokens with ``columns`` of the vocabulary."""
    import torch

    if torch.compiler.is_compiling():
        return buffer.new_empty(rows, columns)
    return buffer[:rows, :columns]


def row_stride(tile: torch.Tensor) -> int:
    """Return ``tile.stride(0)``, which Dynamo does not know while it traces a backward."""
    import torch

    return tile.shape[1] if torch.compiler.is_compiling() else tile.stride(0)


_FUNCTION = "trl.kernels.chunked_logprob:ChunkedLogProbFunction"


def _own_tile(method: str) -> Rewrite:
    return Rewrite.to_call(f"{_FUNCTION}.{method}", "mm_buf[:n, : end - start]", tile, "mm_buf, n, end - start")


PATCH = Patch(
    id="trl-fused-head-tiles",
    summary="torch.compile splits the train step at TRL's fused head, and peft's forward runs in eager",
    groups=("compile",),
    messages=(Message("Attempted to call op with non-contiguous `out=` tensor", "torch/_dynamo/variables/torch.py"),),
    words=("graph break",),
    links=("https://github.com/huggingface/trl/blob/main/trl/kernels/chunked_logprob.py",),
    why="""
        Since 1.16 SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer compute log-probabilities in one
        autograd function, ``ChunkedLogProbFunction``, which projects hidden states tile by tile into a part of one
        buffer. Dynamo refuses two operations on a tile:

        - ``torch.mm(..., out=tile)``: the tile is as wide as the vocabulary, but the buffer is 32768 wide, and a
          graph cannot write a product into a tensor that is not contiguous;
        - ``tile.stride(0)`` in the backward, because Dynamo does not know strides while it traces a backward. It
          starts again with ``grad.contiguous()`` for each incoming gradient, and one of them is None:
          ``AttributeError('contiguous')``.

        The break is inside of peft's ``with self._enable_peft_forward_hooks``, so the frames of peft and of the
        model's own forward run in eager, with everything that they do besides the backbone. The step is 3 graphs
        instead of one.

        Not repaired: 1.15 imports the function only if Triton is installed, so the defect cannot be shown on a CPU.
        1.1 to 1.14 have a function with another name, which breaks the graph anyway because it selects the scored
        positions with a mask first. 1.16 does that too on CUDA and XPU (``hidden_states[mask]``), so there the step
        is at least two graphs.
    """,
    repair="""
        While compiling, the repair makes each tile a contiguous tensor of its own width, with that width as its
        stride: the same product. Eager steps use the buffer.
    """,
    requires=("trl>=1.16", "torch>=2.8"),
    tested_up_to="1.16.0",
    edits=(
        _own_tile("forward"),
        _own_tile("backward"),
        Rewrite.to_call(f"{_FUNCTION}.backward", "tile.stride(0)", row_stride, "tile"),
    ),
    defect=defect,
)
