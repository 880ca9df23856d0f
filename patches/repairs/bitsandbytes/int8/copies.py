"""Copies of an ``Int8Params`` lose its class or its scales."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute
from ....quantized.int8 import row_scales
from ....quantized.int8.weight_moves import KEEP_PACKED_WEIGHT_BEFORE_048
from ....quantized.layer_methods import wrap_method
from ....quantized.weights.parameter_copies import (
    is_read_by_default,
    make_like,
    reduce_with_class,
    restore_class,
    wrap_split_method,
)

if TYPE_CHECKING:
    from bitsandbytes.nn import Int8Params
    from torch import Tensor


def _reduce_ex(weight: Int8Params, reduce: Callable[..., tuple[Any, ...]], protocol: int) -> tuple[Any, ...]:
    """Return what ``Parameter.__reduce_ex__`` does, with the class and the row scales of ``weight``."""
    reduced = reduce(protocol)
    if is_read_by_default(protocol):
        return reduced
    return reduce_with_class(reduced, weight, SCB=row_scales.get_scales(weight))


def _copy(weight: Int8Params) -> Int8Params:
    """Return a copy of ``weight`` with its class and row scales, for ``copy.copy``."""
    from torch.nn import Parameter

    rebuild, arguments, *_ = _reduce_ex(weight, partial(Parameter.__reduce_ex__, weight), 4)
    return rebuild(*arguments)


def _pieces(whole: Int8Params, parts: tuple[Tensor, ...], dim: int) -> tuple[Tensor, ...]:
    """Return ``parts``, what torch made of ``whole``, with the scales of their rows."""
    import torch

    scale = row_scales.get_scales(whole)
    if scale is None or whole.dtype != torch.int8 or dim not in (0, -whole.dim()):
        return parts
    scales: tuple[Tensor, ...] = scale.split([len(part) for part in parts])
    marked = row_scales.is_unsettled(whole)
    return tuple(make_like(whole, part, CB=part if marked else None, SCB=scale) for part, scale in zip(parts, scales))


def defect() -> Finding:
    """Copy or split a quantized weight in each way."""
    import copy
    import io
    import pickle

    import bitsandbytes as bnb
    import torch

    def in_its_layer(write: Callable[..., None], read: Callable[[Any], Any], param: Any) -> Any:
        file = io.BytesIO()
        layer = bnb.nn.Linear8bitLt(64, 16, bias=False, has_fp16_weights=False)
        layer.weight = param
        write(layer, file)
        file.seek(0)
        return read(file).weight

    torch.manual_seed(0)
    weight = bnb.nn.Int8Params(torch.randn(16, 64), requires_grad=False).to("cpu")
    ways: dict[str, Callable[[Any], Any]] = {
        "copy.copy": copy.copy,
        "pickle": partial(in_its_layer, pickle.dump, pickle.load),
        "torch.save": partial(in_its_layer, torch.save, partial(torch.load, weights_only=False)),
        "weight.chunk": lambda p: p.chunk(2)[0],
        "torch.split": lambda p: torch.split(p, 4)[0],
    }
    copies = {name: make(weight) for name, make in ways.items()}
    bad = [n for n, c in copies.items() if type(c) is not type(weight) or len(c) != len(c.SCB)]
    return Finding(
        bool(bad), f"ways to copy a weight that lose its class or scales: {', '.join(bad) or 'none'} of {len(ways)}"
    )


_PARAM = "bitsandbytes.nn.modules:Int8Params"

PATCH = Patch(
    id="bitsandbytes-int8-copies",
    summary="copy, pickle, torch.save, chunk and split of an INT8 weight lose its class or its scales",
    groups=("save",),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``copy.copy``, ``pickle`` and ``torch.save`` give a plain ``Parameter``. Packed weights and scales are
        attributes of this parameter, but the next ``.to()`` drops them. ``weight.chunk`` and ``weight.split`` give
        plain tensors without scales. This affects programs that save a whole model or split a fused weight. All
        releases.
    """,
    repair="""
        The repair adds the class to the attributes that torch copies and pickles. The pickle names ``Int8Params``
        itself, so it loads without the plugin, and holds the packed weights once instead of twice. ``torch.load``
        reads such parameters with ``weights_only=True``, its default, which refuses the name of a class. So a file
        of ``torch.save`` stays as it was, and when a whole module is loaded, the layer gives its weight the class.

        With its class, a weight is moved by ``Int8Params.to`` again, which before 0.48 destroys packed weights;
        that is repaired too. But a process without the plugin, on a CPU with 0.46.1, would meet that defect when it
        loads the pickle. So on 0.46.1 a pickle is what ``torch.save`` writes, and a parameter that is pickled
        outside of its layer is loaded as a plain one, as before.

        A piece of rows gets their scales. A piece of columns stays a plain tensor, because GPU kernels would take
        it for complete rows. So do pieces of unquantized weights, which autograd must follow, and pieces that are
        made in a compiled graph. ``torch.chunk`` is not repaired: it is no Python function, and with a
        ``__torch_function__`` that sees it Dynamo refuses ``weight ** 2``, ``1 - weight`` and more.
    """,
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        wrap_method("Int8Params", "__reduce_ex__", _reduce_ex, when="bitsandbytes>=0.47"),
        SetAttribute(f"{_PARAM}.__copy__", value=_copy, when="bitsandbytes<0.47"),
        *(wrap_split_method("Int8Params", name, _pieces) for name in ("chunk", "split")),
        *(restore_class(layer, "Int8Params", row_scales.MARKS) for layer in ("Linear8bitLt", "Embedding8bit")),
        *KEEP_PACKED_WEIGHT_BEFORE_048,  # what comes back is moved
    ),
    defect=defect,
)
