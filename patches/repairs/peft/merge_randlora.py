"""RandLoRA merges another update into quantized layers than the one that it trained.

The update of RandLoRA is the product of two bases, and ``get_scaled_bases`` gives first the one that meets the input.
The forward applies them in that order. ``get_delta_weight`` of the quantized layers multiplies them the other way round:
of a square layer, such as most attention projections, that is a matrix of the right shape and another update, merged
without a word. The outputs of a merged model are off by more than the adapter (relative error 0.88 on a small Llama, in
INT8 and in 4 bits). Of any other layer the shapes do not fit: an error. peft since 0.16, which has RandLoRA.
Unquantized layers have a ``get_delta_weight`` of their own, which is right.

The repair multiplies them in the order of the forward: a merge is as good as quantizing the merged weight is, and layers
that are not square can be merged too. A conversion to LoRA reads the same update. An unmerge takes out what was merged.
Into 4-bit layers a merge leaves floats where codes are read, which ``bitsandbytes-params4bit-meta`` repairs.
"""

from __future__ import annotations

import warnings

from ...engine import Finding, Patch, Rewrite
from ..helpers.int8.int8_moves import KEEP_CODES_BEFORE_048


def defect() -> Finding:
    """A model before and after RandLoRA was merged into its INT8 layer."""
    import bitsandbytes as bnb
    import peft
    import torch

    torch.manual_seed(0)
    base = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)).to("cpu")
    vars(base)["is_loaded_in_8bit"] = True  # as from_pretrained says it
    x = torch.randn(4, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        model = peft.get_peft_model(base, peft.RandLoraConfig(r=4, target_modules=["0"], init_weights=False))
        expected = model(x)
        model.merge_adapter()
        error = float((model(x) - expected).norm() / expected.norm())
    return Finding(error > 0.1, f"merged into INT8: relative error {error:.2f}")


PATCH = Patch(
    id="peft-merge-randlora",
    summary="RandLoRA silently merges another update into quantized layers than the trained one",
    links=("https://github.com/huggingface/peft/blob/main/src/peft/tuners/randlora/bnb.py",),
    requires=("peft>=0.16", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    seen_on=("2.13", "2.15"),
    edits=(
        *(
            Rewrite(
                f"peft.tuners.randlora.bnb:{layer}.get_delta_weight",
                find="update_B @ update_A",
                replace="update_A @ update_B",
            )
            for layer in ("Linear8bitLt", "Linear4bit")
        ),
        *KEEP_CODES_BEFORE_048,  # a merge moves the layer
    ),
    defect=defect,
)
