"""``prepare_model_for_kbit_training`` says that it doubles experts, and what it says can be done is right."""

from __future__ import annotations

import contextlib

import pytest

import patches
from patches.repairs.reproducers.mixtures import load_mixture_in_4bit
from patches.repairs.reproducers.log_records import record_logs

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

ID = "peft-upcasts-experts"


def experts(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 3]


def test_said_once_with_the_figure():
    expected, model = peft.prepare_model_for_kbit_training(load_mixture_in_4bit()), load_mixture_in_4bit()
    before = sum(parameter.nbytes for parameter in experts(model))
    with patches.applied(ID), record_logs() as said:
        peft.prepare_model_for_kbit_training(model)
        peft.prepare_model_for_kbit_training(model)  # what is float32 does not grow
    (message,) = [record.getMessage() for record in said]
    assert f"{before / 1000:.1f} kB become {2 * before / 1000:.1f} kB" in message
    assert "model.layers.0.mlp.experts.gate_up_proj and 1 more" in message
    assert sum(parameter.nbytes for parameter in experts(model)) == 2 * before
    for one, other in zip(model.parameters(), expected.parameters()):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad


def test_silent_where_nothing_grows():
    from transformers import AutoModelForCausalLM

    cast = load_mixture_in_4bit()
    for parameter in experts(cast):
        parameter.data = parameter.data.float()
    plain = AutoModelForCausalLM.from_config(load_mixture_in_4bit().config)  # not quantized: all of it is made float32
    with patches.applied(ID), record_logs() as said:
        peft.prepare_model_for_kbit_training(cast)
        peft.prepare_model_for_kbit_training(plain)
    assert not said


def step(implementation: str, kept: bool, autocast: bool) -> float:
    """The loss of a step, and a backward."""
    torch.manual_seed(0)
    model = load_mixture_in_4bit()
    model.set_experts_implementation(implementation)
    peft.prepare_model_for_kbit_training(model)
    if kept:  # what the message says
        for p in model.parameters():
            if p.dim() == 3:
                p.data = p.data.to(torch.bfloat16)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).train()
    ids = torch.arange(8)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = tuned(ids, labels=ids).loss
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_what_it_advises_runs(implementation):
    kept, upcast = step(implementation, kept=True, autocast=True), step(implementation, kept=False, autocast=True)
    if implementation == "grouped_mm":  # which autocast does not reach: its operands decide
        assert kept == pytest.approx(upcast, rel=1e-2)
    else:
        assert kept == upcast


def test_what_it_warns_of():
    for implementation in ("eager", "batched_mm"):
        with pytest.raises(RuntimeError, match="same dtype|scalar type"):
            step(implementation, kept=True, autocast=False)
    assert step("grouped_mm", kept=True, autocast=False) == pytest.approx(step("grouped_mm", False, False), rel=1e-2)
