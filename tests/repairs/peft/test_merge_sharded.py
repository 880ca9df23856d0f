"""A merge into a quantized layer that FSDP2 has sharded is an error that names the layer, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import patches

METHODS = {
    "FourierFTConfig": {"n_frequency": 10},
    "WaveFTConfig": {"n_frequency": 10},
    "DeloraConfig": {"r": 4},
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "HRAConfig": {"r": 4},
    "C3AConfig": {"block_size": 16, "init_weights": "gaussian"},
}


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_refused(method, bits, one_rank):
    torch.manual_seed(0)
    layer = (
        Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        if bits == 4
        else Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    )
    model = torch.nn.Sequential(layer).requires_grad_(False).to("cpu")
    with patches.applied():
        adapted = peft.get_peft_model(model, getattr(peft, method)(target_modules=["0"], **METHODS[method]))
        fully_shard(adapted, mesh=init_device_mesh("cpu", (1,)))
        before = layer.weight.to_local().clone()
        with pytest.raises((NotImplementedError, RuntimeError), match=f"{type(layer).__name__} '.*0.*base_layer'"):
            adapted.merge_adapter()
        assert torch.equal(layer.weight.to_local(), before)
