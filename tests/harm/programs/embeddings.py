"""Quantized embeddings."""

from __future__ import annotations

import copy
import pickle

import torch
from bitsandbytes.nn import Embedding8bit, EmbeddingNF4, StableEmbedding

from ..catalogue import program
from ..checks import close, same
from ..layers import COLUMNS, ROWS, Quantized, random

IDS = torch.tensor([[0, 5, 63], [7, 7, 1]])


def embedding(q: Quantized, width: int = COLUMNS) -> tuple[torch.nn.Module, torch.Tensor]:
    """A quantized embedding, and its float weight."""
    layer = (EmbeddingNF4 if q.kind.name == "nf4" else Embedding8bit)(ROWS, width)
    weight = random(ROWS, width, seed=1)
    layer.load_state_dict({"weight": weight})
    return layer.to(q.device), weight.to(q.device)


KINDS = ("nf4", "int8")


@program(kinds=KINDS)
def looked_up(q: Quantized):
    """Rows by their ids, before and after copies and moves."""
    layer, weight = embedding(q)
    expected = weight[IDS.to(q.device)]
    for made in (layer, copy.deepcopy(layer), layer.to(q.device), layer.eval()):
        yield close(made(IDS.to(q.device)), expected, 0.15)


@program(kinds=KINDS)
def of_an_odd_width(q: Quantized):
    """A width that is no multiple of the block."""
    layer, weight = embedding(q, width=96)
    yield close(layer(IDS.to(q.device)), weight[IDS.to(q.device)], 0.15)


@program(kinds=KINDS)
def in_half(q: Quantized):
    """The module cast to half: codes stay codes."""
    layer, weight = embedding(q)
    yield close(layer.half()(IDS.to(q.device)).float(), weight[IDS.to(q.device)], 0.15)


@program(kinds=KINDS)
def pickled(q: Quantized):
    """Through pickle."""
    layer, weight = embedding(q)
    yield close(pickle.loads(pickle.dumps(layer))(IDS.to(q.device)), weight[IDS.to(q.device)], 0.15)


@program(kinds=KINDS, may_raise="not implemented")
def saved(q: Quantized):
    """A state dict, which the library does not have for it."""
    layer, _ = embedding(q)
    layer.state_dict()
    yield same(True, True)


@program(kinds=KINDS)
def in_front_of_a_quantized_layer(q: Quantized):
    """Embedding and layer in one model, whose gradient ends at the embedding."""
    layer, _ = embedding(q)
    x = layer(IDS.to(q.device)).detach().requires_grad_(True)
    q.layer(x).sum().backward()
    yield q.gradient(x)


@program(kinds=("nf4",))
def stable(q: Quantized):
    """``StableEmbedding``, which is not quantized, next to quantized layers."""
    layer = StableEmbedding(ROWS, COLUMNS).to(q.device)
    x = layer(IDS.to(q.device))
    yield close(q.layer(x), q.expected(x), q.tolerance)
