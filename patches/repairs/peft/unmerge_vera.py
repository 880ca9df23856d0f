"""Merging VeRA into a quantized layer and taking it out again changes the layer for good.

VeRA has its own copy of what ``unmerge_lora.py`` tells of, with the same loss: peft 0.14 to 0.19. Later its layers
merge as ``unmerge_through_backend.py`` says.
Into 4-bit layers it does not even quantize: floats stay where codes are read (an error on a CPU), and
``bitsandbytes-params4bit-meta`` repairs that. So INT8 is what ``defect()`` merges into.
Upstream: trl #3466, #6688 (for LoRA). The repair is the same.
"""

from __future__ import annotations

from ...engine import CannotShow, Finding, Patch
from ...engine.gate import satisfied
from ..helpers.adapters import merging
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048


def defect() -> Finding:
    if satisfied("peft>=0.20"):
        raise CannotShow("from peft 0.20 on VeRA does not merge here: see peft-unmerge-through-backend")
    return merging.defect("VeraConfig", int8=True, r=4, init_weights=False)


PATCH = Patch(
    id="peft-unmerge-vera",
    summary="merging VeRA and unmerging it silently changes quantized layers for good",
    links=merging.LINKS,
    requires=("peft>=0.14,<0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.19.1",
    seen_on=("2.13",),
    edits=(*merging.edits("vera.bnb", *merging.IN_BNB), *KEEP_CODES_BEFORE_048),  # what is put back is moved
    defect=defect,
)
