"""Merging an adapter into a quantized layer and unmerging it changes the layer for good."""

from __future__ import annotations

from collections.abc import Callable

from ...adapters.merge_snapshot import IN_BNB, make_merge_edits
from ...engine import CannotShow, Finding, Part, Patch
from ...engine.gate import satisfied
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers.adapted_layer import show_unmerge_error

_BEFORE_048 = "before bitsandbytes 0.48 another defect comes first: moving a layer quantizes its INT8 weights again"


def defect_lora() -> Finding:
    return show_unmerge_error("LoraConfig", r=4, init_lora_weights=False)


def defect_hira() -> Finding:
    return show_unmerge_error("HiraConfig", r=4, init_weights=False)


def defect_oft() -> Finding:
    if satisfied("peft>=0.21"):
        raise CannotShow("from peft 0.21 on OFT merges in other code: the part through a backend")
    if satisfied("peft>=0.20"):
        raise CannotShow(
            "on peft 0.20 another defect comes first: OFT cannot be added to a quantized model (peft-merge-oft)"
        )
    return show_unmerge_error("OFTConfig", r=0, oft_block_size=16, init_weights=False)


def defect_pvera() -> Finding:
    if not satisfied("bitsandbytes>=0.48"):
        raise CannotShow(_BEFORE_048)
    return show_unmerge_error("PveraConfig", int8=True, r=4, init_weights=False)


def defect_randlora() -> Finding:
    if not satisfied("bitsandbytes>=0.48"):
        raise CannotShow(_BEFORE_048)
    return show_unmerge_error("RandLoraConfig", int8=True, r=4, init_weights=False)


def defect_road() -> Finding:
    return show_unmerge_error("RoadConfig", group_size=16, init_weights=False)


def defect_vera() -> Finding:
    if satisfied("peft>=0.20"):
        raise CannotShow("from peft 0.20 on VeRA merges in other code: the part through a backend")
    return show_unmerge_error("VeraConfig", int8=True, r=4, init_weights=False)


def defect_through_a_backend() -> Finding:
    return show_unmerge_error("VeraConfig", r=4, init_weights=False)


def _layers_for_packed_weights(
    name: str, requires: tuple[str, ...], tested_up_to: str, defect: Callable[[], Finding]
) -> Part:
    """Return the part for the layers of ``peft.tuners.<name>.bnb``."""
    edits = (*make_merge_edits(f"{name.lower()}.bnb", *IN_BNB), *KEEP_PACKED_WEIGHT_BEFORE_048)
    return Part(name, requires, tested_up_to, edits, defect)


PATCH = Patch(
    id="peft-unmerge",
    summary="merging an adapter and unmerging it silently changes quantized layers permanently",
    groups=("merge",),
    silent=True,
    links=("https://github.com/huggingface/trl/issues/3466", "https://github.com/huggingface/trl/issues/6688"),
    why="""
        ``merge_adapter`` dequantizes the base, adds the adapter and quantizes the sum. ``unmerge_adapter`` does the
        same with the difference. Each quantization rounds, so the base that the adapter was trained on is not
        restored, and each cycle silently adds to the error. This also happens without a call of
        ``unmerge_adapter``: while the adapter is merged, the first forward under ``disable_adapter()`` (the
        reference model of DPO and GRPO) and ``set_adapter`` unmerge it. TRL merges and unmerges at every
        synchronisation with vLLM. If the update is 2 % of the weight and the adapter changes between cycles, an NF4
        base is off by 1.3 % after one cycle, 13 % after ten and 122 % after a hundred; INT8 by 0.2, 0.9 and 4.4 %.
        Upstream: trl #3466, #6688. All releases of peft, LoRA and DoRA, 4-bit and INT8.

        HiRA (peft since 0.20), RoAd (0.18), RandLoRA (0.16), PVeRA (0.19), VeRA before 0.20 and OFT before 0.21
        have copies of this code with the same rounding. RoAd also rotates the bias, which is restored bit for bit
        too. Since 0.20 VeRA, BOFT, MiSS and SHiRA, and since 0.21 OFT, read and write quantized weights through a
        ``QuantizationBackend``, which rounds as well; a base that bitsandbytes did not quantize is merged into as
        before. peft imports each of these modules when the first quantized layer gets such an adapter. RandLoRA,
        PVeRA and older VeRA leave floats in the place of packed 4-bit weights, which
        ``bitsandbytes-params4bit-meta`` repairs: their reproducers merge into INT8.
    """,
    repair="""
        When the first adapter is merged, the repair keeps a copy of the packed weight and restores it when the last
        one is unmerged: bit for bit, even if the adapter has changed since. It also keeps a bias that is merged
        into. The copy is pickled and copied with the layer, and is not in its state dict. Before 0.48, bitsandbytes
        destroys packed INT8 weights that are moved, as these are in the next dequantization; that is repaired too.

        In three cases the copy would be wrong, and peft subtracts as before: the base was loaded, written to or
        merged into by another peft layer since the merge; a merged adapter was deleted since, whose part must stay;
        or the adapter was merged before the patch was applied.

        Merging itself still rounds. If an update is much smaller than a quantization step, little of it survives in
        the merged weight, whatever unmerging does (``docs/limits.md``).
    """,
    cost="""
        One packed copy of each merged weight in CPU memory (about 0.5 byte a parameter in 4 bits, 1 byte in INT8).
        The unmerge frees it, or ``merge_and_unload`` together with the layer. Restoring takes less time than
        subtracting.
    """,
    former_ids=(
        "peft-unmerge-lora",
        "peft-unmerge-hira",
        "peft-unmerge-oft",
        "peft-unmerge-pvera",
        "peft-unmerge-randlora",
        "peft-unmerge-road",
        "peft-unmerge-vera",
        "peft-unmerge-through-backend",
    ),
    parts=(
        _layers_for_packed_weights("LoRA", ("peft>=0.14", "bitsandbytes>=0.46.1"), "0.21.2", defect_lora),
        _layers_for_packed_weights("HiRA", ("peft>=0.20", "bitsandbytes>=0.46.1"), "0.21.2", defect_hira),
        _layers_for_packed_weights("OFT", ("peft>=0.16,<0.21", "bitsandbytes>=0.46.1"), "0.20.0", defect_oft),
        _layers_for_packed_weights("PVeRA", ("peft>=0.19", "bitsandbytes>=0.48"), "0.21.2", defect_pvera),
        _layers_for_packed_weights("RandLoRA", ("peft>=0.16", "bitsandbytes>=0.48"), "0.21.2", defect_randlora),
        _layers_for_packed_weights("RoAd", ("peft>=0.18", "bitsandbytes>=0.46.1"), "0.21.2", defect_road),
        _layers_for_packed_weights("VeRA", ("peft>=0.14,<0.20", "bitsandbytes>=0.46.1"), "0.19.1", defect_vera),
        Part(
            "through a backend",
            ("peft>=0.20", "bitsandbytes>=0.46.1"),
            "0.21.2",
            (
                *make_merge_edits("vera.layer", "Linear"),
                *make_merge_edits("oft.layer", "Linear", when="peft>=0.21"),
                *make_merge_edits("boft.layer", "Linear"),
                *make_merge_edits("miss.layer", "MissLinear"),
                *make_merge_edits("shira.layer", "Linear"),
                *KEEP_PACKED_WEIGHT_BEFORE_048,  # a weight that is put back is moved
            ),
            defect_through_a_backend,
        ),
    ),
)
