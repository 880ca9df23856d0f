"""Reading a 4-bit weight and its statistics back from the group of keys that a state dict has of them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .quant_states import packed_bytes

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

Tensors = dict[str, "torch.Tensor"]


class IncompleteState(ValueError):
    """A group of keys lacks ``keys``, given without the name of the weight."""

    def __init__(self, said: str, keys: set[str]) -> None:
        super().__init__(said)
        self.keys = keys


class QuantizedWeight(NamedTuple):
    """The quantized weight that a group of keys is to be read for."""

    name: str
    shape: tuple[int, ...]
    quant_type: str
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, two to a byte."""
        return packed_bytes(self.shape)


def bytes_of_packed_weight(layer: Linear4bit) -> int:
    """Return how many bytes the packed weights of the layer take."""
    return _weight_of(layer).nbytes


def _weight_of(layer: Linear4bit) -> QuantizedWeight:
    weight = layer.weight
    return QuantizedWeight(
        "weight", (layer.out_features, layer.in_features), getattr(weight, "quant_type", ""), weight.device
    )


def read_quantized_weight(layer: Linear4bit, group: Tensors, assign: bool) -> tuple[torch.Tensor, QuantState]:
    """Return the packed weights and state in ``group``, on the layer's device, and as copies unless ``assign``.

    Raises ``IncompleteState`` if the group lacks keys, and ``ValueError`` with the reason if it does not fit the layer.
    """
    return read_for_weight(_weight_of(layer), group, assign)


def read_for_weight(weight: QuantizedWeight, group: Tensors, assign: bool) -> tuple[torch.Tensor, QuantState]:
    """Return the same as :func:`read_quantized_weight`, for a weight that need not belong to a layer."""
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.utils import unpack_tensor_to_dict

    if set(group) == {""} and group[""].shape == weight.shape:
        raise ValueError(
            "the layer is quantized, and the weight in the state dict is not. Load that weight before the layer is moved to "
            "a device, which quantizes it"
        )
    state_keys = [key for key in group if key.startswith("quant_state.")]
    needed = {"", "absmax", "quant_map", *(state_keys or ["quant_state.bitsandbytes__" + weight.quant_type])}
    try:
        facts = unpack_tensor_to_dict(group[state_keys[0]]) if state_keys else {}
    except ValueError as error:
        raise ValueError(f"{_name(weight, state_keys[0])} cannot be read: {error}") from error
    if "nested_blocksize" in facts:
        needed |= {"nested_absmax", "nested_quant_map"}
    if lacking := needed - set(group):
        raise IncompleteState(f"the state dict lacks {_names(weight, lacking)}", lacking)
    if unexpected := (set(group) - needed) | set(state_keys[1:]):
        raise ValueError(f"the state dict has unexpected keys: {_names(weight, unexpected)}")
    device = group[""].device if assign else weight.device
    if device.type == "meta":
        raise ValueError("the layer is on the meta device: call load_state_dict(..., assign=True)")
    try:
        _check_sizes(weight, group, facts)
        refuse_cast(_name(weight, ""), group[""])
        plain = {key: tensor.detach().as_subclass(torch.Tensor) for key, tensor in group.items()}
        nested = "nested_absmax" in group
        taken = {key: _as_saved(weight, key, plain[key], nested).to(device, copy=not assign) for key in plain}
        packed = taken.pop("")
        state = QuantState.from_dict(taken, device=device)
        if nested:  # `from_dict` makes a tensor of torch's default dtype
            state.offset = torch.tensor(float(facts["nested_offset"]), dtype=torch.float32, device=device)
        return packed, state
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{_name(weight, state_keys[0])} cannot be read: {error!r}") from error


_SAMPLE = 8192
"""Words of packed weights that are looked at: a cast changes all of them."""


def refuse_cast(name: str, packed: torch.Tensor) -> None:
    """Raise ``ValueError`` if ``packed``, packed bits in a floating point dtype, were cast as if they were numbers.

    After a cast to or through another dtype, all numbers are numbers of that dtype, too. Packed bits nearly never are.
    """
    import torch

    if packed.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or packed.is_meta:
        return
    words = packed.detach().as_subclass(torch.Tensor).reshape(-1)
    words = words[:: max(1, words.numel() // _SAMPLE)]
    words = words[(words != 0) & ~words.isnan()]
    if not words.numel():
        return
    enough = 1.0 if packed.dtype is torch.float16 else 0.9  # which rounds some to infinity on the way
    for other in (torch.float16, torch.bfloat16, torch.float32):
        if other is packed.dtype or torch.promote_types(other, packed.dtype) is other:
            continue  # which would keep all of them
        if float((words.to(other).to(words.dtype) == words).double().mean()) >= enough:
            raise ValueError(
                f"{name} holds packed weights in {packed.dtype} that were cast to or from {other}, which destroyed them. Save "
                "the model again, without casting its quantized weights"
            )


def _as_saved(weight: QuantizedWeight, key: str, tensor: torch.Tensor, nested: bool) -> torch.Tensor:
    """Return the entry ``key`` in the dtype that kernels read without a check, whatever it was cast to since."""
    import torch

    if not key or key.startswith("quant_state."):
        return tensor
    if key == "absmax" and nested:
        expected, fits = "torch.uint8 (double quantization)", tensor.dtype == torch.uint8
    else:
        expected, fits = "a floating-point dtype", tensor.is_floating_point()
    if not fits:
        raise ValueError(f"{_name(weight, key)} has dtype {tensor.dtype}, expected {expected}")
    return tensor.float() if tensor.is_floating_point() else tensor


def _names(weight: QuantizedWeight, keys: set[str]) -> str:
    return ", ".join(_name(weight, key) for key in sorted(keys))


def _name(weight: QuantizedWeight, key: str) -> str:
    return repr(f"{weight.name}.{key}" if key else weight.name)


def _check_sizes(weight: QuantizedWeight, group: Tensors, facts: dict[str, Any]) -> None:
    """Refuse a group that was quantized from a weight of another shape, or whose tensors have other sizes."""
    shape = weight.shape
    if tuple(facts["shape"]) != shape:
        raise ValueError(f"size mismatch: the saved weight has shape {tuple(facts['shape'])}, the layer {shape}")
    blocks = -(-prod(shape) // facts["blocksize"])
    sizes = {"": (group[""].nbytes, weight.nbytes), "absmax": (group["absmax"].numel(), blocks)}
    if "nested_absmax" in group:
        sizes["nested_absmax"] = (group["nested_absmax"].numel(), -(-blocks // facts["nested_blocksize"]))
    for key, (found, expected) in sizes.items():
        if found != expected:
            raise ValueError(
                f"size mismatch: {_name(weight, key)} holds {found} {'values' if key else 'bytes'}, expected {expected}"
            )
