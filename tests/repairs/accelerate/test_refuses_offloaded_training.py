"""An ``Accelerator`` prepares an offloaded quantized model for adapters, in one process; in a distributed run it refuses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import patches
from patches.engine import gate
from tests.repairs.peft.offloading import offloaded, save_base

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(
    not gate.satisfied("accelerate>=1.1"),
    reason="accelerate before 1.1 refuses such models in other code, which the patch does not change",
)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.fixture
def model(tmp_path: Any) -> Iterator[Any]:
    with patches.applied():
        base = offloaded(save_base(tmp_path / "base"), "int8", "dispatch_model")
        yield peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def test_one_process_prepares_it(model: Any) -> None:
    assert "disk" in model.hf_device_map.values()
    assert accelerate.Accelerator(cpu=True).prepare_model(model) is model


def test_a_distributed_run_refuses_it_as_before(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What torchrun sets.
    rank: dict[str, Any] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    # Or accelerate refuses every model with a device map before it asks whether it is quantized.
    rank["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    for name, value in {**rank, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.distributed_type.value == "MULTI_CPU"
    with pytest.raises(ValueError, match="8-bit or 4-bit precision on multiple devices in any distributed mode"):
        accelerator.prepare_model(model)
