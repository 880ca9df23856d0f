"""``save_pretrained`` into the folder that an offloaded model reads from destroys the checkpoint."""

from __future__ import annotations

from ...engine import Finding, Message, Patch
from ...offload.save_over_own_files import rewrite_saving
from ..reproducers import tiny_models


def defect() -> Finding:
    """Load a tiny Llama of three shards with its layers on the disk, and save it to where it came from."""
    import tempfile

    import torch
    from transformers import LlamaForCausalLM

    model = tiny_models.make_llama(hidden_size=8, intermediate_size=8, vocab_size=8)
    on_cpu = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    device_map = {**dict.fromkeys(on_cpu, "cpu"), "model.layers": "disk"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as off:
        model.save_pretrained(folder, max_shard_size="1KB")
        offloaded = LlamaForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=off)
        try:
            offloaded.save_pretrained(folder)
        except FileNotFoundError as error:
            return Finding(True, f"{type(error).__name__}: the checkpoint is lost: {error.args[0].split('/')[0]}")
        again = LlamaForCausalLM.from_pretrained(folder).state_dict()
    wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, again[name])]
    return Finding(bool(wrong), f"tensors that differ: {len(wrong)}")


_SAVE = "transformers.modeling_utils:PreTrainedModel.save_pretrained"

PATCH = Patch(
    id="transformers-save-over-checkpoint",
    summary="save_pretrained into the folder that an offloaded model reads from destroys the checkpoint",
    groups=("offload", "save"),
    messages=(
        Message(
            "FileNotFoundError: No such file or directory: .../model-00001-of-00003.safetensors",
            "safetensors/_safetensors_rust.abi3.so",
            parts=("No such file or directory: ", ".safetensors"),
            holds=("No such file or directory: ",),
        ),
    ),
    links=("https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py#L3540",),
    why="""
        If a model with layers on the disk was loaded from safetensors, accelerate's hooks read these layers from
        the checkpoint itself. ``save_pretrained`` into that folder first removes the shards whose names it will not
        write again, and then reads from them: ``FileNotFoundError: No such file or directory:
        .../model-00001-of-00003.safetensors``. The weights are lost, on the disk and for the model. If there are as
        many shards as before, a shard may be overwritten before its last layer is read. This affects programs that
        fine-tune, merge and save in place, on transformers 4.53 to 5.24, quantized or not.
    """,
    repair="""
        With the repair the new files are written beside the files that the model reads, and get their names when
        all are written. If saving fails or is interrupted, the checkpoint is as it was, including ``config.json``.
        The old files stay in a folder beside the checkpoint (as links) until the model is deleted, and the model
        goes on reading from there. If the model reads nothing from that folder, nothing changes.
    """,
    cost="""
        The disk holds both sets of files until the model is deleted.
    """,
    requires=("transformers>=4.53", "accelerate>=0.31"),
    tested_up_to="5.24.0",
    edits=rewrite_saving(_SAVE, "model_to_save.config.save_pretrained(save_directory)", "safe_save_file"),
    defect=defect,
)
