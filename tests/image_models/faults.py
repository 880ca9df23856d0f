"""Why a model of diffusers is not right with the plugin, and whose fault that is; the docs say so beside what it does."""

from __future__ import annotations

FAULTS: dict[str, str] = {
    "Flux3Transformer2DModel": "diffusers: all parameters that stay in floating point are among those that its class keeps in "
    "float32, so `model.dtype` is `torch.uint8` or `torch.int8`, to which `dequantize()` casts",
    "RFD4ProteinaTransformer": "diffusers: loading takes the weight of `to_bias` for a bias, for its name has this word",
}
"""By class; what is not here was not looked into."""
