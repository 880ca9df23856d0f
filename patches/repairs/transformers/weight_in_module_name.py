"""A 4-bit layer whose name ends in "weight" loses its quantization state on loading."""

from __future__ import annotations

import re
from typing import Any

from ...config.quantizers import reads_packed_weights
from ...engine import Finding, Message, Patch, Rewrite
from ..reproducers.quantized_models import save_quantized


def anchor(converters: list[Any]) -> list[Any]:
    """Have the ``converters`` that join quantized weights match whole components of a key, and return all."""
    for converter in converters:
        if reads_packed_weights(converter):
            converter.compiled_sources = re.compile(rf"(?<!\w)(?:{converter.compiled_sources.pattern})(?!\w)")
    return converters


def defect() -> Finding:
    """Save a model that has a layer named ``gate_weight`` in 4 bits, and load it."""
    import tempfile

    import torch
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

    class Config(PretrainedConfig):  # type: ignore[misc]
        model_type = "gated"

    class Gated(PreTrainedModel):  # type: ignore[misc]
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.gate_weight = torch.nn.Linear(64, 64)
            self.out = torch.nn.Linear(64, 64)
            self.post_init()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.gate_weight(x))
            return out

    torch.manual_seed(0)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as packed:
        save_quantized(packed, Gated(Config()), how, device_map="cpu")
        try:
            again = Gated.from_pretrained(packed, device_map="cpu")
        except RuntimeError as error:
            return Finding(True, f"while loading: {str(error).partition('.')[0]}")
    lost = getattr(again.gate_weight.weight, "quant_state", None) is None
    return Finding(lost, f"loaded again, quantization state of gate_weight {'lost' if lost else 'there'}")


PATCH = Patch(
    id="transformers-weight-in-module-name",
    summary="a 4-bit layer whose name ends in 'weight' is loaded without its quantization state",
    groups=("from_pretrained", "save"),
    messages=(Message("quant_state is required", "bitsandbytes/autograd/_functions.py"),),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py#L956",),
    why="""
        The loader finds the tensors of a quantized layer by the names "weight", "weight.absmax" and so on, anywhere
        in a key. For a layer named ``block_inject_weight`` (Qwen4), it takes the key
        ``block_inject_weight.weight.absmax`` for the weight itself. A model that was saved in 4 bits loads
        silently, and its forward raises ``quant_state is required``. transformers 5.0 to 5.23.
    """,
    repair="""
        With the repair these names match only whole components of a key. Keys of other layers match as before.
    """,
    requires=("transformers>=5.0", "bitsandbytes>=0.46.1"),
    tested_up_to="5.24.0",
    edits=(
        Rewrite.to_call(
            "transformers.core_model_loading:convert_and_load_state_dict_in_model",
            find="[entry for entry in weight_mapping if isinstance(entry, WeightConverter)]",
            function=anchor,
            arguments="[entry for entry in weight_mapping if isinstance(entry, WeightConverter)]",
        ),
    ),
    defect=defect,
)
