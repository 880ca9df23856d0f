"""Merging LoRA with ``lora_bias=True`` into a quantized layer adds another bias than the trained one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers.adapted_layer import show_merge_error


def _bias_is_bad(layer: Any, adapter: str, safe_merge: bool) -> bool:
    """Return False, or raise an error if the bias of ``adapter`` cannot be merged into ``layer``, still unchanged."""
    import torch

    if not layer.lora_bias[adapter]:
        return False
    bias = layer.get_base_layer().bias
    if bias is None:
        raise RuntimeError(
            f"adapter {adapter!r} has lora_bias=True, but its base layer has no bias, so it cannot be merged. Keep the "
            "adapter unmerged, or give the base layer a bias of zeros"
        )
    added = layer.lora_B[adapter].bias * layer.scaling[adapter]
    if safe_merge and not torch.isfinite(bias.data + added).all():
        raise ValueError(f"adapter {adapter!r}: the merged bias is not finite; nothing was merged into this layer")
    return False


def defect() -> Finding:
    """Merge an adapter with a bias and twice its weight, and ask the model the same again."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["0"], lora_bias=True, init_lora_weights=False)
    return show_merge_error(lora)


_BIAS = "self.lora_B[active_adapter].bias"
_WEIGHT_IS_BAD = "safe_merge and not torch.isfinite(w_data).all()"


def _scaled(method: str, count: int = 1, when: str = "") -> Rewrite:
    replace = f"({_BIAS} * self.scaling[active_adapter])"
    return Rewrite(f"peft.tuners.lora.{method}", find=_BIAS, replace=replace, count=count, when=when)


def _edits() -> Iterator[Rewrite]:
    for name in ("Linear8bitLt", "Linear4bit"):
        merge = f"peft.tuners.lora.bnb:{name}.merge"
        yield _scaled(f"bnb:{name}.merge")
        yield _scaled(f"bnb:{name}.unmerge")
        yield Rewrite(merge, find="torch.isfinite(bias_data)", replace="torch.isfinite(bias_data).all()")
        yield Rewrite(
            merge,
            find=_WEIGHT_IS_BAD,
            replace=f"_patches_bias_is_bad(self, active_adapter, safe_merge) or ({_WEIGHT_IS_BAD})",
            names={"_patches_bias_is_bad": _bias_is_bad},
        )
    for name in ("Linear", "_ConvNd"):
        yield _scaled(f"layer:{name}.merge", count=2, when="peft<0.16")
        yield _scaled(f"layer:{name}.unmerge", when="peft<0.16")


PATCH = Patch(
    id="peft-lora-bias-merge",
    summary="merging lora_bias=True into a quantized layer ignores the scaling; safe_merge raises an error",
    groups=("merge",),
    silent=True,
    messages=(Message("Boolean value of Tensor with more than one value is ambiguous", "torch/lib/libtorch_cpu.so"),),
    links=(
        "https://github.com/huggingface/peft/issues/3741",
        "https://github.com/huggingface/peft/pull/3757",
        "https://github.com/huggingface/peft/pull/2489",
    ),
    why="""
        In a forward the bias of ``lora_B`` is scaled, like everything that LoRA adds. ``merge`` of INT8 and 4-bit
        layers adds it unscaled: with ``lora_alpha=32`` and ``r=4`` an eighth of it, silently. ``unmerge`` subtracts
        the same, so a round trip looks right (peft #3741; #2489 repaired only plain layers, in 0.16).
        ``safe_merge=True`` raises ``Boolean value of Tensor with more than one value is ambiguous``, because its
        check for finite values lacks an ``all()``. By then the weight has been merged, but the layer does not count
        as merged. The same happens if the base layer has no bias: ``'NoneType' object has no attribute 'data'``.
        All releases that have ``lora_bias``; plain layers before 0.16.
    """,
    repair="""
        The repair scales the bias in both directions. Before it changes the weight, it checks that the base layer
        has a bias and that all of the new bias is finite, so an error leaves the layer as it was.
    """,
    requires=("peft>=0.14", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=tuple(_edits()),
    defect=defect,
)
