"""Checkpointing switched off and on: as many hooks as before, and what they are for."""

from __future__ import annotations

import pytest

import patches

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="checkpointing registers no hook before 5")

ID = "transformers-input-grads-hooks-pile-up"
IDS = torch.arange(8)[None]


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config).train().requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.requires_grad_(True)  # what an adapter in the first layer is
    return model


def hooks(model: torch.nn.Module) -> int:
    return len(model.get_input_embeddings()._forward_hooks)


def on(model: torch.nn.Module) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": True})


def off(model: torch.nn.Module) -> None:
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def gradient(model: torch.nn.Module) -> torch.Tensor:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return model.model.layers[0].self_attn.q_proj.weight.grad


def cycle(model: torch.nn.Module, times: int) -> torch.nn.Module:
    on(model)
    for _ in range(times):
        off(model)
        on(model)
    return model


def test_no_more_than_two_and_the_same_gradients():
    expected = cycle(llama(), 9)
    assert hooks(expected) == 10
    with patches.applied(ID):
        model = cycle(llama(), 9)
        assert hooks(model) == 2
        assert torch.equal(gradient(model), gradient(expected))


@pytest.mark.parametrize("enabled", [1, 2, 5])
def test_disabling_leaves_a_hook_where_it_did(enabled):
    def left() -> list[bool]:
        model, found = llama(), []
        for _ in range(enabled):
            model.enable_input_require_grads()
        for _ in range(2):
            model.disable_input_require_grads()
            found.append(model.get_input_embeddings()(IDS).requires_grad)
        model.enable_input_require_grads()
        return [*found, model.get_input_embeddings()(IDS).requires_grad]

    expected = left()
    with patches.applied(ID):
        assert left() == expected


def test_a_new_embedding_gets_its_hook():
    with patches.applied(ID):
        model = cycle(llama(), 3)
        model.set_input_embeddings(torch.nn.Embedding(16, 8).requires_grad_(False))
        on(model)
        assert hooks(model) == 1 and model.get_input_embeddings()(IDS).requires_grad


def test_a_reference_pass_in_each_step_compiles_once():
    """As DPOTrainer does it: with the hook that Dynamo can trace, and twice before the first step."""

    def graphs() -> int:
        torch.compiler.reset()
        made = []
        model = llama()
        model.enable_input_require_grads()
        on(model)
        compiled = torch.compile(model, backend=lambda module, _: made.append(module) or module.forward)
        for _ in range(4):
            compiled(IDS)
            off(model)
            on(model)
        return len(made)

    with patches.applied("transformers-input-grads-hook", "transformers-warning-once"):
        several = graphs()
        with patches.applied(ID):
            assert graphs() == several / 4
