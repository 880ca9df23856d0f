"""Models that diffusers offloads to the disk in groups take each other's files, and compute with other weights."""

from __future__ import annotations

from ...engine import Finding, Patch
from ...offload import group_files


def defect() -> Finding:
    """Offload two 4-bit models to one folder, as ``pipe.enable_group_offload`` does, and run the second."""
    import tempfile

    import torch
    from bitsandbytes.nn import Linear4bit
    from diffusers.hooks import apply_group_offloading

    torch.manual_seed(0)
    cpu, x = torch.device("cpu"), torch.randn(2, 64)
    layers = [Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False) for _ in range(2)]
    encoder, transformer = (torch.nn.Sequential(layer).to("cpu").eval() for layer in layers)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        expected = transformer(x)
        for model in (encoder, transformer):
            apply_group_offloading(model, cpu, offload_type="leaf_level", offload_to_disk_path=folder)
        error = ((transformer(x) - expected).norm() / expected.norm()).item()
    return Finding(not error < 0.1, f"the output of the second model is {error:.1e} off")


PATCH = Patch(
    id="diffusers-group-offload-files",
    summary="models that diffusers offloads to one folder in groups silently compute with each other's weights",
    groups=("offload",),
    silent=True,
    links=("https://github.com/huggingface/diffusers/pull/11682",),
    why="""
        TODO
    """,
    repair="""
        TODO
    """,
    requires=("diffusers>=0.35",),
    tested_up_to="0.42.1",
    edits=group_files.OWN_FILES,
    defect=defect,
)
