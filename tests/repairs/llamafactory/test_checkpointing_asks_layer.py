"""LLaMA-Factory's checkpointing compiled against itself in eager: the same bits, in one graph."""

from __future__ import annotations

from typing import Any

import pytest

import patches
from patches.repairs.reproducers.graphs import count_graphs

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed, nor the TRL and the datasets it needs")

ID = "llamafactory-checkpointing-asks-layer"
IDS = torch.arange(8)[None]


class Calls:
    """Put behind ``Module`` in the order of a layer's classes: its ``super().__call__`` is this one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return torch.nn.Module.__call__(self, *args, **kwargs)  # type: ignore[arg-type]


def llama(reentrant: bool = True, layers: tuple[int, ...] = (0, 1, 2), **arguments: bool) -> torch.nn.Module:
    """A tiny Llama, checkpointed as LLaMA-Factory's ``load_model`` does, in which two projections of ``layers`` train."""
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    prepare_model_for_training(model, ModelArguments("tiny", use_reentrant_gc=reentrant, **arguments))
    model.requires_grad_(False)
    for layer in (model.model.layers[i] for i in layers):
        layer.self_attn.q_proj.requires_grad_(True)
        layer.mlp.down_proj.requires_grad_(True)
    return model.train()


def step(model: torch.nn.Module, call: Any = None) -> list[torch.Tensor]:
    """The loss, and the gradient of every weight that trains."""
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(*pair) for pair in zip(found, expected))


@pytest.mark.parametrize("model", [
    pytest.param({}, id="reentrant, their default"),
    pytest.param({"reentrant": False}, id="non-reentrant"),
    pytest.param({"layers": (1,)}, id="one layer trains"),
    pytest.param({"upcast_layernorm": True, "upcast_lmhead_output": True}, id="upcast"),
    pytest.param({"disable_gradient_checkpointing": True}, id="not checkpointed"),
])  # fmt: skip
def test_one_graph_of_the_same_bits(model):
    arguments, expected = model, step(llama(**model))
    with patches.applied(ID):
        model = llama(**arguments)
        assert same(step(model), expected), "eager"
        torch.compiler.reset()
        assert same(step(model, torch.compile(model, fullgraph=True, backend="aot_eager")), expected)


def test_in_pieces_without_the_patch():
    model = llama()
    assert count_graphs(lambda ids: model(input_ids=ids).logits, IDS) > 1


def test_only_layers_that_train_are_checkpointed():
    """As in eager: the layers above and below the one that trains keep what they computed."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    with patches.applied(ID):
        torch.compiler.reset()
        torch.compile(llama(layers=(1,)), fullgraph=True, backend=backend)(input_ids=IDS)
    (graph,) = graphs
    assert sum(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in graph.graph.nodes) == 1


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradients_arrive_where_the_graph_ends_at_the_checkpoint(reentrant):
    def broken() -> torch.nn.Module:
        model = llama(reentrant)
        model.model.layers[0].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        return model

    expected = step(broken())
    assert all(tensor.any() for tensor in expected)
    with patches.applied(ID):
        model = broken()
        torch.compiler.reset()
        assert same(step(model, torch.compile(model, backend="aot_eager")), expected)


def test_a_call_of_the_layers_own_stays():
    def counted() -> torch.nn.Module:
        model = llama()
        layer = model.model.layers[0]
        layer.__class__ = type("Counted", (type(layer), type("Base", (Calls, torch.nn.Module), {})), {"calls": 0})
        return model

    expected = step(counted())
    with patches.applied(ID):
        model = counted()
        torch.compiler.reset()
        assert same(step(model, torch.compile(model, backend="aot_eager")), expected)
    assert model.model.layers[0].calls == 2, "forward and recomputed"
