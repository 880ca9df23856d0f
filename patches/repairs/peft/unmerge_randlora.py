"""Merging RandLoRA into a quantized layer and unmerging it changes the layer for good.

RandLoRA has its own copy of the code that ``unmerge_lora.py`` describes, with the same rounding: peft since 0.16. Its
merge into 4-bit layers does not quantize: it leaves floats in the place of packed weights (an error on a CPU), which
``bitsandbytes-params4bit-meta`` repairs. Therefore ``defect()`` merges into INT8. Upstream: trl #3466, #6688 (for
LoRA). The repair is the same.
"""

from __future__ import annotations

from ...adapters import merge_edits
from ...engine import CannotShow, Finding, Patch
from ...engine.gate import satisfied
from ..reproducers import merged_adapters


def defect() -> Finding:
    if not satisfied("bitsandbytes>=0.48"):
        raise CannotShow(
            "before bitsandbytes 0.48 another defect comes first: moving a layer quantizes its INT8 weights again"
        )
    return merged_adapters.show_unmerge_error("RandLoraConfig", int8=True, r=4, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-randlora",
    summary="merging RandLoRA and unmerging it silently changes quantized layers for good",
    links=merge_edits.LINKS,
    requires=("peft>=0.16", "bitsandbytes>=0.48"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=tuple(merge_edits.make_merge_edits("randlora.bnb", *merge_edits.IN_BNB)),
    defect=defect,
)
