"""Merging OFT into a quantized layer and unmerging it changes the layer for good.

OFT has its own copy of the code that ``unmerge_lora.py`` describes, with the same rounding: peft 0.16 to 0.20, where
``merge_oft.py`` makes it possible to add OFT to quantized layers. From 0.21 on they merge as
``unmerge_through_backend.py`` describes. Upstream: trl #3466, #6688 (for LoRA). The repair is the same.
"""

from __future__ import annotations

from ...adapters import merge_edits
from ...engine import CannotShow, Finding, Patch
from ...engine.gate import satisfied
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers import merged_adapters


def defect() -> Finding:
    if satisfied("peft>=0.21"):
        raise CannotShow("from peft 0.21 on OFT merges in other code: see peft-unmerge-through-backend")
    if satisfied("peft>=0.20"):
        raise CannotShow(
            "on peft 0.20 another defect comes first: OFT cannot be added to a quantized model (peft-merge-oft)"
        )
    return merged_adapters.show_unmerge_error("OFTConfig", r=0, oft_block_size=16, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-oft",
    summary="merging OFT and unmerging it silently changes quantized layers for good",
    links=merge_edits.LINKS,
    requires=("peft>=0.16,<0.21", "bitsandbytes>=0.46.1"),
    tested_up_to="0.20.0",
    seen_on=("2.13",),
    edits=(
        *merge_edits.make_merge_edits("oft.bnb", *merge_edits.IN_BNB),
        *KEEP_PACKED_WEIGHT_BEFORE_048,
    ),  # what is put back is moved
    defect=defect,
)
