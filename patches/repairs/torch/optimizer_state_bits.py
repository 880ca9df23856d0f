"""A full optimizer state dict in 8 bits is loaded into states of 32 bits as if its codes were numbers.

``set_optimizer_state_dict`` with ``full_state_dict=True`` writes what was saved into the states that the optimizer has
(``broadcast_from_rank0``), or gives the optimizer shards of codes with the scales of the whole. Whether a state has 8
bits or 32 depends on the optimizer (``AdamW8bit``, then ``AdamW``), on ``min_8bit_size`` and, under FSDP2, on the number
of ranks. With ``broadcast_from_rank0`` codes from 0 to 255 become the moments, and nothing is said: the next step moves
weights by a wrong amount. In the other ways it is an error in the first step. torch 2.6 to 2.15.

The repair brings the full state dict into the bits that the optimizer has before it is sent: 8 bits to 32 exactly, 32
bits to 8 as a step of the optimizer rounds them. A state in the same bits is left as it is.

It costs a look at each name, and the whole state of one parameter where it differs.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...engine import CannotShow, Finding, Patch, Rewrite
from ..helpers import optimizer_bits

if TYPE_CHECKING:
    from torch import Tensor

_STATE = re.compile(r"(.*__bnb_optimizer_quant_state__\.)state([12])")


def convert(full: dict[str, Any], local: dict[str, Any]) -> None:
    """Bring each whole state in ``full`` into the bits that the state has in ``local``; both are flat."""
    import torch

    bits = {torch.uint8, torch.float32}
    for key, value in list(full.items()):
        found, own = _STATE.fullmatch(key), local.get(key)
        if found is None or not isinstance(own, torch.Tensor) or {own.dtype, value.dtype} != bits:
            continue
        names = [f"{found[1]}{part}{found[2]}" for part in ("qmap", "absmax")]
        if own.dtype == torch.uint8:
            table, scales = local[names[0]], local[names[1]]
            whole = torch.empty(scales.shape, dtype=torch.float32, device=value.device)
            full[key], full[names[1]] = optimizer_bits.to_8_bits(value, table, whole)
            full[names[0]] = table
        elif all(name in full for name in names):
            table, scales = (full.pop(name) for name in names)
            full[key] = _whole(value, table, scales)
        else:
            raise ValueError(f"{key!r} was saved in 8 bits, and the full state dict lacks {names[1]!r}.")


def _whole(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    return optimizer_bits.to_float(codes, table, scales, (0,) * codes.dim(), tuple(codes.shape))


def defect() -> Finding:
    """Go on with ``AdamW`` from the full state dict of ``AdamW8bit``."""
    import torch
    from bitsandbytes.optim import AdamW, AdamW8bit
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    old, new = AdamW8bit(model.parameters()), AdamW(model.parameters())
    model(torch.randn(4, 64)).square().mean().backward()
    try:
        old.step()
    except RuntimeError as error:
        raise CannotShow("before 0.50 no optimizer of bitsandbytes steps on a CPU") from error
    old.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, new, get_optimizer_state_dict(model, old, options=options), options=options)
    state, found = old.state[model.weight], new.state[model.weight]["state1"]
    if found.dtype != torch.float32:
        return Finding(True, f"the state of AdamW is {found.dtype}")
    off = float((found - _whole(state["state1"], state["qmap1"], state["absmax1"])).abs().max())
    return Finding(off > 0, f"first moment of AdamW after loading: off by {off:.1e}")


PATCH = Patch(
    id="torch-optimizer-state-bits",
    summary="a full 8-bit optimizer state dict is loaded into 32-bit states as if its codes were numbers",
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633",),
    requires=("torch>=2.6", "bitsandbytes>=0.50"),
    tested_up_to="2.15.0",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "torch.distributed.checkpoint.state_dict:_load_optim_state_dict",
            find="flatten_local_osd, local_osd_mapping = _flatten_state_dict(local_state_dict)",
            replace="""
                flatten_local_osd, local_osd_mapping = _flatten_state_dict(local_state_dict)
                _patches_convert(flatten_osd, flatten_local_osd)
            """,
            names={"_patches_convert": convert},
        ),
    ),
    defect=defect,
)
