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
    is an argument, because an import of torch in here would take 0.8 us.
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
_NAMES = {"_patches_refuse_meta": refuse_meta_weight}
FOUR_BIT = tuple(
    Rewrite(
        "bitsandbytes.autograd._functions:matmul_4bit",
        asked,
        f"{asked}\n{_CALL}",
        names=_NAMES,
        when=when,
    )
    for asked, when in (
        ("assert quant_state is not None", "bitsandbytes<0.50"),
        ('if quant_state is None:\n    raise ValueError("quant_state is required")', "bitsandbytes>=0.50"),
    )
)
INT8 = Rewrite(
    "bitsandbytes.autograd._functions:matmul",
    "if threshold > 0.0:\n    state.threshold = threshold",
    f"{_CALL}\nif threshold > 0.0:\n    state.threshold = threshold",
    names=_NAMES,
)
