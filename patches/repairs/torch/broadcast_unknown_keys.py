"""A full state dict cannot be loaded into a quantized model that FSDP2 has sharded."""

from __future__ import annotations

from ...distributed.full_state_dict import SKIP_UNKNOWN_KEYS, TAKE_STATISTICS, WATCH_PACKED_WEIGHTS
from ...engine import Finding, Message, Patch


def defect() -> Finding:
    """Load the state dict of a 4-bit layer into the layer itself, sharded over one rank."""
    import torch
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from ..reproducers.process_group import one_rank

    torch.manual_seed(0)
    float32 = {"compute_dtype": torch.float32, "quant_storage": torch.float32}
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", **float32).requires_grad_(False).to("cpu")
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False)
    with one_rank() as mesh:
        fully_shard(layer, mesh=mesh)
        try:
            set_model_state_dict(layer, dict(saved), options=options)
        except KeyError as error:
            return Finding(True, f"loading a full state dict: KeyError: {error}")
        same = torch.equal(layer.weight.full_tensor(), saved["weight"])
    return Finding(not same, f"packed weights {'equal' if same else 'differ from'} those of the full state dict")


PATCH = Patch(
    id="torch-broadcast-unknown-keys",
    summary="under FSDP2 a full state dict cannot be loaded into a quantized model: KeyError for weight.absmax",
    groups=("shard", "save"),
    messages=(
        Message(
            "KeyError: 'base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight.absmax'",
            "figure",
            parts=("KeyError: '", "weight.absmax'"),
            holds=("KeyError: 'weight.absmax'",),
        ),
    ),
    links=("https://github.com/pytorch/pytorch/issues/149516",),
    why="""
        ``set_model_state_dict`` with ``broadcast_from_rank0`` and ``cpu_offload`` loads one file into all ranks;
        accelerate and its Trainer resume ``FULL_STATE_DICT`` checkpoints this way. torch then looks up every key of
        the file in the state dict of the sharded model, in which it has listed only parameters and buffers. A
        quantized layer has more keys: ``absmax`` and the rest of a quantization state, ``SCB``. So loading raises
        ``KeyError: '….base_layer.weight.absmax'``, or ``….SCB``. This happens with the file of a whole model, and
        with the file of a sharded one whose quantization states were saved
        (``bitsandbytes-linear4bit-sharded-state-dict``, which includes this edit). Without ``cpu_offload``, unknown
        keys are passed to ``load_state_dict``, as they should be. torch 2.7 to 2.15 (#149516, open).
    """,
    repair="""
        The repair moves the keys that exist. Every rank keeps the quantization states that rank 0 sends (torch
        sends all of them, and the other ranks drop keys that are neither parameter nor buffer), so all ranks load
        the same model. A file whose packed weights have no quantization state (saved sharded, without the plugin)
        loads if the packed weights equal the model's own. Otherwise it raises an error on every rank, strict or
        not, and the packed weights stay as they were. For this the ranks exchange messages through the store of
        their group, and only in this case. A rank with the plugin warns if rank 0 runs without it.
    """,
    requires=("torch>=2.7", "bitsandbytes>=0.46.1"),
    tested_up_to="2.15.0",
    edits=(SKIP_UNKNOWN_KEYS, *TAKE_STATISTICS, WATCH_PACKED_WEIGHTS),
    defect=defect,
)
