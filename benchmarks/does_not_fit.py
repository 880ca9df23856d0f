"""``python -m benchmarks.does_not_fit``: a model that does not fit, trained in 4 bits, beside the same model whole.

One process, wall-clock time. A Llama of 1.1 billion parameters is made from a configuration, saved in bfloat16 and loaded in
4 bits: whole, and with ``device_map="auto"`` and a ``max_memory`` of three fifths of its size in 4 bits, which leaves the
rest on the CPU or the disk. Then LoRA on all linear layers, non-reentrant checkpointing, AdamW. ``same`` compares the losses
of the steps and the trained adapters with those of the whole model, bit for bit; that a second whole model is the same is
asked first. ``16 bits`` is the unquantized model, with as many decoder layers away by accelerate's own offload. ``not
ahead`` is with ``PATCHES_PREFETCH=0``. The models take turns: a ratio is the median over rounds of two steps that ran in
one round. The files of the disk are in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests import device as simulated

from . import device
from .present import markdown, write

DEVICE = "cuda:0"
STEPS, TOKENS, SHARE = 5, 512, 0.6


@dataclass(frozen=True)
class Way:
    """How the model is loaded: ``place`` is where what does not fit lies, empty for nowhere."""

    name: str
    place: str = ""
    quantized: bool = True
    ahead: bool = True


WHOLE = Way("4 bits, whole")
WAYS = (
    WHOLE,
    Way("4 bits, CPU", "cpu"),
    Way("16 bits, CPU", "cpu", quantized=False),
    Way("4 bits, disk", "disk"),
    Way("16 bits, disk", "disk", quantized=False),
    Way("4 bits, disk, not ahead", "disk", ahead=False),
)


@dataclass
class Trained:
    """A model after its first steps, and what they gave."""

    model: Any
    optimizer: Any
    losses: list[float]

    def step(self) -> float:
        return _step(self.model, self.optimizer)

    def same_as(self, other: Trained) -> bool:
        ours, theirs = (
            {name: p.detach() for name, p in each.model.named_parameters() if p.requires_grad} for each in (self, other)
        )
        equal = [ours[name].equal(theirs[name].to(ours[name].device)) for name in theirs]
        return self.losses == other.losses and ours.keys() == theirs.keys() and all(equal)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.does_not_fit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=22, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the model (default: %(default)s)")
    parser.add_argument("--folder", help="where the files lie, on the disk that is measured")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "does_not_fit.json")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or equal bits are chance
    if simulated.kind():
        simulated.pretend(simulated.kind())

    import torch
    import transformers

    import patches

    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device, on which alone a model can fail to fit; "
                     f"{simulated.VARIABLE}=cuda takes the simulated one of tests/device")  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True, warn_only=True)
    patches.apply()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for data in _measured(Path(name), options.layers, options.hidden, options.rounds):
            write(options.output, data)
    print(table(data))


def table(data: dict[str, Any]) -> str:
    """What was measured, as a Markdown table."""
    host = data["host"]
    about = (
        f"{host['device']}, torch {host['torch']}, bitsandbytes {host['bitsandbytes']}. Llama of "
        f"{data['parameters'] / 1e9:.2f} billion parameters, {data['layers']} layers of width {data['hidden']}; a step is "
        f"{TOKENS} tokens. A second whole model {'has the same bits' if data.get('repeatable') else 'differs'}."
    )
    head = ("model", "layers away", "same as whole", "peak MB", "to the device, MB a step", "ms a step", "of whole",
            "of 16 bits", "of not ahead")  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for name, way in data["ways"].items():
        if "error" in way:
            rows.append((name, f"failed: {way['error'][:90]}"))
            continue
        same = {None: "", True: "yes", False: "no"}[way.get("same")]
        size, moved, ms = (f"{way[key] * by:.0f}" if way.get(key) is not None else ""
                           for key, by in (("peak", 1e-6), ("to_device", 1e-6), ("ms", 1)))  # fmt: skip
        ratios = (f"{way[key]:.2f}" if key in way else "" for key in ("of_whole", "of_16_bits", "of_not_ahead"))
        rows.append((name, way["away"], same, size, moved, ms, *ratios))
    return "\n\n".join([about, markdown(head, rows)])


def _measured(folder: Path, layers: int, hidden: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What is known so far, after each part."""
    versions = {name: __import__(name).__version__ for name in ("torch", "bitsandbytes", "transformers", "peft")}
    data: dict[str, Any] = {
        "host": {"device": device.device_name(DEVICE), **versions},
        "layers": layers,
        "hidden": hidden,
        "ways": {},
    }
    data["parameters"] = _save(folder / "base", layers, hidden)
    trained: dict[str, Trained] = {}
    for way in WAYS:
        data["ways"][way.name] = said = {}
        try:
            trained[way.name] = one = _trained(folder, way, data["ways"], said)
        except Exception as error:  # a way that fails is a result
            said["error"] = f"{type(error).__name__}: {error}"[:500]
        else:
            if way is WHOLE:
                data["repeatable"] = _trained(folder, way, data["ways"], {}).same_as(one)
            elif way.quantized and WHOLE.name in trained:
                said["same"] = one.same_as(trained[WHOLE.name])
        gc.collect()
        yield data
    times: dict[str, list[float]] = {name: [] for name in trained}
    for _ in range(rounds):
        for name, one in trained.items():
            times[name].append(device.seconds_of(one.step, DEVICE))
        for name in trained:
            data["ways"][name] |= _compared(name, times)
        yield data
    for name, one in trained.items():
        data["ways"][name]["to_device"] = device.bytes_copied(one.step)
        yield data


def _compared(name: str, times: dict[str, list[float]]) -> dict[str, float]:
    beside = {"of_whole": WHOLE.name, "of_16_bits": name.replace("4 bits", "16 bits"),
              "of_not_ahead": f"{name}, not ahead"}  # fmt: skip
    ratios = {
        key: median(a / b for a, b in zip(times[name], times[other]))
        for key, other in beside.items() if other in times and other != name
    }  # fmt: skip
    return {"ms": 1000 * median(times[name]), **ratios}


# -- models ------------------------------------------------------------------------------------------


def _save(folder: Path, layers: int, hidden: int) -> int:
    """Save a Llama of bfloat16 random numbers; how many."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(hidden // 64, 1)
    config = LlamaConfig(
        vocab_size=16 * hidden, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 8, 1), use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cpu" if simulated.kind() else "cuda"):  # a minute on a processor
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _trained(folder: Path, way: Way, known: dict[str, Any], said: dict[str, Any]) -> Trained:
    """The model of one way after its first steps; sizes and times go into ``said``."""
    import torch

    before = device.bytes_held(DEVICE)
    os.environ.pop("PATCHES_PREFETCH", None)
    if not way.ahead:
        os.environ["PATCHES_PREFETCH"] = "0"
    began = time.perf_counter()
    model = _loaded(folder, way, known)
    said["load_s"] = time.perf_counter() - began
    said["model_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    said["away"] = sum(any(p.is_meta for p in layer.parameters()) for layer in model.model.layers)
    model = _with_lora(model, way)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    said["adapter_bytes"] = sum(parameter.nbytes for parameter in adapters)
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    losses: list[float] = []
    most = device.peak_bytes(lambda: losses.extend(_step(model, optimizer) for _ in range(STEPS)), DEVICE)
    said["losses"], said["peak"] = losses, most - before
    return Trained(model, optimizer, losses)


def _loaded(folder: Path, way: Way, known: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"device_map": {"": 0}}
    if way.quantized:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if way.place and way.quantized:
        room = {0: int(SHARE * known[WHOLE.name]["model_bytes"]), "cpu": "64GiB" if way.place == "cpu" else 0}
        options |= {"device_map": "auto", "max_memory": room, "offload_folder": folder / way.name}
    elif way.place:
        away = known[way.name.replace("16 bits", "4 bits")]["away"]
        layers = json.loads((folder / "base" / "config.json").read_text())["num_hidden_layers"]
        options |= {"device_map": device.map_with(away, layers, 0, way.place), "offload_folder": folder / way.name}
    return AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.bfloat16, attn_implementation="eager", **options
    )


def _with_lora(model: Any, way: Way) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    how = {"use_reentrant": False}
    if way.quantized:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(how)
        model.enable_input_require_grads()
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.train()


def _step(model: Any, optimizer: Any) -> float:
    import torch

    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
