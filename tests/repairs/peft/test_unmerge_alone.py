"""INT8 layers after adapters were merged and taken out, with no patch in but those that repair this."""

from __future__ import annotations

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from patches.engine.gate import satisfied  # noqa: E402
from patches.repairs.reproducers.adapted_layer import show_unmerge_error
from tests.repairs.peft.merging import ADAPTERS, config  # noqa: E402

if satisfied("peft<0.15") and not torch.cuda.is_available():
    pytest.skip("peft 0.14 dequantizes on CUDA only, to merge", allow_module_level=True)
ID = "peft-unmerge"


@pytest.mark.parametrize("adapter", sorted(set(ADAPTERS) - {"dora", "lora-bias"}))
def test_alone_on_int8(adapter):
    """With no other patch in: before 0.48 the next move of what is put back would quantize the packed weights again."""
    if adapter in ("pvera", "randlora") and not satisfied("bitsandbytes>=0.48"):
        pytest.skip("their patches are for bitsandbytes from 0.48 on")
    config(adapter)  # skips what this release of peft cannot merge
    name, options, _ = ADAPTERS[adapter]
    with patches.applied(ID):
        assert not show_unmerge_error(name, int8=True, **options).present
