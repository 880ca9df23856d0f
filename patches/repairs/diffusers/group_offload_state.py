"""Group offloading of diffusers leaves the scales of quantized layers behind, and all of an INT8 layer."""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...offload import group_offload
from ...quantized.int8.weight_moves import keep_packed_weight


def defect() -> Finding:
    """Offload a model of two INT8 layers to the disk in groups, run it, and count the bytes that stay in memory."""
    import tempfile

    import torch
    from bitsandbytes.nn import Linear8bitLt
    from diffusers.hooks import apply_group_offloading

    torch.manual_seed(0)
    layers = [Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).to("cpu").eval()
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        apply_group_offloading(model, cpu, offload_type="leaf_level", offload_to_disk_path=folder)
        model(torch.randn(2, 64))
        packed = [layer.state.CB for layer, weight in ((layer, layer.weight) for layer in layers)]
        left = [each for each, layer in zip(packed, layers) if each.data_ptr() != layer.weight.data_ptr()]
    size = sum(each.nbytes for each in left)
    return Finding(
        size > 0, f"{size} of {2 * 64 * 64} bytes of packed weights stay in memory beside what is on the disk"
    )


PATCH = Patch(
    id="diffusers-group-offload-state",
    summary="group offloading of diffusers leaves scales of quantized layers behind: errors, and INT8 weights that stay on the device",
    groups=("offload",),
    silent=True,
    words=("OOM (out of memory)",),
    links=("https://github.com/huggingface/diffusers/issues/10797",),
    why="""
        TODO
    """,
    repair="""
        TODO
    """,
    requires=("diffusers>=0.35", "bitsandbytes>=0.46.1"),
    tested_up_to="0.42.1",
    edits=(
        *(
            Rewrite.to_call(
                f"diffusers.hooks.group_offloading:ModuleGroup.{method}_",
                find=f"self._{method}_{way}()",
                function=function,
                arguments=f"self._{method}_{way}, self",
            )
            for method, function, ways in (
                ("onload", group_offload.onload, ("from_disk", "from_memory")),
                ("offload", group_offload.offload, ("to_disk", "to_memory")),
            )
            for way in ways
        ),
        *keep_packed_weight("<0.48.2"),
    ),
    defect=defect,
)
