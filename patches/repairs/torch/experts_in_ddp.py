"""DistributedDataParallel raises an error for a model with quantized experts.

When it is created, ``DistributedDataParallel`` broadcasts all parameters of rank 0, joined by dtype. Experts that
``patches.quantize_experts`` has quantized report a floating-point dtype. They are dequantized to be joined, and the
result cannot be written back into packed weights. So QLoRA on several GPUs ends before its first step: ``quantized
experts of shape ... cannot take a Tensor in torch.float32``.

With the patch the packed weights and scales are broadcast, like those of ``Linear4bit``, and all ranks have the
experts of rank 0. Other parameters are broadcast as before.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849 (experts that bitsandbytes does not
quantize)
"""

from __future__ import annotations

from ...engine import Finding, Patch, Rewrite
from ...experts import fsdp


def defect() -> Finding:
    """Wrap a module with quantized experts in DistributedDataParallel, on one rank."""
    import tempfile

    import torch
    import torch.distributed as dist

    from ...experts.quantize import QuantizationConfig, quantize_and_pack
    from ...experts.tensor import as_parameter

    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    module.register_parameter(
        "experts",
        as_parameter(quantize_and_pack(torch.randn(4, 32, 64), 2, QuantizationConfig("nf4", False, torch.uint8))),
    )
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            torch.nn.parallel.DistributedDataParallel(module)
        except RuntimeError as error:
            return Finding(True, str(error).partition(".")[0])
        finally:
            dist.destroy_process_group()
    return Finding(False, "the packed weights are broadcast")


_SYNC = "_sync_params_and_buffers(process_group, {}, broadcast_bucket_size, src)"

PATCH = Patch(
    id="torch-experts-in-ddp",
    summary="DistributedDataParallel raises an error for a model with quantized experts",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849",),
    requires=("torch>=2.6", "bitsandbytes>=0.46.1"),
    tested_up_to="2.15.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "torch.distributed.utils:_sync_module_states",
            find=_SYNC.format("module_states"),
            replace=_SYNC.format("_patches_apart(module_states)"),
            names={"_patches_apart": fsdp.split_into_tensors},
        ),
    ),
    defect=defect,
)
