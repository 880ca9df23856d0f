"""What is offloaded is on the device for its own forward and its own backward: counted in bytes of live storage.

Also of ``accelerate-int8-offload-resident-weights``.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import patches
from tests.repairs.peft.offloading import CHECKPOINTING, IDS, KINDS, lora, offloaded

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


class Watch:
    """Every weight that a LoRA layer had while it ran, and how many of its bytes are still alive."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0
        for layer in model.modules():
            if hasattr(layer, "lora_A") and layer.base_layer.weight.is_meta:
                layer.lora_A["default"].register_forward_hook(
                    lambda *_, layer=layer: self.look(layer.base_layer.weight)
                )

    def look(self, weight: torch.Tensor) -> None:
        assert not weight.is_meta
        reference = StorageWeakRef(weight.untyped_storage())
        if all(reference.cdata != known.cdata for known, _ in self.seen if not known.expired()):
            self.seen.append((reference, weight.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.live())

    def live(self) -> int:
        return sum(size for reference, size in self.seen if not reference.expired())

    @property
    def total(self) -> int:
        return sum(size for _, size in self.seen)

    @property
    def largest(self) -> int:
        return max(size for _, size in self.seen)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", KINDS)
def test_counted_bytes(kind, checkpointing, base, device):
    with patches.applied():
        model = offloaded(base, kind, "disk_offload", device)
        if checkpointing != "none":
            options = {"use_reentrant": CHECKPOINTING[checkpointing]}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        model = lora(model)
        watch = Watch(model)
        ids = IDS.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        assert len(watch.seen) == 14
        assert watch.live() == 0, f"{watch.live()} of {watch.total} bytes wait for backward"
        assert watch.peak == watch.largest, f"{watch.peak} bytes at once in forward"
        block = watch.total // 2
        loss.backward()
        assert watch.live() == 0
        assert watch.peak <= block, f"{watch.peak} bytes at once in backward, a block has {block}"


@pytest.mark.parametrize("offload", [False, True], ids=["whole", "offloaded"])
def test_a_forward_without_backward_leaves_nothing(offload, device):
    """BOFT saves results of its own operations for backward, of which autograd holds none beside their nodes."""
    import accelerate
    import peft

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8)).to(device)
    with patches.applied():
        if offload:
            accelerate.cpu_offload(model, execution_device=torch.device(device))
        model = peft.get_peft_model(model, peft.BOFTConfig(boft_block_size=4, target_modules=["0"]))
        counts = []
        for _ in range(3):
            model(torch.ones(1, 8, device=device))
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    assert counts[1:] == counts[:1] * 2
