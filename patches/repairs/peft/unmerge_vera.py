"""Merging VeRA into a quantized layer and unmerging it changes the layer for good.

VeRA has its own copy of the code that ``unmerge_lora.py`` describes, with the same rounding: peft 0.14 to 0.19. Later
its layers merge as ``unmerge_through_backend.py`` describes. Its merge into 4-bit layers does not quantize: it leaves
floats in the place of packed weights (an error on a CPU), which ``bitsandbytes-params4bit-meta`` repairs. Therefore
``defect()`` merges into INT8. Upstream: trl #3466, #6688 (for LoRA). The repair is the same.
"""

from __future__ import annotations

from ...adapters import merge_edits
from ...engine import CannotShow, Finding, Patch
from ...engine.gate import satisfied
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers import merged_adapters


def defect() -> Finding:
    if satisfied("peft>=0.20"):
        raise CannotShow("from peft 0.20 on VeRA merges in other code: see peft-unmerge-through-backend")
    return merged_adapters.show_unmerge_error("VeraConfig", int8=True, r=4, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-vera",
    summary="merging VeRA and unmerging it silently changes quantized layers for good",
    links=merge_edits.LINKS,
    requires=("peft>=0.14,<0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.19.1",
    seen_on=("2.13",),
    edits=(
        *merge_edits.make_merge_edits("vera.bnb", *merge_edits.IN_BNB),
        *KEEP_PACKED_WEIGHT_BEFORE_048,
    ),  # what is put back is moved
    defect=defect,
)
