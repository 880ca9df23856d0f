"""Group offloading of diffusers leaves the scales of quantized layers behind, and all of an INT8 layer."""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...offload import group_offload
from ...quantized.int8.weight_moves import keep_packed_weight
from ..reproducers.offloaded_groups import offload_to_disk


def defect() -> Finding:
    """Offload a model of two INT8 layers to the disk in groups, run it, and count the bytes that stay in memory."""
    import tempfile

    import torch
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    layers = [Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).to("cpu").eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        offload_to_disk(model, folder)
        model(torch.randn(2, 64))
        left = [layer.state.CB for layer in layers if layer.state.CB.data_ptr() != layer.weight.data_ptr()]
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
        diffusers offloads the layers of a group by ``parameter.data = ...``. Tensors that are stored beside the packed
        weights stay where they are: ``absmax`` and the other tensors of a 4-bit weight, the row scales and the packed
        weights in the state of an INT8 layer. Without a stream the scales are on the CPU when the layer runs on the
        device, so ``pipe(...)`` fails: the kernels of bitsandbytes for GPUs read the address of CPU memory. With a
        stream or a folder, and a model that was loaded on the device, the result is right, but the scales stay there,
        and so do all packed weights of an INT8 model: the model is copied for nothing, and no memory is saved. This
        affects ``enable_group_offload`` of a pipeline or a model and ``apply_group_offloading``, block by block or
        layer by layer, with diffusers 0.33 to 0.42.
    """,
    repair="""
        With the repair the scales go with the packed weights, to the device and back. The state of an INT8 layer is
        the weight of that moment. If there is a stream, the copies in CPU memory are kept, in pinned memory, as
        diffusers keeps the weights. With ``offload_to_disk_path`` the scales wait in CPU memory. Results are those of
        the model that is whole on the device, bit for bit. Models without quantized layers are moved as before.
        diffusers 0.33 and 0.34 do this in other functions, which the patch does not change.
    """,
    cost="""
        For each group, its layers are visited once more, and their scales are copied: 1/8 of the bytes of NF4 weights,
        1/32 of nested ones. They are copied on the stream of the computation, so that part does not overlap with it.
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
                ("onload", group_offload.onload_group, ("from_disk", "from_memory")),
                ("offload", group_offload.offload_group, ("to_disk", "to_memory")),
            )
            for way in ways
        ),
        *keep_packed_weight("<0.48.2"),
    ),
    defect=defect,
)
