"""``torch.distributed.checkpoint.load`` copies tensors into tensors of another form, or refuses them by their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...distributed.checkpoint_loads import READ_INTO_STAND_INS
from ...distributed.checkpoint_plans import SAME_ON_ALL_RANKS
from ...engine import Finding, Message, Patch

if TYPE_CHECKING:
    from bitsandbytes.nn import Linear4bit
    from torch import Tensor


def defect() -> Finding:
    """Load the checkpoint of a double-quantized layer into another one whose offset has more digits."""
    import tempfile
    import warnings

    import torch
    from bitsandbytes.nn import Linear4bit
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def layer(factor: float) -> Linear4bit:
        torch.manual_seed(0)
        made = Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True)
        made.weight.data.mul_(factor)
        return made.to("cpu")

    saved = layer(1)
    others = (layer(factor) for factor in (2.0**-20, 3.3, 1e-5))
    length = len(_packed(saved))
    live = next((other for other in others if len(_packed(other)) != length), None)
    assert live is not None, "digits of one number"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process is no distributed run
        save(saved.state_dict(), checkpoint_id=folder)
        into = live.state_dict()
        try:
            load(into, checkpoint_id=folder)
        except (ValueError, CheckpointException) as error:
            said = "Size mismatch" if "Size mismatch" in str(error) else str(error)
            return Finding(True, f"dcp.load of a 4-bit layer: {said}")
    same = all(torch.equal(into[key], value) for key, value in saved.state_dict().items())
    return Finding(not same, f"dcp.load of a 4-bit layer gives {'the saved' if same else 'another'} weight")


def _packed(layer: Linear4bit) -> Tensor:
    packed: Tensor = next(value for key, value in layer.state_dict().items() if "bitsandbytes__" in key)
    return packed


PATCH = Patch(
    id="torch-checkpoint-other-forms",
    summary="DCP loads 8-bit optimizer states into 32-bit ones unconverted, and rejects 4-bit checkpoints with a size mismatch",
    groups=("shard", "save"),
    silent=True,
    messages=(
        Message(
            "Size mismatch between saved torch.Size([167]) and current: torch.Size([168])",
            "torch/distributed/checkpoint/default_planner.py",
            parts=("Size mismatch between saved",),
        ),
    ),
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1405",
    ),
    why="""
        DCP compares only names and sizes, but bitsandbytes saves the same state in different forms, depending on the
        program:

        - An optimizer state has 8 or 32 bits, depending on the optimizer (``AdamW8bit``, ``AdamW``), on
          ``min_8bit_size`` and, under FSDP2, on the number of ranks. If it is saved in 8 bits and loaded into 32,
          packed values from 0 to 255 become the moments: the first step changes weights by a wrong amount,
          silently. In the other direction loading raises ``Missing key in checkpoint state_dict: ...absmax1``.
        - The packed entry of a 4-bit quantization state is JSON text, whose length depends on the digits of
          ``nested_offset``. A double-quantized model refuses the checkpoint of another one with the same shapes
          (``Size mismatch between saved torch.Size([167]) and current: torch.Size([168])``).
        - A checkpoint of a 4-bit model under FSDP2 that was saved without
          ``bitsandbytes-linear4bit-sharded-state-dict`` has packed weights without their quantization state. With
          that patch it cannot be loaded (``Missing key``).

        torch 2.6 to 2.15, bitsandbytes 0.46.1 to 0.50.2.
    """,
    repair="""
        The repair reads such entries into tensors of the saved form and converts them when all are read: 8 bits to 32
        exactly, 32 bits to 8 as a step of the optimizer rounds, text of any length. Packed weights without a
        quantization state must equal the model's bit for bit. Otherwise every rank raises an error that names the
        layer, and the packed weights of the model stay as they were.

        Ranks with and without the plugin make different plans. A rank with the plugin then warns when it saves, and
        raises an error when it loads, because some ranks would not load the quantization states.
    """,
    cost="""
        A look at each name. A tensor that is converted is in memory twice while it is read.
    """,
    requires=("torch>=2.6", "bitsandbytes>=0.46.1"),
    tested_up_to="2.15.0",
    edits=(*READ_INTO_STAND_INS, *SAME_ON_ALL_RANKS),
    defect=defect,
)
