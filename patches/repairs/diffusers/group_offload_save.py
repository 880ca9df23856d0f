"""A model that diffusers has offloaded to the disk in groups is saved with what happens to be in memory."""

from __future__ import annotations

from ...engine import Finding, Patch
from ...offload import group_files


def defect() -> Finding:
    """Offload a 4-bit model to the disk in groups, and compare its state dict with the one from before."""
    import tempfile

    import torch
    from bitsandbytes.nn import Linear4bit
    from diffusers.hooks import apply_group_offloading

    torch.manual_seed(0)
    layers = [Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to("cpu")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        cpu = torch.device("cpu")
        apply_group_offloading(model, cpu, offload_type="leaf_level", offload_to_disk_path=folder)
        saved = model.state_dict()
        wrong = [name for name, tensor in expected.items() if not torch.equal(saved[name], tensor)]
    return Finding(bool(wrong), f"{len(wrong)} of {len(expected)} tensors in the state dict are wrong")


PATCH = Patch(
    id="diffusers-group-offload-save",
    summary="saving a model that diffusers has offloaded to the disk in groups silently saves uninitialized memory",
    groups=("save", "offload"),
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
    edits=(group_files.REMEMBER, group_files.SAVE),
    defect=defect,
)
