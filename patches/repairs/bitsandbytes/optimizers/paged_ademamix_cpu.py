"""Paged AdEMAMix raises an error on a CPU for every parameter that is large enough to be paged.

Since 0.50 the optimizers run on a CPU, where paged ones allocate their states like others, with a warning. AdEMAMix
allocates the state of its two averages itself and lacks this: from 100,000 values on it asks the library for managed
memory, which a CPU does not have. ``PagedAdEMAMix`` and ``PagedAdEMAMix8bit`` (``paged_ademamix_32bit`` and
``paged_ademamix_8bit`` of ``Trainer``) raise ``Method 'cget_managed_ptr' not available in CPU-only version of
bitsandbytes``. Before 0.50 no optimizer runs on a CPU.

The repair allocates the state like that of ``AdEMAMix``, and the steps equal those of ``AdEMAMix`` bit for bit.

What it costs: on other devices a look at the device when a paged state is made.

Upstream: https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1901
"""

from __future__ import annotations

from typing import Any

from ....engine import CannotShow, Finding, Patch, Rewrite


def defect() -> Finding:
    """A step of PagedAdEMAMix8bit on a layer with 102,400 weights, and the same of AdEMAMix8bit."""
    import torch
    from bitsandbytes.optim import AdEMAMix8bit, PagedAdEMAMix8bit

    def train(kind: Any) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(320, 320)
        layer(torch.ones(2, 320)).square().sum().backward()
        kind(layer.parameters()).step()
        return layer.weight.detach()

    try:
        expected = train(AdEMAMix8bit)
    except RuntimeError as error:
        raise CannotShow("before 0.50 no optimizer of bitsandbytes steps on a CPU") from error
    try:
        found = train(PagedAdEMAMix8bit)
    except RuntimeError as error:
        return Finding(True, str(error).splitlines()[0])
    off = (found - expected).abs().max().item()
    return Finding(off > 0, f"weights after a step, paged against not: largest difference {off}")


_PAGED = "buff = F.get_paged(*(2, *p.size()), dtype=dtype, device=p.device)"

PATCH = Patch(
    id="bitsandbytes-paged-ademamix-cpu",
    summary="paged AdEMAMix raises an error on a CPU, where other paged optimizers work",
    links=(
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1901",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/ademamix.py#L260",
    ),
    requires=("bitsandbytes>=0.50",),
    tested_up_to="0.50.2",
    seen_on=("2.13",),
    edits=(
        Rewrite(
            "bitsandbytes.optim.ademamix:AdEMAMix._get_state_double_buffer",
            _PAGED,
            'if p.device.type == "cpu":\n'
            "    return torch.zeros((2, *p.size()), dtype=dtype, device=p.device)\n"
            f"{_PAGED}",
        ),
    ),
    defect=defect,
)
