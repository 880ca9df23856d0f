"""Merging VeRA, OFT, BOFT, MiSS or SHiRA into a quantized layer and unmerging it changes the layer for good.

Since 0.20 (OFT since 0.21) these layers of peft are the same for plain and quantized bases. They read and write
quantized ones through a ``QuantizationBackend``, which dequantizes and quantizes. So each merge and each unmerge
rounds, as ``unmerge_lora.py`` describes. Upstream: trl #3466, #6688 (for LoRA). The repair is the same. A base that
bitsandbytes did not quantize is merged into as before.
"""

from __future__ import annotations

from ...adapters import merge_edits
from ...engine import Finding, Patch
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers import merged_adapters


def defect() -> Finding:
    return merged_adapters.show_unmerge_error("VeraConfig", r=4, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-through-backend",
    summary="merging VeRA, OFT, BOFT, MiSS or SHiRA and unmerging it silently changes quantized layers for good",
    links=merge_edits.LINKS,
    requires=("peft>=0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        *merge_edits.make_merge_edits("vera.layer", "Linear"),
        *merge_edits.make_merge_edits("oft.layer", "Linear", when="peft>=0.21"),
        *merge_edits.make_merge_edits("boft.layer", "Linear"),
        *merge_edits.make_merge_edits("miss.layer", "MissLinear"),
        *merge_edits.make_merge_edits("shira.layer", "Linear"),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # what is put back is moved
    ),
    defect=defect,
)
