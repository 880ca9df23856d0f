"""Merging LoRA into a quantized layer and taking it out again changes the layer for good.

``merge_adapter`` dequantizes the base, adds the adapter and quantizes the sum; ``unmerge_adapter`` does the same with
the difference. Each quantization rounds, and what comes out is not what went in: the base that the adapter was trained
on is lost, silently, a little more with each cycle. The same happens without a call of ``unmerge_adapter``: in the
first forward under ``disable_adapter()`` (the reference model of DPO and GRPO) and in ``set_adapter``, while merged.
TRL merges and unmerges at every synchronisation with vLLM. With an adapter of 2 % that moves in between, an NF4 base
is off by 1.3 % after one cycle, 13 % after ten and 122 % after a hundred; INT8 by 0.2, 0.9 and 4.4 %.
Upstream: trl #3466, #6688. All releases of peft, LoRA and DoRA, 4-bit and INT8. ``peft-unmerge-*`` repair the other
adapters, whose layers have copies of this code.

The repair keeps the packed weight when an adapter is merged and no other is, and puts it back when they are taken out:
bit for bit, whatever became of the adapter meanwhile, and with less work than the subtraction. It also keeps a bias
that is merged into. What is kept lies in CPU memory, one packed copy of each merged weight (about 0.5 byte a
parameter in 4 bits, 1 in INT8), and is freed by the unmerge, or with the layer in ``merge_and_unload``. It is pickled
and copied with the layer, and no state dict has it. Before 0.48 bitsandbytes spoils INT8 codes that are moved, as these
are in the next dequantization: that is repaired with it.

Where it would be the wrong answer peft subtracts as before: if the base has other contents than the merge left (loaded
or written to since, or merged into by a second layer of peft around the same base), if a merged adapter was deleted
since, whose part is to stay, and for what was merged before the patch was applied.

A merge still rounds. Of a delta much smaller than the step between two codes little survives in the merged weight,
which no repair of unmerging changes (``docs/limits.md``).
"""

from __future__ import annotations

from ...engine import Finding, Patch
from ..helpers.adapters import merging
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048


def defect() -> Finding:
    return merging.defect("LoraConfig", r=4, init_lora_weights=False)


PATCH = Patch(
    id="peft-unmerge-lora",
    summary="merging LoRA and unmerging it silently changes quantized layers for good",
    links=merging.LINKS,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(*merging.edits("lora.bnb", *merging.IN_BNB), *KEEP_CODES_BEFORE_048),  # what is put back is moved
    defect=defect,
)
