"""Offloading an INT8 model with the CPU as execution device needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine import CannotShow, Finding, Message, Patch, Rewrite
from ...quantized.int8.weight_moves import keep_packed_weight

if TYPE_CHECKING:
    from torch import Tensor


def _needs_accelerator(value: Tensor) -> bool:
    """Tell whether ``value`` is still to be quantized and there is an accelerator to do it."""
    import torch

    return value.dtype != torch.int8 and torch.accelerator.is_available()


def defect() -> Finding:
    """Dispatch a model with one layer on the CPU and one on the disk, and run it."""
    import tempfile

    import bitsandbytes as bnb
    import torch
    from accelerate import dispatch_model

    torch.manual_seed(0)
    layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).to("cpu").eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=folder, force_hooks=True)
        try:
            model(torch.randn(2, 64))
        except (RuntimeError, AttributeError) as error:
            return Finding(True, f"first forward: {error}")
    if torch.accelerator.is_available():
        raise CannotShow("with an accelerator the round trip only costs time")
    return Finding(False, "first forward finishes")


PATCH = Patch(
    id="accelerate-int8-cpu-round-trip",
    summary="offloaded INT8 layers whose execution device is the CPU fail without an accelerator",
    groups=("offload", "cpu"),
    messages=(
        Message(
            "Cannot access accelerator device when none is available.",
            "torch/lib/libtorch_cpu.so",
            parts=("Cannot access accelerator device when none is available",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        To put an ``Int8Params`` on ``"cpu"``, ``set_module_tensor_to_device`` moves it to device 0 and back. This
        dates from releases in which only a GPU could quantize. ``dispatch_model`` passes that string whenever the
        whole device map is CPU and disk. Without an accelerator the first forward raises ``Cannot access
        accelerator device when none is available``. With one, packed weights are copied to it and back for nothing,
        and a weight whose scales are passed separately raises an error in ``new_value.SCB.to("cpu")``. accelerate
        up to 1.15.
    """,
    repair="""
        The repair takes this branch only for a weight that is not quantized yet, and only if there is an
        accelerator. All other weights take the branch of every other device, as they do for
        ``torch.device("cpu")``. There bitsandbytes before 0.48 destroys packed weights that are moved, and 0.48.0
        and 0.48.1 raise an error, so the repair of that defect is part of this patch.
    """,
    requires=("accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
    tested_up_to="1.15.0",
    edits=(
        Rewrite(
            "accelerate.utils.modeling:set_module_tensor_to_device",
            'device == "cpu" and param_cls.__name__ == "Int8Params"',
            'device == "cpu" and param_cls.__name__ == "Int8Params" and _patches_needs_accelerator(new_value)',
            names={"_patches_needs_accelerator": _needs_accelerator},
        ),
        *keep_packed_weight("<0.48.2"),  # that branch moves packed weights, too
    ),
    defect=defect,
)
