"""``python -m benchmarks.experts``: experts in 4 bits beside floating point and beside one ``Linear4bit`` an expert.

One process, float32 unless a row says otherwise, one thread, processor time; the models take turns, and a ratio is the
median over rounds of two that ran one after the other. LoRA (rank 8) is on attention and on experts. ``peak`` is the
model and what a training step allocates on top, from torch's own allocation events. ``limit`` is what the experts of a
step cannot go below: their matrix products in floating point, timed bare, and the bytes that dequantizing reads and
writes at the bandwidth of a copy. Five minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .mixtures import RANK, TOP, WIDE, mixture, size_of, step, with_linears, with_lora
from .present import markdown, write
from .setting import begin, host

TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--growth", type=int, nargs="*", default=[16, 64, 128], help="numbers of experts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args()
    begin()
    data: dict[str, Any] = {"host": host(), "steps": [], "growth": []}
    for kind in ("eager", "grouped_mm"):
        data["steps"].append(_compared(kind, options.experts, options.rounds))
        write(options.output / "experts", data, table(data))  # after each part: an interrupted run has what it did
    for count in options.growth:
        data["growth"].append(_grown(count, options.rounds))
        write(options.output / "experts", data, table(data))
    print(table(data))


def table(data: dict[str, Any]) -> str:
    host = data["host"]
    size = f"{data['steps'][0]['experts']} experts, {TOP} a token, {TOKENS} tokens, hidden 512, 2 layers"
    parts = [f"{host['processor']}, one thread, torch {host['torch']}, bitsandbytes {host['bitsandbytes']}. {size}."]
    for one in data["steps"]:
        head = (one["implementation"], "model MB", "of bf16", "peak MB", "of float32", "step ms", "of float32", "limit")
        rows = []
        for name, row in one["models"].items():
            first = one["models"]
            ratio = f"{row['ratio']:.2f}"
            limit = f"{one['limit_ms'] / row['ms']:.2f} of the step" if name == "experts in 4 bits" else ""
            of_bf16 = f"{row['bytes'] / first['bfloat16']['bytes']:.2f}"
            of_float = f"{row['peak'] / first['float32']['peak']:.2f}"
            sizes = [f"{row[key] / 1e6:.1f}" for key in ("bytes", "peak")]
            rows.append((name, sizes[0], of_bf16, sizes[1], of_float, f"{row['ms']:.0f}", ratio, limit))
        parts.append(markdown(head, rows))
    head = ("experts, 16 tokens", "model MB", "peak above it, MB", "LoRA on experts too, MB", "step ms")
    rows = [
        (g["experts"], f"{g['bytes'] / 1e6:.1f}", f"{g['above'] / 1e6:.1f}", f"{g['above_lora'] / 1e6:.1f}", f"{g['ms']:.0f}")
        for g in data["growth"]
    ]  # fmt: skip
    return "\n\n".join([*parts, markdown(head, rows)])


def _compared(implementation: str, count: int, rounds: int) -> dict[str, Any]:
    """The same mixture four times, each with LoRA on attention and experts."""
    import torch

    made: dict[str, Callable[[], Any]] = {
        "float32": lambda: mixture(count, implementation),
        "bfloat16": lambda: mixture(count, implementation, torch.bfloat16),
        "a Linear4bit an expert": lambda: with_linears(mixture(count, implementation, four=True)),
        "experts in 4 bits": lambda: _quantized(count, implementation),
        "experts in 4 bits, bfloat16": lambda: _quantized(count, implementation, torch.bfloat16),
    }
    models, found = {}, {}
    for name, make in made.items():
        base = make()
        found[name], models[name] = {"bytes": size_of(base)}, with_lora(base, name.startswith("a Linear"))
    ids = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        step(model, ids)
        found[name]["peak"] = size_of(model) + _peak(lambda model=model: step(model, ids))
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(_timed(lambda model=model: step(model, ids)))
    for name, one in found.items():
        one["ms"] = 1e3 * median(times[name])
        one["ratio"] = median(a / b for a, b in zip(times[name], times["float32"], strict=True))
    return {"implementation": implementation, "experts": count, "models": found, "limit_ms": _limit(count) * 1e3}


def _grown(count: int, rounds: int) -> dict[str, Any]:
    """Sixteen tokens and ever more experts: what a step takes, with LoRA on attention, and on experts too."""
    import torch

    ids = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(1))
    base = _quantized(count, "eager")
    found = {"experts": count, "bytes": size_of(base)}
    model = with_lora(base, False, on_experts=False)
    step(model, ids)
    found["above"] = _peak(lambda: step(model, ids))
    found["ms"] = median(_timed(lambda: step(model, ids)) for _ in range(rounds)) * 1e3
    both = with_lora(_quantized(count, "eager"), False)
    step(both, ids)
    found["above_lora"] = _peak(lambda: step(both, ids))
    return found


def _quantized(count: int, implementation: str, dtype: Any = None) -> Any:
    import patches

    return patches.quantize_experts(mixture(count, implementation, dtype, four=True))


# -- measures ----------------------------------------------------------------------------------------


def _timed(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak(work: Callable[[], None]) -> int:
    """The most that ``work`` had allocated at once, above what there was."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def _limit(count: int) -> float:
    """Seconds for the products of all experts in a step, forward and backward, and for the bytes of dequantizing."""
    import torch

    hidden, inner, layers = WIDE["hidden_size"], WIDE["moe_intermediate_size"], WIDE["num_hidden_layers"]
    rows = TOKENS * TOP // count
    shapes = [(2 * inner, hidden), (hidden, inner)]
    work = [(torch.randn(rows, i), torch.randn(o, i), torch.randn(rows, o)) for o, i in shapes]

    def products() -> None:
        for _ in range(layers * count):
            for x, weight, gradient in work:
                x @ weight.t()
                gradient @ weight
                low, up = torch.empty(RANK, x.shape[1]), torch.empty(weight.shape[0], RANK)
                down = x @ low.t()
                back = gradient @ up
                down @ up.t(), back @ low, back.t() @ x, gradient.t() @ down

    numbers = layers * count * sum(o * i for o, i in shapes)
    moved = 2 * numbers * (0.5 + 4 / 64 + 4)  # read packed weights and absmax, write float32; forward and backward
    big = torch.zeros(1 << 26)
    copy = min(_timed(big.clone) for _ in range(5))
    bandwidth = 2 * big.nbytes / copy
    return min(_timed(products) for _ in range(5)) + moved / bandwidth


if __name__ == "__main__":
    main()
