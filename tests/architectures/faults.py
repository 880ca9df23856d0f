"""Why an architecture is not right with the plugin, and whose fault that is; the docs say so beside what it does."""

from __future__ import annotations

FAULTS = {
    "RwkvForCausalLM": "transformers: its first forward in eval mode quantizes some layers again, in another 4-bit type",
    "Swinv2ForImageClassification": "transformers: its table of positions is made in the dtype of packed weights; "
    "`transformers-weight-read-by-model` repairs it since, to be run again",
    "UnlimitedOcrForConditionalGeneration": "transformers: saving renames the INT8 weight of a layer, and not its scales",
}
"""By class; what is not here was not looked into."""
