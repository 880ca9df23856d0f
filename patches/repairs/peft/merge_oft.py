"""OFT of older peft silently merges the transposed base weight into quantized layers.

``merge`` of quantized layers dequantizes the weight, transposes it, rotates it, transposes the product back, and then
quantizes the transposed weight instead of the product. After that a square layer, such as most attention projections,
holds its own transpose, silently: relative error 1.4 in INT8 and in 4 bits. Other layers get the wrong shape.
``unmerge`` of 4-bit layers has the same mistake. peft 0.16 to 0.19; 0.20 cannot add OFT to quantized layers, and from
0.21 on OFT merges through a backend that is right.

The repair quantizes the product, so the merge is as exact as quantizing the merged weight. Unquantized layers have
their own ``merge``, which is right. ``unmerge_oft.py`` makes unmerging exact.
"""

from __future__ import annotations

import warnings

from ...engine import CannotShow, Finding, Patch, Rewrite
from ...engine.gate import satisfied
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048


def defect() -> Finding:
    """A model before and after OFT was merged into its INT8 layer."""
    import bitsandbytes as bnb
    import peft
    import torch

    if satisfied("peft>=0.20"):
        raise CannotShow("from peft 0.20 on OFT merges in other code, without this defect")
    torch.manual_seed(0)
    base = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)).to("cpu")
    vars(base)["is_loaded_in_8bit"] = True  # as from_pretrained says it
    x = torch.randn(4, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        config = peft.OFTConfig(r=0, oft_block_size=16, target_modules=["0"], init_weights=False)
        model = peft.get_peft_model(base, config)
        expected = model(x)
        model.merge_adapter()
        error = float((model(x) - expected).norm() / expected.norm())
    return Finding(error > 0.1, f"merged into INT8: relative error of the output {error:.2f}")


def _product(method: str) -> Rewrite:
    return Rewrite(
        f"peft.tuners.oft.bnb:{method}",
        find="output.to(oft_data.dtype).to(oft_data.device)",
        replace="w_data.to(oft_data.dtype).to(oft_data.device)",
    )


PATCH = Patch(
    id="peft-merge-oft",
    summary="OFT of older peft silently merges the transposed base weight into quantized layers",
    links=("https://github.com/huggingface/peft/blob/v0.19.1/src/peft/tuners/oft/bnb.py",),
    requires=("peft>=0.16,<0.20", "bitsandbytes>=0.46.1"),
    tested_up_to="0.19.1",
    seen_on=("2.13",),
    edits=(
        _product("Linear8bitLt.merge"),
        _product("Linear4bit.merge"),
        _product("Linear4bit.unmerge"),
        *KEEP_CODES_BEFORE_048,  # a merge moves the layer
    ),
    defect=defect,
)
