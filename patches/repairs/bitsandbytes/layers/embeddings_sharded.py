"""A quantized embedding cannot run under FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Message, Patch, Rewrite, SetAttribute
from ....quantized.four_bit import quant_states
from ....quantized.int8 import row_scales
from ....quantized.weights.weight_assignment import make_setattr
from ...reproducers.training import one_rank, shard_quantized

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = "_patches_scales_of_sharded"


def _is_shard_of(weight: Any, old: Any) -> bool:
    """Tell whether ``weight`` is what FSDP2 makes of the weight ``old``."""
    return hasattr(weight, "_local_tensor") and old is not None and weight.shape == old.shape


def _note_storage(layer: Any, old: Any) -> None:
    weight = layer._parameters.get("weight")
    if quant_states.is_packed(old) and _is_shard_of(weight, old):
        layer.quant_storage = weight.dtype


def _note_scales(layer: Any, old: Any) -> None:
    weight = layer._parameters.get("weight")
    if old is None or weight is None:
        return
    if row_scales.has_scales(weight):
        vars(layer).pop(_SCALES, None)
    elif row_scales.is_int8(old) and row_scales.has_scales(old) and _is_shard_of(weight, old):
        setattr(layer, _SCALES, row_scales.get_scales(old))


def find_scales(layer: Any) -> Tensor | None:
    """Return the row scales of an ``Embedding8bit``: of its weight, or of the weight that FSDP2 took."""
    weight = layer.weight
    if row_scales.has_scales(weight):
        return row_scales.get_scales(weight)
    kept: Tensor | None = vars(layer).get(_SCALES)
    return None if kept is None else kept.to(weight.device)


def defect() -> Finding:
    """Run each embedding under ``fully_shard``."""
    import torch
    from bitsandbytes.nn import Embedding8bit, EmbeddingNF4

    ids, refused = torch.tensor([[1, 2, 3]]), []
    with one_rank() as mesh:
        for make in (EmbeddingNF4, Embedding8bit):
            layer = make(8, 64, dtype=torch.float32).requires_grad_(False).to("cpu")
            expected = layer(ids)
            shard_quantized(layer, mesh)
            try:
                if not torch.equal(layer(ids), expected):
                    refused.append(f"{make.__name__}: other numbers")
            except (AttributeError, RuntimeError) as error:
                refused.append(f"{make.__name__}: {error}")
    return Finding(bool(refused), "; ".join(refused) or "both embeddings give the outputs of one process")


PATCH = Patch(
    id="bitsandbytes-embeddings-sharded",
    summary="Embedding4bit and Embedding8bit crash in their first forward under FSDP2",
    groups=("shard", "layers"),
    messages=(
        Message(
            "Embedding layer is not quantized. Please call .cuda() or .to(device) first.", "bitsandbytes/nn/modules.py"
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1563",),
    why="""
        ``fully_shard`` replaces the weight of a layer by a ``DTensor``, and in each forward by a plain parameter.
        Like ``Linear4bit``, ``Embedding4bit`` keeps its quantization state on the layer, but not the storage dtype
        that is needed to read it: ``'EmbeddingNF4' object has no attribute 'quant_storage'``. ``Embedding8bit`` has
        its row scales only on the weight, and asks the user to quantize a layer that is quantized already:
        ``Embedding layer is not quantized. Please call .cuda() or .to(device) first.`` Every rank fails in its
        first forward. All releases.

        Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1563 (storage dtypes of linear layers
        for FSDP)
    """,
    repair="""
        When FSDP2 takes the weight, the repair stores on the layer the values that it lacks: the storage dtype, and
        for INT8 the row scales, complete on every rank. Only packed weights are sharded. Any other plain tensor in
        the place of the weight raises an error as before, because nothing shows that the scales of the layer belong
        to it.

        bitsandbytes cannot save these layers (``NotImplementedError``), sharded or not. Save only the adapters, or
        keep the embedding in 16 bits.
    """,
    cost="""
        Nothing outside of FSDP2.
    """,
    requires=("bitsandbytes>=0.46.1", "torch>=2.6"),
    tested_up_to="0.50.2",
    edits=(
        *(
            SetAttribute(f"bitsandbytes.nn.modules:{owner}.__setattr__", make=make_setattr(owner, note))
            for owner, note in (("Embedding4bit", _note_storage), ("Embedding8bit", _note_scales))
        ),
        *(
            Rewrite(
                "bitsandbytes.nn.modules:Embedding8bit.forward", find, replace, names={"_patches_scales": find_scales}
            )
            for find, replace in (
                (
                    'not hasattr(self.weight, "SCB")',
                    'not hasattr(self.weight, "SCB") and _patches_scales(self) is None',
                ),
                ("self.weight.SCB", "_patches_scales(self)"),
            )
        ),
    ),
    defect=defect,
)
