"""peft's three copies of the embedding hook, each registered by peft itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import patches

peft = pytest.importorskip("peft")

ID = "transformers-input-grads-hook"


class Model(nn.Module):
    """A model of one's own: input embeddings, checkpoints, and nothing of transformers."""

    is_gradient_checkpointing = True
    config = {"model_type": "own"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(4, 4)
        self.linear = nn.Linear(4, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        pass

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, self.embedding(ids), use_reentrant=True).square().sum()


def kbit() -> nn.Module:
    model = Model()
    model.is_loaded_in_4bit = True
    peft.prepare_model_for_kbit_training(model).linear.weight.requires_grad_(True)
    return model


def adapter(**kwargs) -> nn.Module:
    return peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["linear"], **kwargs))


def mixed() -> nn.Module:
    return peft.get_peft_model(Model(), peft.LoraConfig(r=2, target_modules=["linear"]), mixed=True)


@pytest.mark.parametrize("make", [kbit, adapter, mixed])
def test_one_graph_of_the_same_step(make):
    def step(call, model):
        call(torch.arange(4)).backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    torch.manual_seed(0)
    model = make().train()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, fullgraph=True, backend="eager")(torch.arange(4)).backward()
    expected = step(model, model)
    with patches.applied(ID):
        torch.manual_seed(0)
        model = make().train()
        got = step(torch.compile(model, fullgraph=True, backend="aot_eager"), model)
    assert len(got) == len(expected) > 0 and all(map(torch.equal, got, expected))
