"""An error for a weight on the meta device and an input elsewhere.

The operators of bitsandbytes return uninitialized memory then, as does ``torch.nn.functional.linear`` (torch 2.13). Without
the plugin a quantized layer hardly gets to meta. The patches that make it possible bring this check along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine import Rewrite
from ...process import call_stack
from ..int8.row_scales import name_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor


def refuse_meta_weight(x: Tensor, weight: Tensor, as_plain: Callable[[], AbstractContextManager[None]]) -> None:
    """Raise if ``weight`` is on meta and ``x`` is not.

    ``as_plain`` is ``torch._C.DisableTorchFunction``. Without it ``Params4bit`` answers ``is_meta`` in Python, which takes 5
    us a call instead of 0.4, and which Dynamo cannot trace under ``torch.set_default_device``, a torch function mode. It
    is an argument, because an import of torch in here would take 0.8 us. Where the weight is no ``Params4bit``, the edits
    below look at ``is_meta`` themselves, which takes 0.1 us.
    """
    with as_plain():
        on_meta = weight.is_meta
    if on_meta and not x.is_meta:
        raise RuntimeError(
            f"The weight of {_layer_that_runs()} is on the meta device, so it has no values, and the input is on "
            f"{x.device}. Load the weight (load_state_dict(..., assign=True)), or load the model again with from_pretrained."
        )


def _layer_that_runs() -> str:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    layer = call_stack.running_module(Linear4bit, Linear8bitLt)
    return "a layer" if layer is None else f"{type(layer).__name__} {name_of(layer)!r}"


_CALL = "_patches_refuse_meta(A, B, torch._C.DisableTorchFunction)"
_LOOK = f"if B.is_meta:\n    {_CALL}"
_NAMES = {"_patches_refuse_meta": refuse_meta_weight}


def _edit(function: str, find: str, replace: str, when: str = "") -> Rewrite:
    return Rewrite(f"bitsandbytes.autograd._functions:{function}", find, replace, names=_NAMES, when=when)


_PACKED = "result = F.gemv_4bit(A, B, out=out, state=quant_state)"  # what the CPU has packed for its kernel
_VIEWED = "B = B.view(-1, 1)"  # from here on B is a plain tensor
_REQUIRED = "assert quant_state is not None"
FOUR_BIT = (
    _edit("matmul_4bit", _REQUIRED, f"{_REQUIRED}\n{_CALL}", "bitsandbytes<0.50"),
    _edit("matmul_4bit", _PACKED, f"{_CALL}\n{_PACKED}", "bitsandbytes>=0.50"),
    _edit("matmul_4bit", _VIEWED, f"{_VIEWED}\n{_LOOK}", "bitsandbytes>=0.50"),
)
_THRESHOLD = "if threshold > 0.0:\n    state.threshold = threshold"
INT8 = _edit("matmul", _THRESHOLD, f"{_LOOK}\n{_THRESHOLD}")
