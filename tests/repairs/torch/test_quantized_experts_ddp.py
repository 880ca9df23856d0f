"""Quantized experts in DistributedDataParallel on two ranks: those of rank 0, packed, on both."""

from __future__ import annotations

import textwrap

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

WORKER = """
    import json, sys, torch, torch.distributed as dist
    import bitsandbytes
    from patches.experts import dense_operations
    from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts
    from patches.experts.tensor import as_parameter

    class Model(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            how = QuantizationConfig("int8", False, torch.int8, 6.0) if sys.argv[2] == "int8" else QuantizationConfig("nf4", True, torch.uint8)
            self.experts = as_parameter(split_and_quantize_experts(torch.randn(4, 32, 64), 2, how))
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x):
            return torch.nn.functional.linear(self.layer(x), self.experts[1])

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(Model(rank))
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(5))
    model(x[rank]).square().mean().backward()
    alone = Model(0)
    alone(x).square().mean().backward()
    found = {
        "experts": float((model.module.experts.dequantize() - alone.experts.dequantize()).abs().max()),
        "gradient": float((model.module.layer.weight.grad - alone.layer.weight.grad).abs().max()),
        "kind": type(model.module.experts).__name__,
        "dense": sum(dense_operations.COUNTS.values()),
    }
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.release("nf4"))])
def test_two_ranks(two_ranks, tmp_path, kind):
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER))
    for found in two_ranks(worker, tmp_path, kind):
        assert found["kind"] == ("Experts8bit" if kind == "int8" else "Experts4bit")
        assert found["experts"] == 0 and not found["dense"]
        assert found["gradient"] < (1e-2 if kind == "int8" else 1e-5)
