"""RandLoRA silently merges another update into quantized layers than the one that it trained."""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ..reproducers.adapted_layer import show_merge_error


def defect() -> Finding:
    """Merge RandLoRA into an INT8 layer, and ask the model the same again."""
    from peft import RandLoraConfig

    return show_merge_error(RandLoraConfig(r=4, target_modules=["0"], init_weights=False))


PATCH = Patch(
    id="peft-merge-randlora",
    summary="RandLoRA silently merges another update than the trained one into quantized layers",
    groups=("merge",),
    silent=True,
    links=("https://github.com/huggingface/peft/blob/main/src/peft/tuners/randlora/bnb.py",),
    why="""
        The update of RandLoRA is the product of two bases. ``get_scaled_bases`` returns the one that is applied to
        the input first, and forward applies them in that order. ``get_delta_weight`` of quantized layers multiplies
        them in the other order. For a square layer, such as most attention projections, the result has the right
        shape but is another update, which is merged silently. The outputs of a merged model are wrong by more than
        the adapter adds (relative error 0.88 on a small Llama, in INT8 and in 4 bits). For other layers it raises
        an error about shapes. peft since 0.16, which added RandLoRA. Unquantized layers have their own
        ``get_delta_weight``, which is right.
    """,
    repair="""
        The repair multiplies in the order of the forward. A merge is then as exact as quantizing the merged weight,
        and layers that are not square can be merged too. A conversion to LoRA reads the same update. Unmerging
        subtracts what was merged. In 4-bit layers a merge leaves floats in the place of packed weights, which
        ``bitsandbytes-params4bit-meta`` repairs.
    """,
    requires=("peft>=0.16", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(
        *(
            Rewrite(
                f"peft.tuners.randlora.bnb:{layer}.get_delta_weight",
                find="update_B @ update_A",
                replace="update_A @ update_B",
            )
            for layer in ("Linear8bitLt", "Linear4bit")
        ),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # a merge moves the layer
    ),
    defect=defect,
)
