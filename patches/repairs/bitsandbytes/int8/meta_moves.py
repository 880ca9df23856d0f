"""INT8 modules cannot go to the meta device or come back, and their statistics stay behind.

``module.to("meta")`` and ``to_empty`` on a ``Linear8bitLt`` or ``Embedding8bit`` raise ``Creating a
Parameter from an instance of type Int8Params requires that detach() returns an instance of the same
type``: torch makes a new ``Parameter`` whenever it cannot swap ``.data``. Where it can, as between CPU
and GPU, ``param.data`` moves and the codes and scales on the parameter and in ``state`` do not, unless
the layer is moved by itself. All releases.

The repair wraps ``_apply`` of both classes: the new parameter is made as the class it was, and the
codes and scales follow the weight, on the parameter and in the state. From meta the scales come back
uninitialized, as the weight does, so that ``load_state_dict`` can fill both. Scales are moved, never
cast: ``.half()`` must not round them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, SetAttribute

if TYPE_CHECKING:
    from torch import Tensor


def _make(original: Callable[..., Any] | None) -> Callable[..., Any]:
    import torch

    inherited = original or torch.nn.Module._apply

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        from bitsandbytes.nn import Int8Params

        old = self._parameters.get("weight")
        if not isinstance(old, Int8Params):
            return inherited(self, fn, recurse)

        def across_meta(t: Tensor) -> Tensor:
            moved = fn(t)
            if t is old and "meta" in (t.device.type, moved.device.type):
                return moved.data  # a plain tensor, which torch can make a Parameter of
            return moved

        result = inherited(self, across_meta, recurse)
        new = self._parameters["weight"]
        if not isinstance(new, Int8Params):
            new = Int8Params(new.data, old.requires_grad, old.has_fp16_weights, old.CB, getattr(old, "SCB", None))
            self._parameters["weight"] = new
        if new.dtype == torch.int8 and old.dtype == torch.int8:
            _follow(new, new)
            _follow(getattr(self, "state", None), new)
        return result

    return _apply


def _follow(holder: Any, weight: Tensor) -> None:
    """Put the codes and scales that ``holder`` has where ``weight`` is."""
    import torch

    if getattr(holder, "CB", None) is not None:
        holder.CB = weight.data
    scale = getattr(holder, "SCB", None)
    if scale is not None and scale.device != weight.device:
        lost = scale.device.type == "meta"
        holder.SCB = torch.empty_like(scale, device=weight.device) if lost else scale.to(weight.device)


def defect() -> Finding:
    """A quantized model to meta and back, as before loading a checkpoint."""
    import copy

    import bitsandbytes as bnb
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)).to("cpu").eval()
    saved, x = {k: v.clone() for k, v in model.state_dict().items()}, torch.randn(4, 64)
    expected = copy.deepcopy(model)(x)
    try:
        model.to("meta").to_empty(device="cpu").load_state_dict(saved)
    except RuntimeError as error:
        return Finding(True, f"to('meta'): {str(error)[:60]}...")
    return Finding(not torch.equal(model(x), expected), "a model goes to meta and back")


PATCH = Patch(
    id="bitsandbytes-int8-meta-moves",
    summary="to('meta') and to_empty raise on INT8 modules; codes and scales stay where they were",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    edits=(
        SetAttribute("bitsandbytes.nn.modules:Linear8bitLt._apply", make=_make),
        SetAttribute("bitsandbytes.nn.modules:Embedding8bit._apply", make=_make),
    ),
    defect=defect,
)
