"""The embedding hook: the same values and gradients, compiled or not, and no gradient lost."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import patches
from patches.repairs.reproducers.graphs import count_graphs

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_in(2)

ID = "transformers-input-grads-hook"


def llama(checkpointing: dict | None) -> torch.nn.Module:
    """A Llama whose embedding is frozen, prepared for checkpointing as peft and the Trainer do."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config).train()
    model.get_input_embeddings().requires_grad_(False)
    model.enable_input_require_grads()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model


def step(call, model: torch.nn.Module) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad()
    ids = torch.arange(12).view(2, 6)
    loss = call(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("kind", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_one_graph_of_the_same_step(kind):
    expected = step(model := llama(kind), model)
    with patches.applied(ID):
        model = llama(kind)
        assert all(map(torch.equal, step(model, model), expected)), "eager changed"
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = step(compiled, model)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


class Embedded(torch.nn.Module):
    """A model whose graph ends between the embedding and a reentrant checkpoint."""

    def __init__(self, hooked: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = hooked.get_input_embeddings()
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * 2
        torch._dynamo.graph_break()
        return checkpoint(self.linear, x, use_reentrant=True).sum()


def test_no_gradient_is_lost_where_a_graph_ends_before_the_checkpoint():
    with patches.applied(ID):
        model = Embedded(llama(None))
        torch.compile(model, backend="aot_eager")(torch.arange(4)).backward()
    assert model.linear.weight.grad is not None
    eager = Embedded(llama(None))
    eager.linear.load_state_dict(model.linear.state_dict())
    eager(torch.arange(4)).backward()
    assert torch.equal(model.linear.weight.grad, eager.linear.weight.grad)


def test_a_hook_outlives_its_patch():
    with patches.applied(ID):
        model = llama({"use_reentrant": True})
        expected = step(model, model)
    assert all(map(torch.equal, step(model, model), expected))
    with patches.applied(ID):
        model = llama(None)
    embedding = model.get_input_embeddings()
    assert embedding(torch.arange(3)).is_leaf, "eager makes the output itself require grad"
    model.disable_input_require_grads()
    assert not embedding(torch.arange(3)).requires_grad


def test_without_gradients_the_output_is_left_alone():
    with patches.applied(ID), torch.no_grad():
        embedding = llama(None).get_input_embeddings()
        compiled = torch.compile(embedding, fullgraph=True, backend="eager")
        assert not compiled(torch.arange(3)).requires_grad
        assert count_graphs(embedding, torch.arange(3)) == 1


def test_what_is_returned_may_be_written_into():
    with patches.applied(ID):
        embedding = llama(None).get_input_embeddings()
        call = torch.compile(lambda ids: embedding(ids).mul_(2), fullgraph=True, backend="aot_eager")
        out = call(torch.arange(3))
    assert out.requires_grad
    assert torch.equal(out, embedding.weight[:3] * 2)


def test_opcheck():
    from patches.operators import require_grad

    torch.library.opcheck(require_grad.OPERATOR, (torch.randn(2, 3), require_grad.anchor))
