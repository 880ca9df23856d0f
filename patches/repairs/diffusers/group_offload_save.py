"""A model that diffusers has offloaded to the disk in groups is saved with what happens to be in memory."""

from __future__ import annotations

from ...engine import Finding, Patch
from ...offload import group_files
from ..reproducers.offloaded_groups import offload_to_disk


def defect() -> Finding:
    """Offload a 4-bit model to the disk in groups, and compare its state dict with the one from before."""
    import tempfile

    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layers = [Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to("cpu")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        offload_to_disk(model, folder)
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
        ``enable_group_offload(..., offload_to_disk_path=...)`` puts uninitialized memory in the place of weights that
        are on the disk. ``state_dict()`` returns that memory, and ``save_pretrained`` of a model or a pipeline saves
        it. There is no message. The model that is loaded from it gives noise or NaN. This affects all models, quantized
        or not, with diffusers 0.35 to 0.42.
    """,
    repair="""
        With the repair ``state_dict()`` of such a model reads these tensors from their files. All others are returned as
        they are. The model stays offloaded.
    """,
    cost="""
        The state dict of a model takes its whole size in CPU memory, as it does for a model that is not offloaded.
    """,
    requires=("diffusers>=0.35",),
    tested_up_to="0.42.1",
    edits=(group_files.REMEMBER, group_files.SAVE),
    defect=defect,
)
