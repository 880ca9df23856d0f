"""Merging RoAd into a quantized layer and unmerging it changes the layer for good.

RoAd has its own copy of the code that ``unmerge_lora.py`` describes, with the same rounding: peft since 0.18. It also
rotates the bias, which is restored bit for bit too. Upstream: trl #3466, #6688 (for LoRA). The repair is the same.
"""

from __future__ import annotations

from ...adapters import merge_edits
from ...engine import Finding, Patch
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers import merged_adapters


def defect() -> Finding:
    return merged_adapters.show_unmerge_error("RoadConfig", group_size=16, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-road",
    summary="merging RoAd and unmerging it silently changes quantized layers for good",
    links=merge_edits.LINKS,
    requires=("peft>=0.18", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        *merge_edits.make_merge_edits("road.bnb", *merge_edits.IN_BNB),
        *KEEP_PACKED_WEIGHT_BEFORE_048,
    ),  # what is put back is moved
    defect=defect,
)
