"""Moving a 4-bit weight to the meta device takes the statistics of every copy with it.

``Params4bit.to(device)`` returns a new parameter that shares the ``QuantState`` of the old one, and moves
that state in place. A parameter on meta has given up its codes, but the state is also that of the weight
that was meant to stay: accelerate's ``cpu_offload``, ``disk_offload`` and ``dispatch_model`` keep the codes
aside, put the layer on meta between two forwards, and die in the next with ``Cannot copy out of meta
tensor; no data!`` (#1525, 0.46.1 to 0.50.2).

The repair leaves the state where it is when the target is meta: statistics cannot be brought back from
there, and whoever brings the codes back finds them. They are 1/16 or less of the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...helpers import live_objects
from ....engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    import torch


def moves_with(device: torch.device | None) -> bool:
    """Whether the statistics follow a weight to ``device``."""
    return device is None or device.type != "meta"


def damage() -> tuple[str, ...]:
    """Weights whose statistics went to meta before the patch was applied."""
    from bitsandbytes.nn import Params4bit

    states = (w.quant_state for w in live_objects.instances(Params4bit) if w.quant_state is not None)
    lost = {id(state): state for state in states if state.absmax.is_meta}
    return tuple(
        f"the statistics of a 4-bit weight of shape {tuple(state.shape)} are on the meta device and lost, "
        "load the model again"
        for state in lost.values()
    )


def defect() -> Finding:
    import torch
    from accelerate import cpu_offload
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    x = torch.randn(2, 64)
    expected = layer(x)
    cpu_offload(layer, torch.device("cpu"))
    try:
        error = (layer(x) - expected).norm().item()
    except NotImplementedError as raised:
        return Finding(True, f"forward after cpu_offload: {str(raised).split(';')[0]}")
    return Finding(error > 0, f"error {error:.1e} after cpu_offload")


PATCH = Patch(
    id="bitsandbytes-params4bit-meta",
    summary="4-bit models cannot be offloaded: moving one copy of a weight to meta loses the statistics of all",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1525",),
    requires=("bitsandbytes>=0.46", "accelerate>=0.34"),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            "bitsandbytes.nn.modules:Params4bit.to",
            find="self.quant_state is not None",
            replace="self.quant_state is not None and _patches_moves_with(device)",
            names={"_patches_moves_with": moves_with},
        ),
    ),
    defect=defect,
    damage=damage,
)
