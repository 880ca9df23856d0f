"""Merging VeRA, OFT, BOFT, MiSS or SHiRA into a quantized layer and unmerging it changes the layer for good.

Since 0.20 (OFT since 0.21) these layers of peft are the same for plain and quantized bases. They read and write
quantized ones through a ``QuantizationBackend``, which dequantizes and quantizes. So each merge and each unmerge
rounds, as ``unmerge_lora.py`` describes. Upstream: trl #3466, #6688 (for LoRA). The repair is the same. A base that
bitsandbytes did not quantize is merged into as before.
"""

from __future__ import annotations

from ...engine import Finding, Patch
from ..helpers.adapters import merging
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048


def defect() -> Finding:
    return merging.defect("VeraConfig", r=4, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-through-backend",
    summary="merging VeRA, OFT, BOFT, MiSS or SHiRA and unmerging it silently changes quantized layers for good",
    links=merging.LINKS,
    requires=("peft>=0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        *merging.edits("vera.layer", "Linear"),
        *merging.edits("oft.layer", "Linear", when="peft>=0.21"),
        *merging.edits("boft.layer", "Linear"),
        *merging.edits("miss.layer", "MissLinear"),
        *merging.edits("shira.layer", "Linear"),
        *KEEP_CODES_BEFORE_048,  # what is put back is moved
    ),
    defect=defect,
)
