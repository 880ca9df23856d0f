"""How many bytes a use of an offloaded layer brings: counted here for the log, and for ``patches.inspect``."""

from __future__ import annotations

from typing import Any


def bytes_of_parameter(tensor: Any) -> int:
    """Bytes of ``tensor`` in this process: of a shard the local part, of a quantized tensor of torchao its parts."""
    if inside := parts_of_parameter(tensor):
        return sum(map(bytes_of_parameter, inside))
    return int(tensor.numel()) * int(tensor.element_size())


def parts_of_parameter(tensor: Any) -> list[Any]:
    """The tensors that one of several consists of, experts among them; none of any other."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    found = [getattr(tensor, name) for name in flatten(tensor)[0]] if flatten is not None else []
    return [part for part in found if hasattr(part, "element_size")]  # a DTensor names its mesh too


def bytes_per_use(module: Any) -> int:
    """What bringing the parameters of ``module`` itself takes; tied ones are brought for each module that has them."""
    away = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.is_meta]
    return sum(bytes_of_parameter(parameter) + _row_scales(parameter) for parameter in away)


def _row_scales(weight: Any) -> int:
    """Bytes of the row scales of an INT8 weight, which accelerate brings with it, wherever they wait."""
    packed = type(weight).__name__ == "Int8Params" and str(weight.dtype) == "torch.int8"
    return 4 * int(weight.shape[0]) if packed else 0
