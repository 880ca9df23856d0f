"""``prepare_model_for_kbit_training`` silently doubles the memory of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...engine import Finding, Patch, Rewrite
from ...experts.unquantized import find_unquantized_experts
from ...process.byte_sizes import format_bytes
from ...process.messages import LOGGER
from ..reproducers.log_records import record_logs
from ..reproducers.mixtures import load_mixture_in_4bit

if TYPE_CHECKING:
    import torch


def defect() -> Finding:
    from peft import prepare_model_for_kbit_training

    model = load_mixture_in_4bit()
    before = sum(parameter.nbytes for parameter in model.parameters())
    with record_logs() as said:
        prepare_model_for_kbit_training(model)
    after = sum(parameter.nbytes for parameter in model.parameters())
    return Finding(
        after > 1.5 * before and not said, f"the model grows from {before} to {after} bytes, {len(said)} warnings"
    )


_EACH_EXPERT = "for p in model.parameters(): if p.dim() == 3"
# of DBRX: packed 4-bit weights have two dimensions, too, and must not be cast
_EACH_EXPERT_OF_TWO_DIMENSIONS = "for n, p in model.named_parameters(): if '.experts.' in n"


def told(model: torch.nn.Module) -> Any:
    """Return ``model.parameters()``; warn first if some of them are experts that will be twice as large."""
    left = find_unquantized_experts(model) if _loaded_quantized(model) else None
    grown = sum(tensor.nbytes for tensor in left.tensors.values() if tensor.element_size() == 2) if left else 0
    if left is not None and grown:
        each = _EACH_EXPERT if left.dimensions == 3 else _EACH_EXPERT_OF_TWO_DIMENSIONS
        LOGGER.warning(
            "prepare_model_for_kbit_training casts the experts to float32, because they are not quantized (%s): %s become %s. "
            "To keep their dtype, cast them back afterwards (%s: p.data = p.data.to(torch.bfloat16)) and train under autocast "
            "(bf16=True). Without autocast, experts_implementation 'eager' and 'batched_mm' fail, and 'grouped_mm' computes "
            "in bfloat16.",
            left,
            format_bytes(grown),
            format_bytes(2 * grown),
            each,
        )
    return model.parameters()


def _loaded_quantized(model: torch.nn.Module) -> bool:
    return any(getattr(model, name, False) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit"))


PATCH = Patch(
    id="peft-upcasts-experts",
    effect="warns",
    summary="prepare_model_for_kbit_training silently doubles the memory of the experts of a quantized model",
    groups=("experts", "train"),
    silent=True,
    words=("OOM (out of memory)",),
    links=(
        "https://github.com/unslothai/unsloth/issues/4032",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",
    ),
    why="""
        ``prepare_model_for_kbit_training`` casts every half-precision parameter that is not quantized to float32. This
        is meant for norms and the head. transformers 5 keeps all experts of a layer in one parameter of three
        dimensions, which bitsandbytes does not quantize. So nearly the whole model doubles: from 276 kB to 540 kB for a
        tiny Qwen3-MoE, from 58 GB to 116 GB for the experts of Qwen3-30B-A3B.
    """,
    repair="""
        The patch warns when this happens: how much memory is added, and how to avoid it. It does not leave the
        experts in half precision, because that would change results: norms are float32 afterwards, and so are hidden
        states in a step without autocast. Measured on transformers 5.23 in 4 bits, with experts cast back to bfloat16:

        - ``experts_implementation="grouped_mm"`` (the default) without autocast: runs in bfloat16, with other numbers;
        - ``"grouped_mm"`` under autocast (``bf16=True``): runs, with other numbers;
        - ``"eager"`` and ``"batched_mm"`` without autocast: ``RuntimeError``, products of two dtypes;
        - ``"eager"`` and ``"batched_mm"`` under autocast: the same loss to the last digit.
    """,
    requires=("peft>=0.14", "transformers>=5", "bitsandbytes>=0.46.1"),
    tested_up_to="0.21.2",
    edits=(Rewrite.to_call("peft.utils.other:prepare_model_for_kbit_training", "model.parameters()", told, "model"),),
    defect=defect,
)
