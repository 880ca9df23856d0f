"""A quantized embedding cannot run under FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import CannotShow, Finding, Message, Patch, Rewrite, SetAttribute
from ....quantized.four_bit import quant_states
from ....quantized.int8 import row_scales
from ....quantized.weights.weight_assignment import make_setattr

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = "_patches_scales_of_sharded"


def _shards(old: Any, new: Any) -> bool:
    """Whether ``new`` is what FSDP2 makes of the weight ``old``."""
    return hasattr(new, "_local_tensor") and old is not None and new.shape == old.shape


def _note_storage(layer: Any, old: Any) -> None:
    weight = layer._parameters.get("weight")
    if quant_states.is_packed(old) and _shards(old, weight):
        layer.quant_storage = weight.dtype


def _note_scales(layer: Any, old: Any) -> None:
    weight = layer._parameters.get("weight")
    if old is None or weight is None:
        return
    if row_scales.has_scales(weight):
        vars(layer).pop(_SCALES, None)
    elif row_scales.is_int8(old) and row_scales.has_scales(old) and _shards(old, weight):
        setattr(layer, _SCALES, row_scales.get_scales(old))


def scales(layer: Any) -> Tensor | None:
    """The row scales of an ``Embedding8bit``: the scales of its weight, or of the weight that FSDP2 took."""
    weight = layer.weight
    if row_scales.has_scales(weight):
        return row_scales.get_scales(weight)
    kept: Tensor | None = vars(layer).get(_SCALES)
    return None if kept is None else kept.to(weight.device)


def defect() -> Finding:
    """A forward of each embedding under ``fully_shard``."""
    import tempfile

    import torch
    import torch.distributed as dist
    from bitsandbytes.nn import Embedding8bit, EmbeddingNF4
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ids, refused = torch.tensor([[1, 2, 3]]), []
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            for make in (EmbeddingNF4, Embedding8bit):
                layer = make(8, 64, dtype=torch.float32).requires_grad_(False).to("cpu")
                expected = layer(ids)
                try:
                    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
                except RuntimeError as error:  # torch 2.8
                    if "floating point dtype can require gradients" not in str(error):
                        raise
                    raise CannotShow("FSDP2 of this torch cannot shard integer weights") from error
                try:
                    if not torch.equal(layer(ids), expected):
                        refused.append(f"{make.__name__}: other numbers")
                except (AttributeError, RuntimeError) as error:
                    refused.append(f"{make.__name__}: {error}")
        finally:
            dist.destroy_process_group()
    return Finding(bool(refused), "; ".join(refused) or "both embeddings give the outputs of one process")


_EIGHT = "bitsandbytes.nn.modules:Embedding8bit"

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
        SetAttribute(
            "bitsandbytes.nn.modules:Embedding4bit.__setattr__", make=make_setattr("Embedding4bit", _note_storage)
        ),
        SetAttribute(f"{_EIGHT}.__setattr__", make=make_setattr("Embedding8bit", _note_scales)),
        Rewrite(
            f"{_EIGHT}.forward",
            find='not hasattr(self.weight, "SCB")',
            replace='not hasattr(self.weight, "SCB") and _patches_scales(self) is None',
            names={"_patches_scales": scales},
        ),
        Rewrite(
            f"{_EIGHT}.forward",
            find="self.weight.SCB",
            replace="_patches_scales(self)",
            names={"_patches_scales": scales},
        ),
    ),
    defect=defect,
)
