"""What a program does with one image model in one precision, and whether each step of it is right."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from patches.repairs.reproducers.image_models import as_with_gpu
from tests.apart import NotBuilt
from tests.architectures.judged import LARGEST, off, other_layers, rounded, said, weights

from .tiny import Draw, Inputs, Tiny

PRECISIONS: dict[str, dict[str, Any]] = {
    "NF4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "NF4, nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "INT8": {"load_in_8bit": True},
}
STEPS = ("loaded", "forward", "LoRA gradients", "checkpointing", "saved", "loaded again", "dequantized", "fused", "unfused",
         "offloaded", "graphs", "in bfloat16")  # fmt: skip
CLOSE = {"NF4": 2e-3, "NF4, nested": 2e-3, "INT8": 0.2}
"""How far from the model in floating point with the same rounded weights; INT8 rounds activations, too."""
ROUNDING = {"NF4": 0.13, "NF4, nested": 0.13, "INT8": 0.02}
"""How far a weight that was quantized again may be from the sum of weight and LoRA, of its norm."""
LEFT_OUT = {"NF4, nested": ("graphs", "checkpointing", "in bfloat16")}
"""Slow steps that nested statistics do not change: they are run on the other two."""
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
            first, second = (_run(self.model, self.inputs) for _ in range(2))
        except Exception as error:
            raise NotBuilt(said(error)) from error
        if not torch.isfinite(first).all() or not first.norm() > 0:
            raise NotBuilt("its outputs are not finite, or all zero")
        if not torch.equal(first, second):
            raise NotBuilt("its outputs are not the same twice")
        self.model.save_pretrained(folder)
        if off(_run(self.load(), self.inputs), first) > 1e-4:
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
    def graphs(self) -> tuple[int, str]:
        return _compiled(self.model, self.inputs)

    @functools.cached_property
    def tuned(self) -> Any:
        layers = [path for path, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        return add_lora(copy.deepcopy(self.model), layers)

    @functools.cached_property
    def can_checkpoint(self) -> str:
        """Why gradients with checkpointing need not be those without; empty if they are."""
        if not getattr(self.kind, "_supports_gradient_checkpointing", False):
            return "it has no checkpointing"
        try:
            expected = lora_gradients(self.tuned, self.inputs)
            return _same_gradients(_checkpointed(self.tuned, self.inputs), expected, 1e-5)
        except Exception as error:  # noqa: BLE001
            return said(error)

    @functools.cached_property
    def can_fuse(self) -> str:
        """Why LoRA need not be fused; empty if it can be."""
        if not hasattr(self.kind, "fuse_lora"):
            return "it has no fuse_lora"
        try:
            before = _run(self.tuned, self.inputs)
            self.tuned.fuse_lora()
            wrong = _far(_run(self.tuned, self.inputs), before, 1e-3)
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


def outputs(model: Any, inputs: Inputs) -> torch.Tensor:
    """All floating-point tensors that a call returns, one after the other."""
    torch.manual_seed(0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() > 1), torch.float32)
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


def judge(plain: Plain, precision: str, folder: Path, left_out: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Each step and what is wrong with it; the last ones change the model."""
    try:
        each = Judged(plain, precision)
    except Exception as error:  # noqa: BLE001  (what a user would get)
        yield "loaded", said(error)
        return
    yield "loaded", "" if each.layers else "without quantization: it has no layer to quantize"
    steps: dict[str, Callable[[], str]] = {
        "forward": lambda: _forward(each),
        "saved": lambda: _saved(each, folder),
        "loaded again": lambda: _again(each, folder),
        "graphs": lambda: _graphs(each),
        "LoRA gradients": lambda: _gradients(each),
        "checkpointing": lambda: _checkpointing(each),
        "offloaded": lambda: _offloaded(each, folder / "offload"),
        "fused": lambda: _fused(each),
        "unfused": lambda: _unfused(each),
        "dequantized": lambda: _dequantized(each),
        "in bfloat16": lambda: _bfloat16(each),
    }
    for name, run in steps.items() if each.layers else ():
        if name in left_out:
            continue
        try:
            yield name, run()
        except AsPlain as error:
            yield name, f"without quantization: {error}"
        except Exception as error:  # noqa: BLE001
            yield name, said(error)


class AsPlain(Exception):
    """The model in floating point cannot do it either."""


def _as_plain(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:  # noqa: BLE001
        raise AsPlain(said(error)) from error


def _run(model: Any, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return outputs(model, inputs)


def _far(got: torch.Tensor, expected: torch.Tensor, close: float) -> str:
    far = off(got, expected)
    return "" if far <= close else f"off by {far:.1e} of the norm"


def _forward(each: Judged) -> str:
    return _far(_run(each.model, each.inputs), _run(each.reference, each.inputs), CLOSE[each.precision])


def _saved(each: Judged, folder: Path) -> str:
    each.model.save_pretrained(folder)
    return ""


def _again(each: Judged, folder: Path) -> str:
    with as_with_gpu():
        again = each.plain.kind.from_pretrained(folder, torch_dtype=torch.float32, device_map=CPU).eval()
    return other_layers(again, each.model) or _far(_run(again, each.inputs), _run(each.model, each.inputs), 0)


def _graphs(each: Judged) -> str:
    """As many graphs as without quantization, and the same outputs as in eager."""
    expected, plain_far = _as_plain(lambda: each.plain.graphs)
    if plain_far:
        raise AsPlain(plain_far)
    got, far = _compiled(each.model, each.inputs)
    return far or ("" if got <= expected else f"{got} graphs, without quantization {expected}")


def _compiled(model: Any, inputs: Inputs) -> tuple[int, str]:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    eager = _run(model, inputs)
    compiled = _run(torch.compile(model, backend=counter), inputs)
    return counter.frame_count, _far(compiled, eager, 1e-5)


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


def _same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], close: float) -> str:
    if missing := sorted(expected.keys() - got.keys()):
        return f"{missing[0]} has no gradient, nor have {len(missing) - 1} others"
    one, other = (torch.cat([every[name].flatten() for name in sorted(expected)]) for every in (got, expected))
    return _far(one, other, close)


def _gradients(each: Judged) -> str:
    reference = copy.deepcopy(each.reference)
    expected = _as_plain(lambda: lora_gradients(add_lora(reference, each.layers), each.inputs))
    return _same_gradients(each.gradients, expected, 10 * CLOSE[each.precision])


def _checkpointing(each: Judged) -> str:
    """Gradients with checkpointing, beside those without."""
    if why := each.plain.can_checkpoint:
        raise AsPlain(why)
    expected = each.gradients
    return _same_gradients(_checkpointed(each.tuned, each.inputs), expected, 1e-5)


def _checkpointed(tuned: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    tuned.enable_gradient_checkpointing()
    try:
        return lora_gradients(tuned, inputs)
    finally:
        tuned.disable_gradient_checkpointing()


def _offloaded(each: Judged, folder: Path) -> str:
    """Outputs and gradients with the largest list of blocks on the disk, beside the whole model, to the bit."""
    blocks = _blocks(each.model)
    apart = each.load(device_map={"": "cpu", blocks: "disk"}, offload_folder=folder)
    quantized = {path for path, module in apart.named_modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")}
    if missing := sorted({*each.layers} - quantized):
        return f"{missing[0]} is not quantized, nor are {len(missing) - 1} others"
    if not any(p.device.type == "meta" for p in apart.get_submodule(blocks).parameters()):
        return "nothing is on the disk"
    if wrong := _far(_run(apart, each.inputs), _run(each.model, each.inputs), 0):
        return wrong
    expected = each.gradients
    wrong = _same_gradients(lora_gradients(add_lora(apart, each.layers), each.inputs), expected, 0)
    return f"LoRA gradients: {wrong}" if wrong else ""


def _blocks(model: Any) -> str:
    """The path of the list of blocks that holds most."""
    lists = {path: sum(p.numel() for p in module.parameters()) for path, module in model.named_modules()
             if isinstance(module, torch.nn.ModuleList)}  # fmt: skip
    return max(lists, key=lambda path: lists[path])


def _fused(each: Judged) -> str:
    """Fused weights are the rounded sums of weights and LoRA, and outputs are those of the fused weights."""
    if why := each.plain.can_fuse:
        raise AsPlain(why)
    model = each.tuned
    each.adapted = _run(model, each.inputs)
    delta = {path: model.get_submodule(path).get_delta_weight("default").detach().float() for path in each.layers}
    model.fuse_lora()
    fused = {path.removesuffix(".base_layer"): weight for path, weight in weights(model).items()}
    reference = copy.deepcopy(each.reference)
    for path in each.layers:
        layer = reference.get_submodule(path)
        if path not in fused:
            return f"{path} is not quantized any more"
        if far := _far(fused[path], layer.weight.data + delta[path], ROUNDING[each.precision]):
            return f"{path}: {far}"
        layer.weight.data = fused[path]
    return _far(_run(model, each.inputs), _run(reference, each.inputs), CLOSE[each.precision])


def _unfused(each: Judged) -> str:
    if each.adapted is None:
        raise AsPlain("it was not fused")
    each.tuned.unfuse_lora()
    return _far(_run(each.tuned, each.inputs), each.adapted, 1e-5)


def _dequantized(each: Judged) -> str:
    with as_with_gpu():
        each.model.dequantize()
    left = list(weights(each.model))
    return f"{left[0]} is still quantized" if left else _far(
        _run(each.model, each.inputs), _run(each.reference, each.inputs), 1e-5
    )  # fmt: skip


def _bfloat16(each: Judged) -> str:
    """The quantized model beside a rounded one, both in bfloat16."""
    own, wanted = each.reference.state_dict(), _as_plain(lambda: each.plain.in_bfloat16)
    wanted.load_state_dict({name: own[name].to(value.dtype) for name, value in wanted.state_dict().items()})
    expected = _as_plain(lambda: _run(wanted, each.inputs))
    return _far(_run(each.load(torch.bfloat16), each.inputs), expected, max(0.1, CLOSE[each.precision]))
