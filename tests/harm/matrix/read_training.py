"""What trains: optimizers of bitsandbytes, and prompts in front of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn

from .reading import Shown, reader
from .states import only
from .subject import COLUMNS, Subject, random


@reader(last=True)
def steps_of_adam8bit(s: Subject) -> Iterator[Shown]:
    """An embedding that asks for optimizer states of 32 bits trains as with torch's Adam."""
    only(s.kind.family == "stable" and s.call is None and not s.offloaded)
    weight = s.layer.weight
    only(type(weight) is nn.Parameter and weight.dtype == torch.float32)
    ours, plain = weight.requires_grad_(True), nn.Parameter(s.weight.clone())
    before = ours.detach().clone()
    optimizers = bnb.optim.Adam8bit([ours], lr=1e-2), torch.optim.Adam([plain], lr=1e-2)
    for seed in (20, 21, 22):
        ours.grad, plain.grad = random(seed), random(seed)
        for optimizer in optimizers:
            optimizer.step()
    yield ours.detach() - before, plain.detach() - s.weight, 1e-3


class Prompted(nn.Module):
    """A model as prompt tuning asks for it; ``device`` is what its author says."""

    def __init__(self, layer: nn.Module, device: Any) -> None:
        super().__init__()
        sizes = {
            "model_type": "own",
            "num_layers": 1,
            "hidden_size": COLUMNS,
            "num_attention_heads": 2,
            "vocab_size": 10,
        }
        self.config: Any = _Config(sizes)
        self.device = device
        self.embed, self.layer = nn.Embedding(10, COLUMNS), layer
        self.read: Any = None

    def prepare_inputs_for_generation(self) -> None:
        pass

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        self.read = inputs_embeds.detach()
        return SimpleNamespace(logits=self.layer(inputs_embeds))


class _Config(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@reader(last=True)
def prompt_tuning(s: Subject) -> Iterator[Shown]:
    """A prompt in front of the layer, in a model that says its device as a word, as torch does, or not at all."""
    from peft import PromptTuningConfig, get_peft_model

    only(not s.kind.embeds and not s.adapter and s.call is None and s.path == "layer")
    for device in ("cpu", torch.device("cpu"), None):
        model = Prompted(s.root, device)
        tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        with torch.no_grad():
            y = tuned(input_ids=torch.tensor([[1, 2, 3]], device="cpu")).logits
        yield y, s.expected(model.read), s.tolerance
