"""Under which names a state dict holds the parts of a 4-bit quantization state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

OWN = {
    "absmax": "absmax",
    "code": "code",
    "quant_map": "code",
    "offset": "offset",
    "state2": "state2",
    "nested_offset": "offset",
}
"""Properties of ``Params4bit``, and the attributes of its ``QuantState`` that they show."""

NESTED = {
    "nested_absmax": "absmax",
    "nested_blocksize": "blocksize",
    "nested_quant_map": "code",
    "nested_dtype": "dtype",
}
"""The same, of the state of the quantized scales: only with double quantization."""


def packed_key(self: QuantState, name: str) -> Any:
    """Return the packed entry of the state dict, such as ``bitsandbytes__nf4``: ``QuantState.__getattr__``."""
    if name.startswith("bitsandbytes__"):
        packed = self.as_dict(packed=True)
        if "quant_state." + name in packed:
            return packed["quant_state." + name]
    raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
