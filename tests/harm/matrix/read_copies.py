"""Copies, casts, dequantizing, compiling."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .states import only
from .subject import Subject

from .reading import Shown, reader, shown


def _copy(s: Subject, root: Any) -> Iterator[Shown]:
    x = s.x()
    with torch.no_grad():
        yield root(x), s.expected(x), s.tolerance


@reader()
def deepcopy(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    yield from _copy(s, copy.deepcopy(s.root))


@reader()
def pickle_whole(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    yield from _copy(s, pickle.loads(pickle.dumps(s.root)))


@reader()
def save_whole(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    file = io.BytesIO()
    torch.save(s.root, file)
    file.seek(0)
    yield from _copy(s, torch.load(file, weights_only=False))


def _cast(s: Subject, dtype: torch.dtype, how: Callable[[Any], Any]) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None and not s.adapter)
    how(s.root)
    y, reference, tolerance = next(shown(s, dtype=dtype, off=0.04) if not s.kind.embeds else shown(s, off=0.04))
    yield y, reference, tolerance


@reader(last=True)
def half(s: Subject) -> Iterator[Shown]:
    yield from _cast(s, torch.float16, lambda root: root.half())


@reader(last=True)
def bfloat16(s: Subject) -> Iterator[Shown]:
    yield from _cast(s, torch.bfloat16, lambda root: root.bfloat16())


@reader(last=True)
def to_dtype(s: Subject) -> Iterator[Shown]:
    yield from _cast(s, torch.float16, lambda root: root.to("cpu", torch.float16))


@reader(last=True)
def to_cpu(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None)
    s.root.to("cpu")
    yield from shown(s)


@reader(last=True)
def weight_to_cpu(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None)
    s.layer.weight = s.layer.weight.to("cpu")
    yield from shown(s)


@reader()
def dequantize_by_peft(s: Subject) -> Iterator[Shown]:
    from peft.utils.integrations import dequantize_module_weight

    only(not s.offloaded and not s.kind.embeds and not s.given)
    yield dequantize_module_weight(s.layer), s.weight, max(s.slack, 1e-2)


@reader(last=True)
def dequantize_by_transformers(s: Subject) -> Iterator[Shown]:
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import dequantize_and_replace

    only(not s.offloaded and s.call is None and not s.kind.embeds and not s.adapter and not s.tied)
    only(s.kind.bits < 32)
    config = BitsAndBytesConfig(load_in_8bit=s.kind.bits == 8, load_in_4bit=s.kind.bits == 4)
    s.root.dtype = torch.float32
    root = dequantize_and_replace(s.root, quantization_config=config)
    yield from _copy(s, root.float())


@reader(slow=True)
def compile_it(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    x = s.x()
    with torch.no_grad():
        yield torch.compile(s.root, backend="eager")(x), s.expected(x), s.tolerance


@reader(slow=True)
def compile_backward(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.kind.embeds)
    x = s.x(grad=True)
    y = torch.compile(s.root, backend="aot_eager")(x)
    y.float().sum().backward()
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader(slow=True)
def export(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    x = s.x()
    with torch.no_grad():
        program = torch.export.export(s.root.eval(), (x,), strict=False)
        yield program.module()(x), s.expected(x), s.tolerance


@reader()
def inspect(s: Subject) -> Iterator[Shown]:
    """What ``patches.inspect`` looks at stays as it is."""
    only(s.call is None)
    try:
        import patches
    except ImportError:
        pass
    else:
        if hasattr(patches, "inspect"):
            patches.inspect(s.root)
    yield from shown(s)
