"""A tiny model of diffusers in floating point, the same in one precision, and what is measured of both."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patches.repairs.reproducers.image_models import as_with_gpu
from tests.apart import NotBuilt
from tests.architectures.judged import LARGEST, off, rounded, said, weights

from .tiny import Draw, Inputs, Tiny

PRECISIONS: dict[str, dict[str, Any]] = {
    "NF4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "NF4, nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "INT8": {"load_in_8bit": True},
}
CPU = {"": "cpu"}


class Plain:
    """A tiny model in floating point, in memory and on disk, and how to call it; :class:`NotBuilt` if it does not run."""

    def __init__(self, kind: Any, tiny: Tiny, folder: Path) -> None:
        self.kind, self.tiny, self.folder = kind, tiny, folder
        try:
            self.model = tiny.build(kind)
            _spread(self.model)
            if sum(p.numel() for p in self.model.parameters()) > LARGEST:
                raise NotBuilt("it is too large")
            first, second = (run(self.model, self.inputs) for _ in range(2))
        except Exception as error:
            raise NotBuilt(said(error)) from error
        if not torch.isfinite(first).all() or not first.norm() > 0:
            raise NotBuilt("its outputs are not finite, or all zero")
        if not torch.equal(first, second):
            raise NotBuilt("its outputs are not the same twice")
        self.model.save_pretrained(folder)
        self.off_again = off(run(self.load(), self.inputs), first)
        """Of equal weights: where they lie in memory decides on some processors how a product is rounded."""
        if self.off_again > 1e-4:
            raise NotBuilt("without quantization it is another model when it is loaded again")

    @property
    def inputs(self) -> Inputs:
        return self.tiny.inputs(Draw())

    def load(self, dtype: torch.dtype = torch.float32, **also: Any) -> Any:
        return self.kind.from_pretrained(self.folder, torch_dtype=dtype, **also).eval()

    @functools.cached_property
    def in_bfloat16(self) -> Any:
        return self.load(torch.bfloat16)

    @functools.cached_property
    def graphs(self) -> Compiled:
        return compiled(self.model, self.inputs)

    @functools.cached_property
    def tuned(self) -> Any:
        layers = [path for path, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        return add_lora(copy.deepcopy(self.model), layers)

    @functools.cached_property
    def can_train(self) -> str:
        """Why there need not be gradients; empty if there are."""
        try:
            return "" if lora_gradients(self.tuned, self.inputs) else "it has no gradients"
        except Exception as error:  # noqa: BLE001
            return said(error)

    @functools.cached_property
    def can_offload(self) -> str:
        """Why the model need not run offloaded; empty if it does: accelerate cannot make some outputs again."""
        from accelerate import cpu_offload

        try:
            run(cpu_offload(copy.deepcopy(self.model), execution_device=torch.device("cpu")), self.inputs)
            return ""
        except Exception as error:  # noqa: BLE001
            return said(error)

    @functools.cached_property
    def can_checkpoint(self) -> str:
        """Why gradients with checkpointing need not be those without; empty if they are."""
        if not getattr(self.kind, "_supports_gradient_checkpointing", False):
            return "it has no checkpointing"
        try:
            expected = lora_gradients(self.tuned, self.inputs)
            return same_gradients(checkpointed(self.tuned, self.inputs), expected, 1e-5)
        except Exception as error:  # noqa: BLE001
            return said(error)

    @functools.cached_property
    def can_fuse(self) -> str:
        """Why LoRA need not be fused; empty if it can be."""
        if not hasattr(self.kind, "fuse_lora"):
            return "it has no fuse_lora"
        try:
            before = run(self.tuned, self.inputs)
            self.tuned.fuse_lora()
            wrong = far(run(self.tuned, self.inputs), before, 1e-3)
            self.tuned.unfuse_lora()
            return wrong
        except Exception as error:  # noqa: BLE001
            return said(error)


class Judged:
    """A tiny model in one precision."""

    def __init__(self, plain: Plain, precision: str) -> None:
        self.plain, self.precision = plain, precision
        self.model = self.load()
        self.layers = list(weights(self.model))
        self.adapted: torch.Tensor | None = None  # outputs before LoRA is fused
        self.reference = copy.deepcopy(plain.model)
        rounded(self.reference, self.model)

    @property
    def inputs(self) -> Inputs:
        return self.plain.inputs

    def load(self, dtype: torch.dtype = torch.float32, device_map: Any = CPU, **also: Any) -> Any:
        """Load and quantize as on a machine with a GPU, on the CPU."""
        from diffusers import BitsAndBytesConfig

        options = dict(PRECISIONS[self.precision])
        if "load_in_4bit" in options:
            options["bnb_4bit_compute_dtype"] = dtype
        # Of a map of one entry diffusers raises an error without the option; of others it leaves blocks unquantized with it.
        config = BitsAndBytesConfig(**options, llm_int8_enable_fp32_cpu_offload=len(device_map) == 1)
        with as_with_gpu():
            return self.plain.load(dtype, quantization_config=config, device_map=device_map, **also)

    @functools.cached_property
    def tuned(self) -> Any:
        """The quantized model, with an adapter on each layer that is quantized."""
        return add_lora(self.load(), self.layers)

    @functools.cached_property
    def gradients(self) -> dict[str, torch.Tensor]:
        return lora_gradients(self.tuned, self.inputs)


def _spread(model: Any) -> None:
    """Weights that make outputs depend on them: many are initialized with zeros, or not at all."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                spread = 0.6 / parameter[0].numel() ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * spread)
            elif not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


def outputs(model: Any, inputs: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """All floating-point tensors that a call returns, one after the other."""
    torch.manual_seed(0)
    result = model(**_cast(inputs, dtype))
    return torch.cat([each.flatten().float() for each in _tensors(result)])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return type(value)(_cast(each, dtype) for each in value) if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
        return
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _tensors(each)


def run(model: Any, inputs: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return outputs(model, inputs, dtype)


def far(got: torch.Tensor, expected: torch.Tensor, close: float) -> str:
    far = off(got, expected)
    return "" if far <= close else f"off by {far:.1e} of the norm"


class Compiled(NamedTuple):
    """What torch.compile made of a model."""

    graphs: int
    breaks: int
    off: str


def compiled(model: Any, inputs: Inputs) -> Compiled:
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    eager = run(model, inputs)
    got = run(torch.compile(model, backend=counter), inputs)
    return Compiled(counter.frame_count, sum(counters["graph_break"].values()), far(got, eager, 1e-5))


def add_lora(model: Any, layers: list[str]) -> Any:
    """Add an adapter to ``layers``, whose product is about half as large as their weights."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    config = LoraConfig(r=4, target_modules=layers)
    if hasattr(model, "add_adapter"):
        model.add_adapter(config)
    else:
        inject_adapter_in_model(config, model)
    draw = torch.Generator().manual_seed(1)
    for _, parameter in sorted((n, p) for n, p in model.named_parameters() if "lora_" in n):
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    return model


def lora_gradients(model: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Gradients of a step in training mode: INT8 layers on a CPU round activations in eval mode only."""
    model.train().zero_grad()
    result = outputs(model, inputs)
    (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    model.eval()
    return {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], close: float) -> str:
    if missing := sorted(expected.keys() - got.keys()):
        return f"{missing[0]} has no gradient, nor have {len(missing) - 1} others"
    one, other = (torch.cat([every[name].flatten() for name in sorted(expected)]) for every in (got, expected))
    return far(one, other, close)


def checkpointed(tuned: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    tuned.enable_gradient_checkpointing()
    try:
        return lora_gradients(tuned, inputs)
    finally:
        tuned.disable_gradient_checkpointing()
