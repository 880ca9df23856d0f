"""Merging LoRA into a quantized layer and unmerging it changes the layer for good.

``merge_adapter`` dequantizes the base, adds the adapter and quantizes the sum. ``unmerge_adapter`` does the same with
the difference. Each quantization rounds, so the base that the adapter was trained on is not restored, and each cycle
silently adds to the error. This also happens without a call of ``unmerge_adapter``: while the adapter is merged, the
first forward under ``disable_adapter()`` (the reference model of DPO and GRPO) and ``set_adapter`` unmerge it. TRL
merges and unmerges at every synchronisation with vLLM. With an adapter of 2 % that changes in between, an NF4 base is
off by 1.3 % after one cycle, 13 % after ten and 122 % after a hundred; INT8 by 0.2, 0.9 and 4.4 %. Upstream: trl
#3466, #6688. All releases of peft, LoRA and DoRA, 4-bit and INT8. Other adapters have copies of this code;
``peft-unmerge-*`` repair these.

When the first adapter is merged, the repair keeps a copy of the packed weight and restores it when the last one is
unmerged: bit for bit, even if the adapter has changed since. It also keeps a bias that is merged into. The copy is
pickled and copied with the layer, and is not in its state dict. Before 0.48, bitsandbytes destroys INT8 packed weights
that are moved, as these are in the next dequantization; that is repaired too.

In three cases the copy would be wrong, and peft subtracts as before: the base was loaded, written to or merged into by
another peft layer since the merge; a merged adapter was deleted since, whose part must stay; or the adapter was merged
before the patch was applied.

Merging itself still rounds. If an update is much smaller than a quantization step, little of it survives in the merged
weight, whatever unmerging does (``docs/limits.md``).

What it costs: one packed copy of each merged weight in CPU memory (about 0.5 byte a parameter in 4 bits, 1 byte in
INT8). The unmerge frees it, or ``merge_and_unload`` together with the layer. Restoring takes less time than
subtracting.
"""

from __future__ import annotations

from ...adapters import merge_edits
from ...engine import Finding, Patch
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers import merged_adapters


def defect() -> Finding:
    return merged_adapters.show_unmerge_error("LoraConfig", r=4, init_lora_weights=False)


PATCH = Patch(
    id="peft-unmerge-lora",
    summary="merging LoRA and unmerging it silently changes quantized layers for good",
    links=merge_edits.LINKS,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        *merge_edits.make_merge_edits("lora.bnb", *merge_edits.IN_BNB),
        *KEEP_PACKED_WEIGHT_BEFORE_048,
    ),  # what is put back is moved
    defect=defect,
)
