"""Copies of an ``Int8Params`` are no ``Int8Params``.

``copy.copy``, ``pickle`` and ``torch.save`` hand back a plain ``Parameter`` (its codes and scales hang on
it, but a further ``.to()`` drops them), and ``torch.chunk`` and ``torch.split`` give plain tensors of
codes whose scales are lost. Hits whoever saves a whole model or splits a fused weight. All
releases; ``Params4bit`` has handled chunk and split since 0.46.

The repair: a copy is made by the constructor of its class, with codes, scales and whatever else hangs
on it. A pickle names ``Int8Params`` itself, so that it loads without this package. The codes are
written once, not twice. A piece of rows takes their scales along; a piece of columns takes all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....engine import Finding, Patch, SetAttribute

_STATISTICS = ("CB", "SCB", "has_fp16_weights")


def _arguments(param: Any) -> tuple[Any, ...]:
    """What the constructor needs to make ``param`` again; codes that are the data stay the data."""
    data, codes = param.data, param.CB
    if codes is not None and codes.data_ptr() == data.data_ptr() and codes.shape == data.shape:
        codes = data
    return data, param.requires_grad, param.has_fp16_weights, codes, getattr(param, "SCB", None)


def _extras(param: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(param).items() if name not in _STATISTICS}


def _copy(self: Any) -> Any:
    new = type(self)(*_arguments(self))
    vars(new).update(_extras(self))
    return new


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    import torch

    extras = _extras(self)
    if not extras:
        return type(self), _arguments(self)
    return type(self), _arguments(self), extras, None, None, torch._utils._set_obj_state


def _make_torch_function(original: Any) -> classmethod:
    import torch
    from bitsandbytes.nn.modules import Int8Params

    splits = (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split)

    def __torch_function__(
        cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Dynamo follows super(), but not the C function that it finds there
        result = super(Int8Params, cls).__torch_function__(func, types, args, kwargs or {})
        if func in splits:
            return _pieces(result, args, kwargs or {})
        return result

    return classmethod(__torch_function__)


def _pieces(codes: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """``codes``, the pieces of an ``Int8Params``, with the statistics that belong to each."""
    whole = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    if getattr(whole, "SCB", None) is None:
        return codes
    how = dict(zip(("how", "dim"), args[1:])) | kwargs
    if how.get("dim", 0) in (0, -whole.dim()):
        scales = whole.SCB.split([len(piece) for piece in codes])
    else:
        scales = (whole.SCB,) * len(codes)
    marked = whole.CB is not None
    return tuple(
        type(whole)(c, False, whole.has_fp16_weights, c if marked else None, s) for c, s in zip(codes, scales)
    )


def defect() -> Finding:
    """A quantized weight through each way to copy or split it."""
    import copy
    import io
    import pickle

    import bitsandbytes as bnb
    import torch

    def saved(param: Any) -> Any:
        file = io.BytesIO()
        torch.save(param, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    torch.manual_seed(0)
    weight = bnb.nn.Int8Params(torch.randn(16, 64), requires_grad=False).to("cpu")
    ways: dict[str, Callable[[Any], Any]] = {
        "copy.copy": copy.copy,
        "pickle": lambda p: pickle.loads(pickle.dumps(p)),
        "torch.save": saved,
        "torch.chunk": lambda p: torch.chunk(p, 2)[0],
        "torch.split": lambda p: torch.split(p, 4)[0],
    }
    copies = {name: make(weight) for name, make in ways.items()}
    bad = [n for n, c in copies.items() if type(c) is not type(weight) or len(c) != len(c.SCB)]
    return Finding(bool(bad), f"class or scales lost by {', '.join(bad) or 'none'} of {len(ways)} ways")


_PARAM = "bitsandbytes.nn.modules:Int8Params"

PATCH = Patch(
    id="bitsandbytes-int8-copies",
    summary="copy, pickle, torch.save, chunk and split of an INT8 weight lose its class or its scales",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        SetAttribute(f"{_PARAM}.__copy__", value=_copy),
        SetAttribute(f"{_PARAM}.__reduce_ex__", value=_reduce),
        SetAttribute(f"{_PARAM}.__torch_function__", make=_make_torch_function),
    ),
    defect=defect,
)
