"""OFT of older peft silently merges the transposed base weight into quantized layers, or cannot be added to them."""

from __future__ import annotations

from ...adapters.merge_snapshot import IN_BNB, make_merge_edits
from ...engine import CannotShow, Finding, Patch, Rewrite
from ...engine.gate import satisfied
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers.adapted_layer import show_merge_error


def defect() -> Finding:
    """Add OFT to an INT8 model, and merge it."""
    from peft import OFTConfig

    if satisfied("peft>=0.21"):
        raise CannotShow("from peft 0.21 on OFT merges in other code, without this defect")
    return show_merge_error(OFTConfig(r=0, oft_block_size=16, target_modules=["0"], init_weights=False))


def _product(method: str) -> Rewrite:
    return Rewrite(
        f"peft.tuners.oft.bnb:{method}",
        find="output.to(oft_data.dtype).to(oft_data.device)",
        replace="w_data.to(oft_data.dtype).to(oft_data.device)",
    )


def _config(bits: int, layer: str, options: str) -> Rewrite:
    return Rewrite(
        f"peft.tuners.oft.bnb:dispatch_bnb_{bits}bit",
        find=f"{layer}(target, adapter_name, **{options})",
        replace=f'{layer}(target, adapter_name, {options}.pop("oft_config"), **{options})',
        when="peft>=0.20",
    )


PATCH = Patch(
    id="peft-merge-oft",
    summary="OFT of older peft silently merges the transposed base weight into quantized layers, or cannot be added to them",
    groups=("merge",),
    silent=True,
    links=("https://github.com/huggingface/peft/blob/v0.19.1/src/peft/tuners/oft/bnb.py",),
    why="""
        ``merge`` of quantized layers dequantizes the weight, transposes it, rotates it, transposes the product
        back, and then quantizes the transposed weight instead of the product. After that a square layer, such as
        most attention projections, holds its own transpose, silently: relative error 1.4 in INT8 and in 4 bits.
        Other layers get the wrong shape. ``unmerge`` of 4-bit layers has the same mistake. peft 0.16 to 0.20; from
        0.21 on OFT merges through a backend that is right.

        peft 0.20 cannot add OFT to a model that is marked as quantized, as every quantized model of ``from_pretrained``
        is: ``Linear4bit.__init__() missing 1 required positional argument: 'config'``. The function that creates the
        layer passes the configuration as ``oft_config``.
    """,
    repair="""
        The repair quantizes the product, so the merge is as exact as quantizing the merged weight. Unquantized
        layers have their own ``merge``, which is right. ``peft-unmerge`` makes unmerging exact. In peft 0.20 the
        configuration is passed as ``config``, and unmerging is exact with this patch alone, because such a layer
        could not be unmerged before.
    """,
    requires=("peft>=0.16,<0.21", "bitsandbytes>=0.46.1"),
    tested_up_to="0.20.0",
    edits=(
        _product("Linear8bitLt.merge"),
        _product("Linear4bit.merge"),
        _product("Linear4bit.unmerge"),
        _config(8, "Linear8bitLt", "eightbit_kwargs"),
        _config(4, "Linear4bit", "fourbit_kwargs"),
        *make_merge_edits("oft.bnb", *IN_BNB, when="peft>=0.20"),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # a merge moves the layer
    ),
    defect=defect,
)
