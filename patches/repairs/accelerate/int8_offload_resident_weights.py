"""After the forward of an offloaded INT8 layer, its packed weights stay on the execution device."""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...quantized.int8.weight_moves import keep_packed_weight


def defect() -> Finding:
    """Run a model under ``cpu_offload`` once, and count the bytes of its weights that stay on the device."""
    import bitsandbytes as bnb
    import torch
    from accelerate import cpu_offload

    torch.manual_seed(0)
    layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to("cpu").eval()
    cpu_offload(model, execution_device=torch.device("cpu"))
    try:
        with torch.no_grad():
            model(torch.randn(2, 64))
    except NotImplementedError as error:
        return Finding(True, f"first forward: {error}")
    packed = [layer.state.CB for layer in layers]
    resident = sum(weight.nbytes for weight in packed if weight is not None and weight.device.type != "meta")
    return Finding(resident > 0, f"{resident} of {4 * 64 * 64} bytes of offloaded weights stay on the device")


PATCH = Patch(
    id="accelerate-int8-offload-resident-weights",
    former_ids=("accelerate-int8-offload-resident-codes",),
    summary="offloaded INT8 weights stay on the execution device after the first forward",
    groups=("offload",),
    silent=True,
    words=("OOM (out of memory)",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1927",),
    why="""
        ``AlignDevicesHook.post_forward`` moves the weight to meta and clears ``state.SCB`` and ``state.CxB``.
        bitsandbytes no longer uses ``CxB``: the packed weights are in ``state.CB``, which nothing clears. So all
        bytes of an offloaded INT8 model end up on the execution device (524288 of 524288 for 8 layers of 256x256),
        and a model that was offloaded because it does not fit runs out of memory. accelerate up to 1.15, with any
        bitsandbytes.
    """,
    repair="""
        The repair clears ``state.CB`` too. Backward does not need it: see
        ``bitsandbytes-int8-backward-live-state``.

        bitsandbytes 0.47.0 does not mark a weight that is brought back as new: without ``CB`` it would use packed
        weights as values. On 0.48.0 and 0.48.1 the forward of an offloaded layer raises an error. On these three
        releases the edits of ``bitsandbytes-int8-scales-lost-on-offload`` are part of this patch.
    """,
    requires=("accelerate>=0.26.1", "bitsandbytes>=0.46.1"),
    tested_up_to="1.15.0",
    edits=(
        Rewrite(
            "accelerate.hooks:AlignDevicesHook.post_forward",
            "module.state.CxB = None",
            "module.state.CB = module.state.CxB = None",
        ),
        *keep_packed_weight(">=0.47,<0.48.2"),
    ),
    defect=defect,
)
