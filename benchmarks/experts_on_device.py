"""``python -m benchmarks.experts_on_device``: a step of a mixture with its experts in 4 bits, beside bfloat16, on a GPU.

One process, wall-clock time, bfloat16, LoRA (rank 8) on attention and on experts, the experts eager and by grouped products.
The models take turns, and a ratio is the median over rounds of two steps that ran one after the other. ``peak`` is what
torch had allocated at most during a step, without what the other models hold.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from . import device
from .mixtures import TOP, load_mixture, save_mixture, size_of, step, with_linears, with_lora
from .present import markdown, write

SIZES = dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=4, vocab_size=32_000)
FLOAT = "bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts_on_device", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=64, help="in a layer; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step; default: %(default)s")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "experts_on_device.json")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")

    import bitsandbytes
    import torch
    import transformers

    import patches

    transformers.utils.logging.disable_progress_bar()
    patches.apply()
    sizes = {name: getattr(options, name) for name in SIZES}
    host = {
        "device": device.device_name(options.device),
        "torch": torch.__version__,
        "bitsandbytes": bitsandbytes.__version__,
    }
    data: dict[str, Any] = {
        "host": host,
        "sizes": sizes,
        "experts": options.experts,
        "tokens": options.tokens,
        "steps": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        save_mixture(folder, options.experts, torch.bfloat16, options.device, **sizes)
        for implementation in ("grouped_mm", "eager"):
            for models in _compared(folder, implementation, options):
                data["steps"][implementation] = models
                write(options.output, data)
    print(table(data))


def table(data: dict[str, Any]) -> str:
    """What was measured, as Markdown tables."""
    host, sizes = data["host"], data["sizes"]
    parts = [
        f"{host['device']}, torch {host['torch']}, bitsandbytes {host['bitsandbytes']}. {data['experts']} experts a layer, {TOP} "
        f"a token, {data['tokens']} tokens, hidden {sizes['hidden_size']}, inside an expert {sizes['moe_intermediate_size']}, "
        f"{sizes['num_hidden_layers']} layers."
    ]
    for implementation, models in data["steps"].items():
        head = (implementation, "model MB", "of bf16", "peak MB", "of bf16", "step ms", "of bf16")
        rows: list[tuple[Any, ...]] = []
        for name, one in models.items():
            if "error" in one:
                rows.append((name, f"failed: {one['error'][:90]}"))
                continue
            of = models[FLOAT]
            sized = (f"{one[key] / 1e6:.0f}" for key in ("bytes", "peak"))
            shares = (f"{one[key] / of[key]:.2f}" if of.get(key) else "" for key in ("bytes", "peak"))
            times = (f"{one['ms']:.1f}", f"{one['ratio']:.2f}") if "ms" in one else ()
            pairs = [cell for pair in zip(sized, shares) for cell in pair]
            rows.append((name, *pairs, *times))
        parts.append(markdown(head, rows))
    return "\n\n".join(parts)


def _compared(folder: str, implementation: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same mixture three times, after each part."""
    import torch

    import patches

    def made(four: bool) -> Any:
        return load_mixture(folder, implementation, torch.bfloat16, four, options.device)

    ways: dict[str, Callable[[], Any]] = {
        FLOAT: lambda: made(False),
        "experts in 4 bits": lambda: patches.quantize_experts(made(True)),
    }
    if implementation == "eager":
        ways["a Linear4bit an expert"] = lambda: with_linears(made(True))
    ids = torch.randint(options.vocab_size, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(options.device)
    models: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {name: {} for name in ways}
    for name, make in ways.items():
        before = device.bytes_held(options.device)
        try:
            base = make()
            found[name]["bytes"] = size_of(base)
            model = with_lora(base, name.startswith("a Linear"))
            step(model, ids)
            found[name]["peak"] = device.peak_bytes(lambda model=model: step(model, ids), options.device) - before
            models[name] = model
        except Exception as error:  # a way that fails is a result
            found[name]["error"] = f"{type(error).__name__}: {error}"[:500]
        yield found
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            times[name].append(device.seconds_of(lambda model=model: step(model, ids), options.device))
    for name, taken in times.items():
        found[name]["ms"] = 1e3 * median(taken)
        found[name]["ratio"] = median(a / b for a, b in zip(taken, times.get(FLOAT, taken)))
    yield found


if __name__ == "__main__":
    main()
