"""Models that diffusers offloads to the disk in groups take each other's files, and compute with other weights."""

from __future__ import annotations

from ...engine import Finding, Patch
from ...offload import group_files
from ..reproducers.offloaded_groups import offload_to_disk


def defect() -> Finding:
    """Offload two 4-bit models to one folder, as ``pipe.enable_group_offload`` does, and run the second."""
    import tempfile

    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    x = torch.randn(2, 64)
    layers = [Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False) for _ in range(2)]
    encoder, transformer = (torch.nn.Sequential(layer).to("cpu").eval() for layer in layers)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        expected = transformer(x)
        for model in (encoder, transformer):
            offload_to_disk(model, folder)
        error = ((transformer(x) - expected).norm() / expected.norm()).item()
    return Finding(not error < 0.1, f"the output of the second model is {error:.1e} off")


PATCH = Patch(
    id="diffusers-group-offload-files",
    summary="models that diffusers offloads to one folder in groups silently compute with each other's weights",
    groups=("offload",),
    silent=True,
    links=("https://github.com/huggingface/diffusers/pull/11682",),
    why="""
        With ``offload_to_disk_path`` each group of layers is written to a file that is named after the module:
        ``proj_out``, ``norm``, ``""``. If there is a file with this name, diffusers uses it, whatever it contains.
        ``pipe.enable_group_offload`` gives all components the same folder. If two components have modules of one name,
        the second one then silently computes with the weights of the first. The same happens in the folder of an
        earlier run, with another model or another quantization. If LoRA is loaded into a model that is offloaded block
        by block, the next call raises ``KeyError: 'tensor_16'``. This affects all models, quantized or not, with
        diffusers 0.35 to 0.42; 0.34 names the file after the address of an object.
    """,
    repair="""
        With the repair a file is used again only if it holds the tensors of the group, bit for bit. Otherwise they are
        written to a file of their own: ``group_<hash>_1.safetensors``. If the layers of a group were on the disk for
        an earlier group, as when LoRA is loaded, their values are read from there first.
    """,
    cost="""
        A file that is there already is read once and compared, where diffusers does not read it. Nothing else takes
        longer.
    """,
    requires=("diffusers>=0.35",),
    tested_up_to="0.42.1",
    edits=group_files.OWN_FILES,
    defect=defect,
)
