"""Merging HiRA into a quantized layer and unmerging it changes the layer for good.

HiRA has its own copy of the code that ``unmerge_lora.py`` describes, with the same rounding: peft since 0.20.
Upstream: trl #3466, #6688 (for LoRA). The repair is the same.
"""

from __future__ import annotations

from ...engine import Finding, Patch
from ..helpers.adapters import merging
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048


def defect() -> Finding:
    return merging.defect("HiraConfig", r=4, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-hira",
    summary="merging HiRA and unmerging it silently changes quantized layers for good",
    links=merging.LINKS,
    requires=("peft>=0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(*merging.edits("hira.bnb", *merging.IN_BNB), *KEEP_CODES_BEFORE_048),  # what is put back is moved
    defect=defect,
)
