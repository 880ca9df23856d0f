"""``load_in_4bit`` silently leaves most of a mixture of experts unquantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config import quantizers
from ...engine import Finding, Patch
from ...experts.unquantized import find_unquantized_experts
from ...process.byte_sizes import format_bytes
from ...process.messages import LOGGER
from ..reproducers.log_records import record_logs
from ..reproducers.mixtures import load_mixture_in_4bit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def defect() -> Finding:
    """Load a tiny mixture of experts in 4 bits, and look for a warning."""
    with record_logs() as said:
        model = load_mixture_in_4bit()
    left = find_unquantized_experts(model)
    if left is None:
        return Finding(False, "all experts are quantized")
    return Finding(not said, f"{left.share:.0%} of the parameters left in {left.dtypes}, {len(said)} warnings")


def warn_of_unquantized(model: PreTrainedModel) -> None:
    """Log which experts of ``model`` were not quantized."""
    left = find_unquantized_experts(model)
    if left is None:
        return
    remedy = ""
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        remedy = " patches.quantize_experts(model) quantizes them."
    if left.dimensions == 2:  # DBRX
        remedy = " Nothing quantizes experts in parameters of two dimensions: they stay as they are."
    LOGGER.warning(
        "%.0f %% of the parameters of this %s are not quantized (%s of its %s), because bitsandbytes quantizes linear "
        "layers only, and the experts are %s-D parameters in %s (%s).%s",
        100 * left.share,
        type(model).__name__,
        format_bytes(left.bytes),
        format_bytes(left.model_bytes),
        left.dimensions,
        left.dtypes,
        left,
        remedy,
    )


PATCH = Patch(
    id="transformers-experts-not-quantized",
    effect="warns",
    summary="load_in_4bit silently leaves most of a mixture of experts unquantized",
    groups=("experts", "layers"),
    silent=True,
    words=("OOM (out of memory)",),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
        "https://github.com/unslothai/unsloth/issues/4032",
    ),
    why="""
        bitsandbytes quantizes ``nn.Linear``. transformers 5 keeps all experts of a layer in one parameter of three
        dimensions (Mixtral, Qwen3-MoE and others) instead. So 95 % of the parameters of Qwen3-30B-A3B stay in
        bfloat16, 58 GB. A model that was loaded "in 4 bits" then does not fit, although the configuration, the
        class of the model and ``is_loaded_in_4bit`` say that it is quantized. The same is true for INT8.
    """,
    repair="""
        The plugin does not quantize the experts unless you ask, because that would give another model than
        transformers does. Loading warns instead, with the figure and the remedy:
        ``patches.quantize_experts(model)``.
    """,
    requires=("transformers>=5", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=quantizers.rewrite_both_quantizers(
        quantizers.AFTER_LOADING,
        find="return model",
        replace="""
            _patches_warn_of_unquantized(model)
            return model
        """,
        function=warn_of_unquantized,
    ),
    defect=defect,
)
