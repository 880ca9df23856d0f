"""What a program does with one architecture in one precision, and whether each step of it is right."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.apart import NotBuilt

from .found import Architecture
from .inputs import Inputs, outputs, ways
from .tiny import configurations

PRECISIONS = ("4 bits", "INT8")
STEPS = ("loaded", "forward", "LoRA gradients", "saved", "loaded again", "in bfloat16")
CLOSE = {"4 bits": 2e-3, "INT8": 0.2}
"""How far from the model in floating point with the same rounded weights; INT8 rounds activations, too."""
LARGEST = 30e6
Result = dict[str, str]
"""By step: "" if it is right, or what is wrong; a step that says "without quantization" is not judged."""


class Plain(NamedTuple):
    """The model in floating point, on disk, and how to call it."""

    folder: Path
    how: str
    inputs: Inputs
    also: dict[str, Any]


def plain(architecture: Architecture, folder: Path) -> Plain:
    """Build a tiny model of ``architecture``, and save it; :class:`NotBuilt` if none runs and loads."""
    from transformers import CONFIG_MAPPING

    failed = "no way to call it was found"
    kind = architecture.kind.config_class or CONFIG_MAPPING[architecture.model_type]
    for make, also in itertools.product(configurations(kind),
                                        ({"attn_implementation": "eager"}, {})):  # fmt: skip
        torch.manual_seed(0)
        try:
            model = architecture.kind._from_config(make(), dtype=torch.float32, **also).eval()
        except Exception as error:  # noqa: BLE001  (the next one)
            failed = said(error)
            continue
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            failed = "it is too large"
            continue
        _spread(model)
        for how, inputs in ways(model):
            try:
                with torch.no_grad():
                    first, second = outputs(model, inputs), outputs(model, inputs)
            except Exception as error:  # noqa: BLE001  (the next one)
                failed = said(error)
                continue
            if not torch.isfinite(first).all() or not first.norm() > 0:
                failed = "its outputs are not finite, or all zero"
            elif not torch.equal(first, second):
                failed = "its outputs are not the same twice"
            else:
                model.save_pretrained(folder)
                again = _load(architecture, folder, torch.float32, also)
                if off(outputs(again, inputs).detach(), first) > 1e-4:
                    raise NotBuilt("without quantization it is another model when it is loaded again")
                return Plain(folder, how, inputs, also)
    raise NotBuilt(failed)


def _spread(model: Any) -> None:
    """Weights that make outputs depend on them: many are initialized with next to nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and parameter.is_floating_point() and "embed" not in name:
                if parameter.std() < 0.1:
                    parameter.copy_(torch.randn_like(parameter) * 0.5 / parameter.shape[-1] ** 0.5)


def said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    found = ((one - other).norm() / (other.norm() + 1e-12)).item()
    return found if found == found else float("inf")


def judge(architecture: Architecture, original: Plain, precision: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each step and what is wrong with it, until one raises an error that the next ones need."""
    load = _Loader(architecture, original)
    try:
        model = load(original.folder, torch.float32, quantization_config=_config(precision))
        reference = load(original.folder, torch.float32)
        count = rounded(reference, model)
    except Exception as error:  # noqa: BLE001  (what a user would get)
        yield "loaded", said(error)
        return
    yield "loaded", "" if count else "without quantization: it has no layer to quantize"
    if not count:
        return
    try:
        with torch.no_grad():
            got, expected = outputs(model, original.inputs), outputs(reference, original.inputs)
        far = off(got, expected)
        yield "forward", "" if far < CLOSE[precision] else f"off by {far:.1e} of the norm"
    except Exception as error:  # noqa: BLE001
        got = None
        yield "forward", said(error)
    try:
        model.save_pretrained(folder)
        yield "saved", ""
    except Exception as error:  # noqa: BLE001
        yield "saved", said(error)
    else:
        yield "loaded again", _again(load, folder, model, got, original.inputs)
        yield "in bfloat16", _in_bfloat16(load, folder, model, original)
    yield "LoRA gradients", _gradients(model, reference, original.inputs, CLOSE[precision])


class _Loader(NamedTuple):
    architecture: Architecture
    original: Plain

    def __call__(self, folder: Path, dtype: torch.dtype, **also: Any) -> Any:
        return _load(self.architecture, folder, dtype, {**self.original.also, **also})


def _load(architecture: Architecture, folder: Path, dtype: torch.dtype, also: dict[str, Any]) -> Any:
    return architecture.kind.from_pretrained(folder, dtype=dtype, **also).eval()


def _config(precision: str) -> Any:
    from transformers import BitsAndBytesConfig

    if precision == "INT8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def rounded(reference: Any, model: Any) -> int:
    """Give ``reference`` the values that the packed weights of ``model`` stand for; how many layers that were."""
    found = weights(model)
    for path, weight in found.items():
        other = reference.get_submodule(path)
        other.weight.data = weight.t().contiguous() if type(other).__name__ == "Conv1D" else weight
    return len(found)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The values that the packed weights of ``model`` stand for, by the path of their layer."""
    import bitsandbytes

    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            if getattr(layer.weight, "quant_state", None) is None:
                raise AssertionError(f"{path} is a Linear4bit without a quantization state")
            found[path] = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        elif isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            scales = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
            if scales is None:
                raise AssertionError(f"{path} is a Linear8bitLt without scales")
            found[path] = layer.weight.data.float() * scales.float().view(-1, 1) / 127
    return found


def _again(load: Callable[..., Any], folder: Path, model: Any, got: torch.Tensor | None, inputs: Inputs) -> str:
    try:
        again = load(folder, torch.float32)
        if found := other_layers(again, model):
            return found
        if got is not None:
            with torch.no_grad():
                far = off(outputs(again, inputs), got)
            return "" if far < 1e-4 else f"off by {far:.1e} of the norm"
    except Exception as error:  # noqa: BLE001
        return said(error)
    return ""


def other_layers(again: Any, model: Any) -> str:
    """The first layer that is not what was saved."""
    ours, theirs = dict(model.named_modules()), dict(again.named_modules())
    for path, module in ours.items():
        if _is_layer(module) and type(theirs.get(path)) is not type(module):
            return f"{path} is {type(theirs.get(path)).__name__}, was {type(module).__name__}"
    weights = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() and not torch.equal(parameter.data, weights[name].data):
            return f"{name} holds other packed weights"
    return ""


def _is_layer(module: Any) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D", "Linear4bit", "Linear8bitLt")


def _in_bfloat16(load: Callable[..., Any], folder: Path, model: Any, original: Plain) -> str:
    try:
        expected = load(original.folder, torch.bfloat16)
        with torch.no_grad():
            outputs(expected, original.inputs)
    except Exception as error:  # noqa: BLE001
        return f"without quantization: {said(error)}"
    try:
        again = load(folder, torch.bfloat16)
        if found := other_layers(again, model):
            return found
        for name, parameter in again.named_parameters():
            wanted = dict(expected.named_parameters())[name].dtype
            if parameter.is_floating_point() and parameter.dtype != wanted:
                return f"{name} is {parameter.dtype}, without quantization {wanted}"
        with torch.no_grad():
            result = outputs(again, original.inputs)
    except Exception as error:  # noqa: BLE001
        return said(error)
    return "" if torch.isfinite(result).all() else "its outputs are not finite"


def _gradients(model: Any, reference: Any, inputs: Inputs, close: float) -> str:
    try:
        expected = _lora(reference, inputs)
    except Exception as error:  # noqa: BLE001
        return f"without quantization: {said(error)}"
    try:
        got = _lora(model, inputs)
    except Exception as error:  # noqa: BLE001
        return said(error)
    if missing := sorted(expected.keys() - got.keys()):  # Jamba calls a layer only where it is quantized
        return f"{missing[0]} has no gradient"
    one, other = (torch.cat([each[name].flatten() for name in sorted(expected)]) for each in (got, expected))
    far = off(one, other)
    return "" if far < 10 * close or not other.norm() > 0 else f"off by {far:.1e} of the norm"


def _lora(model: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules="all-linear"))
    draw = torch.Generator().manual_seed(1)
    for _, parameter in sorted((n, p) for n, p in tuned.named_parameters() if "lora_" in n):
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.05
    result = outputs(tuned, inputs)
    (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    return {n: p.grad.float() for n, p in tuned.named_parameters() if p.grad is not None}
