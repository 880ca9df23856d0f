"""Why an architecture is not right with the plugin, and whose fault that is; the docs say so beside what it does."""

from __future__ import annotations

FAULTS = {
    "AXK2ForSequenceClassification": "nobody's: the router sends one token to another expert where activations are rounded "
    "to INT8; each quantized layer is within 1.2 % of the product of its own input",
    "RwkvForCausalLM": "transformers: its first forward in eval mode quantizes some layers again, in another 4-bit type",
    "UnlimitedOcrForConditionalGeneration": "transformers: saving renames the INT8 weight of a layer, and not its scales",
}
"""By class; what is not here was not looked into."""
