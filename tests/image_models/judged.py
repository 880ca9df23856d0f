"""What a program does with one image model in one precision, and whether each step of it is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from patches.repairs.reproducers.image_models import as_with_gpu
from tests.architectures.judged import other_layers, said, weights

from .models import CPU, Judged, Plain, add_lora, checkpointed, compiled, far, lora_gradients, run, same_gradients

CLOSE = {"NF4": 2e-3, "NF4, nested": 2e-3, "INT8": 0.2}
"""How far from the model in floating point with the same rounded weights; INT8 rounds activations, too."""
ROUNDING = {"NF4": 0.13, "NF4, nested": 0.13, "INT8": 0.02}
"""How far a weight that was quantized again may be from the sum of weight and LoRA, of its norm."""
LEFT_OUT = {"NF4, nested": ("graphs", "checkpointing", "in bfloat16")}
"""Slow steps that nested statistics do not change: they are run on the other two."""


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
    for name, do in steps.items() if each.layers else ():
        if name in left_out:
            continue
        try:
            yield name, do()
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


def _forward(each: Judged) -> str:
    return far(run(each.model, each.inputs), run(each.reference, each.inputs), CLOSE[each.precision])


def _saved(each: Judged, folder: Path) -> str:
    each.model.save_pretrained(folder)
    return ""


def _again(each: Judged, folder: Path) -> str:
    with as_with_gpu():
        again = each.plain.kind.from_pretrained(folder, torch_dtype=torch.float32, device_map=CPU).eval()
    close = 1e-6 if each.plain.off_again else 0  # to the bit where the model in floating point is
    return other_layers(again, each.model) or far(run(again, each.inputs), run(each.model, each.inputs), close)


def _graphs(each: Judged) -> str:
    """As many graphs as without quantization, and the same outputs as in eager.

    Where a model breaks the graph itself, a quantized layer may be a graph by itself, which ``nn.Linear`` is not.
    """
    expected = _as_plain(lambda: each.plain.graphs)
    if expected.off:
        raise AsPlain(expected.off)
    got = compiled(each.model, each.inputs)
    fewer = got.graphs <= expected.graphs or (expected.graphs > 1 and got.breaks <= expected.breaks)
    return got.off or ("" if fewer else f"{got.graphs} graphs, without quantization {expected.graphs}")


def _gradients(each: Judged) -> str:
    reference = copy.deepcopy(each.reference)
    expected = _as_plain(lambda: lora_gradients(add_lora(reference, each.layers), each.inputs))
    return same_gradients(each.gradients, expected, 10 * CLOSE[each.precision])


def _checkpointing(each: Judged) -> str:
    """Gradients with checkpointing, beside those without."""
    if why := each.plain.can_checkpoint:
        raise AsPlain(why)
    expected = each.gradients
    return same_gradients(checkpointed(each.tuned, each.inputs), expected, 1e-5)


def _offloaded(each: Judged, folder: Path) -> str:
    """Outputs and gradients with the largest list of blocks on the disk, beside the whole model, to the bit."""
    if why := each.plain.can_offload:
        raise AsPlain(why)
    blocks = _blocks(each.model)
    apart = each.load(device_map={"": "cpu", blocks: "disk"}, offload_folder=folder)
    quantized = {
        path for path, module in apart.named_modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    }
    if missing := sorted({*each.layers} - quantized):
        return f"{missing[0]} is not quantized, nor are {len(missing) - 1} others"
    if not any(p.device.type == "meta" for p in apart.get_submodule(blocks).parameters()):
        return "nothing is on the disk"
    if wrong := far(run(apart, each.inputs), run(each.model, each.inputs), 0):
        return wrong
    if each.plain.can_train:
        return ""
    expected = each.gradients
    wrong = same_gradients(lora_gradients(add_lora(apart, each.layers), each.inputs), expected, 0)
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
    each.adapted = run(model, each.inputs)
    delta = {path: model.get_submodule(path).get_delta_weight("default").detach().float() for path in each.layers}
    model.fuse_lora()
    fused = {path.removesuffix(".base_layer"): weight for path, weight in weights(model).items()}
    reference = copy.deepcopy(each.reference)
    for path in each.layers:
        layer = reference.get_submodule(path)
        if path not in fused:
            return f"{path} is not quantized any more"
        if wrong := far(fused[path], layer.weight.data + delta[path], ROUNDING[each.precision]):
            return f"{path}: {wrong}"
        layer.weight.data = fused[path]
    return far(run(model, each.inputs), run(reference, each.inputs), CLOSE[each.precision])


def _unfused(each: Judged) -> str:
    if each.adapted is None:
        raise AsPlain("it cannot be fused")
    each.tuned.unfuse_lora()
    return far(run(each.tuned, each.inputs), each.adapted, 1e-5)


def _dequantized(each: Judged) -> str:
    with as_with_gpu():
        each.model.dequantize()
    left = list(weights(each.model))
    return f"{left[0]} is still quantized" if left else far(
        run(each.model, each.inputs), run(each.reference, each.inputs), 1e-5
    )  # fmt: skip


def _bfloat16(each: Judged) -> str:
    """The quantized model beside a rounded one, both in bfloat16."""
    own, wanted = each.reference.state_dict(), _as_plain(lambda: each.plain.in_bfloat16)
    wanted.load_state_dict({name: own[name].to(value.dtype) for name, value in wanted.state_dict().items()})
    expected = _as_plain(lambda: run(wanted, each.inputs, torch.bfloat16))
    got = run(each.load(torch.bfloat16), each.inputs, torch.bfloat16)
    return far(got, expected, max(0.1, CLOSE[each.precision]))
