"""``python -m tests.experts.walk``: every mixture of transformers' mappings, with its experts in 4 bits.

Found by product and not by name: each architecture of tests/architectures whose tiny model has experts in parameters of three
dimensions. Each is loaded quantized while it is read, compared with the model whose experts are rounded in floating point,
trained (LoRA on attention, LoRA on experts), saved and loaded again, and loaded with half of its experts on the disk. ``docs/mixtures.json`` keeps what they did;
``docs/experts.md`` has the table of it.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from patches.experts import dense_operations
from patches.experts.experts_in_model import find_experts
from patches.experts.tensor import QuantizedExperts
from tests.architectures import __main__ as instrument
from tests.architectures import judged
from tests.architectures.found import Architecture, everything
from tests.architectures.inputs import outputs
from tests.experts.models import rounded
from tools import records

RESULTS = Path(__file__).parents[2] / "docs" / "mixtures.json"
PURPOSES = ("text",)
STEPS = ("loaded", "outputs", "LoRA on attention", "LoRA on experts", "saved", "loaded again", "half on disk")
CLOSE = 1e-5
NO_MIXTURE = "no experts of three dimensions"
_SOURCE = re.compile(r"class \w*Experts\w*\(|use_experts_implementation|ParallelExperts")

_ELSEWHERE = re.compile(r"out_proj|vision|visual|audio|image|projector")
"""Layers that take no adapter here: Mamba reads the weight of ``out_proj`` itself, and text goes through no tower or projector."""


def mixtures(purposes: tuple[str, ...] = PURPOSES) -> Iterator[Architecture]:
    """Architectures whose code has experts; whether their tiny model has any shows when it is built."""
    for architecture in everything():
        if architecture.purpose in purposes:
            try:
                source = inspect.getsource(sys.modules[architecture.kind.__module__])
            except Exception:  # noqa: BLE001, S112  (what it imports is not installed)
                continue
            if _SOURCE.search(source):
                yield architecture


def result(architecture: Architecture) -> dict[str, str]:
    """By step: "" if it is right, or what is wrong."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            original = judged.plain(architecture, Path(folder, "plain"))
        except Exception as error:  # noqa: BLE001
            return {"not built": judged.said(error)}
        for step, wrong in _steps(architecture, original, Path(folder, "packed")):
            found[step] = wrong
    return found


def _steps(architecture: Architecture, original: judged.Plain, folder: Path) -> Iterator[tuple[str, str]]:
    import patches

    dense_operations.COUNTS.clear()

    def load(where: Path, **also: Any) -> Any:
        options = {
            **original.also,
            "dtype": torch.float32,
            "device_map": {"": "cpu"},
            "experts_implementation": "eager",
            **also,
        }
        return architecture.kind.from_pretrained(where, **options).eval()

    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    try:
        reference = rounded(load(original.folder, quantization_config=copy.deepcopy(config)))
        experts = [one.full_name for one in find_experts(reference)]
        if not experts:
            yield "not built", NO_MIXTURE
            return
        with patches.quantize_experts():
            model = load(original.folder, quantization_config=copy.deepcopy(config))
    except Exception as error:  # noqa: BLE001  (what a user would get)
        yield "loaded", judged.said(error)
        return
    left = [name for name in experts if not isinstance(model.get_parameter(name), QuantizedExperts)]
    yield "loaded", f"not quantized: {left[0]}" if left else ""
    yield "outputs", _tried(lambda: _same(model, reference, original))
    yield "saved", _tried(lambda: model.save_pretrained(folder))
    if any(folder.glob("*.safetensors")):
        yield "loaded again", _tried(lambda: _same(load(folder), model, original))
    yield "half on disk", _tried(lambda: _half_on_disk(load, model, original, config))
    yield "LoRA on attention", _tried(lambda: _lora(model, reference, original, ()))
    yield "LoRA on experts", _tried(lambda: _lora(model, reference, original, tuple(experts)))
    if dense_operations.COUNTS:
        yield "went dense", ", ".join(dense_operations.COUNTS)


def _tried(step: Callable[[], str | None]) -> str:
    try:
        return step() or ""
    except Exception as error:  # noqa: BLE001
        return judged.said(error)


def _same(model: Any, other: Any, original: judged.Plain, close: float = CLOSE) -> str:
    with torch.no_grad():
        far = judged.off(*(outputs(each, original.inputs) for each in (model, other)))
    return "" if far < close else f"off by {far:.1e} of the norm"


def _half_on_disk(load: Callable[..., Any], model: Any, original: judged.Plain, config: Any) -> str:
    """The experts of every second layer wait on the disk, the first ones among them."""
    import patches

    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    holders = {name.rpartition(".")[0]: None for name, each in tensors.items() if isinstance(each, QuantizedExperts)}
    away = list(holders)[::2]
    places = {name: "cpu" for name in tensors if name.rpartition(".")[0] not in away} | dict.fromkeys(away, "disk")
    with tempfile.TemporaryDirectory() as folder, patches.quantize_experts():
        options = {"quantization_config": copy.deepcopy(config), "device_map": places, "offload_folder": folder}
        half = load(original.folder, **options)
        stayed = [
            name for name in away for each in half.get_submodule(name).parameters(recurse=False) if not each.is_meta
        ]
        linear = any(type(each).__name__ == "Params4bit" and each.is_meta for each in half.parameters())
        close = 1e-2 if linear else CLOSE  # of a layer in memory, bitsandbytes multiplies in bfloat16 where the CPU can
        return f"not on the disk: {stayed[0]}" if stayed else _same(half, model, original, close)


def _lora(model: Any, reference: Any, original: judged.Plain, parameters: tuple[str, ...]) -> str:
    """Gradients of the same adapters on both models."""
    import peft
    from bitsandbytes.nn import Linear4bit

    every = [n for n, m in model.named_modules() if isinstance(m, Linear4bit) and not _ELSEWHERE.search(n)]
    linears = [n for n in every if re.search("att|mixer", n)][:4] or every[:4]
    found = []
    for each in (model, reference):
        torch.manual_seed(1)
        options = {"target_modules": linears, "target_parameters": list(parameters) or None, "init_lora_weights": False}
        wrapped = peft.get_peft_model(each, peft.LoraConfig(r=2, **options))
        try:
            outputs(wrapped, original.inputs).square().mean().backward()
            found.append({n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad})
        finally:
            wrapped.unload()
    got, expected = found
    named = {n for n in expected if any(p.rpartition(".")[0] in n for p in parameters)}
    if parameters and not named:
        return "no adapter on experts"
    off = [judged.off(got[n], expected[n]) for n in expected if expected[n] is not None and expected[n].any()]
    if not off or got.keys() != expected.keys():
        return "nothing trains"
    return "" if max(off) < 1e-3 else f"gradients off by {max(off):.1e} of the norm"


def table(results: dict[str, dict[str, str]]) -> str:
    """A row for each mixture that was built, a step that is wrong with its number below."""
    rows, notes = [], []
    for name, steps in sorted(results.items()):
        if "not built" in steps:
            continue
        cells = []
        for step in STEPS:
            if steps.get(step):
                notes.append(f"{len(notes) + 1}. {name}, {step}: `{steps[step]}`")
            cells.append(f"({len(notes)})" if steps.get(step) else "yes" if step in steps else "")
        if steps.get("went dense"):
            notes.append(f"{len(notes) + 1}. {name} goes dense: `{steps['went dense']}`")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| model | {' | '.join(STEPS)} |\n|---|{'---|' * len(STEPS)}"
    return "\n".join([head, *rows, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.experts.walk", description=__doc__)
    parser.add_argument("words", nargs="*", help="only architectures with one of these words")
    parser.add_argument("--all", action="store_true", help="also models that see and hear")
    options = parser.parse_args()
    import patches

    patches.apply()
    instrument.quiet()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    purposes = ("text", "vision-language", "sequence-to-sequence") if options.all else PURPOSES
    for architecture in mixtures(purposes):
        if options.words and not any(word in str(architecture) for word in options.words):
            continue
        start = time.monotonic()
        found = results[architecture.class_name] = result(architecture)
        wrong = {step: why for step, why in found.items() if why} or "right"
        print(f"{architecture.class_name}: {wrong} ({time.monotonic() - start:.0f} s)", flush=True)
        RESULTS.write_text(records.dumps(results))
    print(table(results))


if __name__ == "__main__":
    main()
