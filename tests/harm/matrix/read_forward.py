"""Forward, backward, adapters and merges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.func import functional_call

from .states import adapted, only
from .subject import Subject

from .reading import Shown, looks, reader, shown


@reader(whole=True)
def forward(s: Subject) -> Iterator[Shown]:
    yield from shown(s)


@reader(whole=True)
def forward_eval(s: Subject) -> Iterator[Shown]:
    s.root.eval()
    yield from shown(s)


@reader(whole=True)
def forward_one_row(s: Subject) -> Iterator[Shown]:
    yield from shown(s, rows=1)


@reader()
def forward_twice(s: Subject) -> Iterator[Shown]:
    yield from shown(s)
    yield from shown(s, rows=2)


@reader()
def forward_bf16(s: Subject) -> Iterator[Shown]:
    only(not s.kind.embeds)
    yield from shown(s, dtype=torch.bfloat16, off=0.04)


@reader()
def forward_autocast(s: Subject) -> Iterator[Shown]:
    with torch.autocast("cpu", torch.bfloat16):
        yield from shown(s, off=0.04)


@reader()
def forward_inference(s: Subject) -> Iterator[Shown]:
    x = s.x()
    with torch.inference_mode():
        y = s.forward(x)
    yield y, s.expected(x), s.tolerance


@reader(whole=True)
def backward(s: Subject) -> Iterator[Shown]:
    only(not s.kind.embeds)
    x = s.x(grad=True)
    y = s.forward(x)
    yield y, s.expected(x), s.tolerance
    y.float().pow(2).sum().backward()
    yield x.grad, 2 * y.detach().float() @ s.effective(), max(s.tolerance, 0.02)


@reader()
def backward_checkpointed(s: Subject) -> Iterator[Shown]:
    only(not s.kind.embeds)
    x = s.x(grad=True)
    y = torch.utils.checkpoint.checkpoint(s.forward, x, use_reentrant=False)
    y.float().sum().backward()
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader()
def forward_tied(s: Subject) -> Iterator[Shown]:
    only(s.tied)
    yield from looks(s, s.root.head)


@reader()
def call_functionally(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    x = s.x()
    with torch.no_grad():
        yield functional_call(s.root, dict(s.root.named_parameters()), (x,)), s.expected(x), s.tolerance


def _adapter_gradients(s: Subject) -> Iterator[Shown]:
    wrapped = s.root.get_submodule(s.path.removesuffix(".base_layer"))
    x = s.x(grad=True)
    y = s.forward(x)
    yield y, s.expected(x), s.tolerance
    y.float().sum().backward()
    a, b = wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight
    if s.adapter == "lora":
        ones = torch.ones_like(y).float()
        found = ones.t() @ (x.detach().float() @ a.detach().float().t()) * wrapped.scaling["default"]
        yield b.grad, found, max(s.tolerance, 0.02)
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader(last=True)
def lora_gradients(s: Subject) -> Iterator[Shown]:
    if not s.adapter:
        adapted(s, dora=False)
    only(s.adapter == "lora")
    s.root.zero_grad()
    yield from _adapter_gradients(s)


@reader(last=True)
def dora_gradients(s: Subject) -> Iterator[Shown]:
    if not s.adapter:
        adapted(s, dora=True)
    only(s.adapter == "dora")
    s.root.zero_grad()
    yield from _adapter_gradients(s)


def _merge(s: Subject, dora: bool = False) -> torch.Tensor:
    if not s.adapter:
        adapted(s, dora)
    only(s.adapter in ("lora", "dora"))
    return s.effective()


@reader(last=True)
def merge(s: Subject) -> Iterator[Shown]:
    whole = _merge(s)
    s.root.merge_adapter()
    yield _through(s, whole)


def _through(s: Subject, weight: torch.Tensor, model: Any = None) -> Shown:
    """The forward of a model whose weight was quantized once more."""
    x = s.x()
    with torch.no_grad():
        y = (model or s.root)(x)
    return y, torch.nn.functional.linear(x, weight, s.bias), s.tolerance + s.kind.requantized


@reader(last=True)
def merge_and_unmerge(s: Subject) -> Iterator[Shown]:
    _merge(s)
    s.root.merge_adapter()
    s.root.unmerge_adapter()
    yield _through(s, s.effective())


@reader(last=True)
def merge_and_unload(s: Subject) -> Iterator[Shown]:
    whole = _merge(s)
    yield _through(s, whole, s.root.merge_and_unload())


@reader(last=True)
def merge_dora(s: Subject) -> Iterator[Shown]:
    whole = _merge(s, dora=True)
    yield _through(s, whole, s.root.merge_and_unload())


@reader(last=True)
def unmerge(s: Subject) -> Iterator[Shown]:
    only(s.adapter == "merged")
    s.root.unmerge_adapter()
    assert s.delta is not None
    s.adapter, before = "lora", s.weight
    s.becomes(before - s.delta, s.slack)
    yield _through(s, s.effective())
