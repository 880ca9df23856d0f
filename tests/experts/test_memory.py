"""What a training step allocates beside quantized experts: no more than in floating point, and two experts' matrices."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("peft", minversion="0.19", reason="the models are those of test_lora")
pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

from patches.engine.gate import satisfied  # noqa: E402
from patches.experts import dense_operations  # noqa: E402
from patches.experts.tensor import QuantizedExperts  # noqa: E402
from tests.experts.test_lora_factors import IDS, pair  # noqa: E402

pytestmark = pytest.mark.one_in(2)


def peak(model, checkpointing):
    """The most that a second training step has allocated at once; what trains is the embedding."""
    model.train().requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    for _ in range(2):
        embedding.grad = None
        with torch.profiler.profile(profile_memory=True) as seen:
            model(input_ids=IDS, labels=IDS).loss.backward()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_a_step(implementation, checkpointing):
    floating, quantized = pair(implementation, experts=64)
    dense_operations.COUNTS.clear()
    took = [peak(model, checkpointing) for model in (floating, quantized)]
    whole = [sum(p.nbytes for p in model.parameters() if p.dim() == 3) for model in (floating, quantized)]
    experts = [p for p in quantized.parameters() if isinstance(p, QuantizedExperts)][:2]
    two = 2 * 4 * sum(parameter[0].numel() for parameter in experts)
    if not satisfied("bitsandbytes>=0.49"):
        # The kernel for a CPU is in Python there: beside the result an index of 8 bytes, and values, for each number.
        two += 14 * max(parameter[0].numel() for parameter in experts)
    assert took[1] <= took[0] + two and not dense_operations.COUNTS
    assert took[1] + whole[1] <= 0.35 * (took[0] + whole[0])
