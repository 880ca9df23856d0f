"""An offloaded 4-bit model cannot be copied.

Between two forwards accelerate keeps the weights of an offloaded layer on meta. ``copy.deepcopy`` and ``copy.copy`` of
a ``Params4bit`` make an empty weight on the CPU and then set its data. torch refuses to set data on meta there:
``Attempted to call variable.set_data(tensor), but variable and tensor have incompatible tensor type``. This affects
every program that deep-copies such a model: peft for a module to save, averages of weights, the reference model of
DPO. Plain and INT8 models can be copied. A copy of a 4-bit model that was made under ``torch.device("meta")`` fails in
the same way, and so does a copy of any 4-bit model that is made there. All releases.

The repair makes the empty weight on meta if the original is there, and only then. As for a plain model, the copy has
copies of accelerate's hooks and of what they keep in memory, and reads what is on disk from the same files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit


def _empty(original: Params4bit) -> Params4bit:
    """A weight of the class of ``original`` that can be given its data."""
    import torch

    cls: Any = type(original)
    if original.is_meta == torch.empty(0).is_meta:  # where bitsandbytes makes it: on torch's default device
        return cls.__new__(cls)
    return torch.Tensor._make_subclass(cls, torch.empty(0, device=original.device))


def defect() -> Finding:
    """Copy a layer that accelerate keeps in CPU memory."""
    import copy

    import torch
    from accelerate import cpu_offload
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    cpu_offload(layer, execution_device=torch.device("cpu"))
    try:
        copied = copy.deepcopy(layer)
    except RuntimeError as error:
        return Finding(True, f"deepcopy: {error}")
    return Finding(
        type(copied.weight) is not type(layer.weight), f"deepcopy gives a weight of type {type(copied.weight).__name__}"
    )


_PARAMETER = "bitsandbytes.nn.modules:Params4bit"
_EMPTY: dict[str, Any] = {"find": "type(self).__new__(type(self))", "replace": "_patches_empty(self)"}

PATCH = Patch(
    id="bitsandbytes-params4bit-meta-copies",
    summary="copy and deepcopy of a 4-bit model fail if a part of it is offloaded or on meta",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L341",),
    requires=("bitsandbytes>=0.46.1",),
    tested_up_to="0.50.2",
    seen_on=("2.13", "2.15"),
    edits=tuple(
        Rewrite(f"{_PARAMETER}.{name}", **_EMPTY, names={"_patches_empty": _empty})
        for name in ("__deepcopy__", "__copy__")
    ),
    defect=defect,
)
