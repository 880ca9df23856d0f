"""A full state dict cannot be loaded into a quantized model that FSDP2 has sharded.

One file is loaded into all ranks by ``set_model_state_dict`` with ``broadcast_from_rank0`` and ``cpu_offload``, as
accelerate and its Trainer resume from a checkpoint of the kind ``FULL_STATE_DICT``. torch then moves every key of the
file to the CPU in the state dict of the sharded model, of which it has listed parameters and buffers alone. The state
dict of a quantized layer has more: ``absmax`` and the rest of a quantization state, ``SCB``. So the load dies in
``KeyError: '….base_layer.weight.absmax'``, or ``….SCB``. That is a file of a whole model, or of a sharded one whose
statistics are saved (``bitsandbytes-linear4bit-sharded-state-dict``, which brings this edit too). Without
``cpu_offload`` a key that the model has not is left to ``load_state_dict``, as it should be. torch 2.7 to 2.15
(#149516, open).

The repair moves what is there, and lets every rank keep the quantization states that rank 0 sends (torch sends all, and the
other ranks drop what is no parameter or buffer): all ranks load the same model. A file whose packed weights have none
(saved sharded without the plugin) loads where they are the model's own, else it is an error on every rank, strict or
not, and packed weights stay as they were. Ranks ask each other by the store of their group, and only then. A rank with
the plugin warns where rank 0 has none.

Upstream: https://github.com/pytorch/pytorch/issues/149516
"""

from __future__ import annotations

from ...engine import Finding, Patch
from ..helpers.distributed.full_state_dict import SKIP_UNKNOWN_KEYS, TAKE_STATISTICS, WATCH_CODES


def defect() -> Finding:
    """Load the state dict of a 4-bit layer into the layer itself, sharded over one rank."""
    import tempfile

    import torch
    import torch.distributed as dist
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    float32 = {"compute_dtype": torch.float32, "quant_storage": torch.float32}
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", **float32).requires_grad_(False).to("cpu")
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False)
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
            set_model_state_dict(layer, dict(saved), options=options)
            same = torch.equal(layer.weight.full_tensor(), saved["weight"])
        except KeyError as error:
            return Finding(True, f"loading a full state dict: KeyError: {error}")
        finally:
            dist.destroy_process_group()
    return Finding(not same, f"the codes are {'those' if same else 'not those'} of the full state dict")


PATCH = Patch(
    id="torch-broadcast-unknown-keys",
    summary="under FSDP2 a full state dict cannot be loaded into a quantized model: KeyError for weight.absmax",
    links=("https://github.com/pytorch/pytorch/issues/149516",),
    requires=("torch>=2.7", "bitsandbytes>=0.46.1"),
    tested_up_to="2.15.0",
    seen_on=("2.13", "2.15"),
    edits=(SKIP_UNKNOWN_KEYS, *TAKE_STATISTICS, WATCH_CODES),
    defect=defect,
)
