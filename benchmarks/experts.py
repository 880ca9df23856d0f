"""``python -m benchmarks.experts``: experts in 4 bits beside floating point and beside one ``Linear4bit`` an expert.

One process, float32 unless a row says otherwise, one thread, processor time; the models take turns, and a ratio is the
median over rounds of two that ran one after the other. LoRA (rank 8) is on attention and on experts. ``peak`` is the
model and what a training step allocates on top, from torch's own allocation events. ``limit`` is what the experts of a
step cannot go below: their matrix products in floating point, timed bare, and the bytes that dequantizing reads and
writes at the bandwidth of a copy. Five minutes.
"""

from __future__ import annotations

import argparse
import logging
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .present import markdown, write

RANK = 8
TOP = 4
WIDE = dict(hidden_size=512, moe_intermediate_size=256, num_hidden_layers=2)
TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--growth", type=int, nargs="*", default=[16, 64, 128], help="numbers of experts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")

    import torch
    import transformers

    import patches

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    patches.apply()
    data: dict[str, Any] = {"host": _host(), "steps": [], "growth": []}
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


def _host() -> dict[str, Any]:
    import bitsandbytes
    import torch

    found = (
        re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    )
    versions = {"torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__}
    return {"processor": found[1] if found else platform.processor(), **versions}


def _compared(implementation: str, count: int, rounds: int) -> dict[str, Any]:
    """The same mixture four times, each with LoRA on attention and experts."""
    import torch

    made: dict[str, Callable[[], Any]] = {
        "float32": lambda: _model(count, implementation),
        "bfloat16": lambda: _model(count, implementation, torch.bfloat16),
        "a Linear4bit an expert": lambda: _linears(_model(count, implementation, four=True)),
        "experts in 4 bits": lambda: _quantized(count, implementation),
        "experts in 4 bits, bfloat16": lambda: _quantized(count, implementation, torch.bfloat16),
    }
    models, found = {}, {}
    for name, make in made.items():
        base = make()
        found[name], models[name] = {"bytes": _bytes(base)}, _lora(base, name.startswith("a Linear"))
    ids = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        _step(model, ids)
        found[name]["peak"] = _bytes(model) + _peak(lambda model=model: _step(model, ids))
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(_timed(lambda model=model: _step(model, ids)))
    for name, one in found.items():
        one["ms"] = 1e3 * median(times[name])
        one["ratio"] = median(a / b for a, b in zip(times[name], times["float32"], strict=True))
    return {"implementation": implementation, "experts": count, "models": found, "limit_ms": _limit(count) * 1e3}


def _grown(count: int, rounds: int) -> dict[str, Any]:
    """Sixteen tokens and ever more experts: what a step takes, with LoRA on attention, and on experts too."""
    import torch

    ids = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(1))
    base = _quantized(count, "eager")
    found = {"experts": count, "bytes": _bytes(base)}
    model = _lora(base, False, on_experts=False)
    _step(model, ids)
    found["above"] = _peak(lambda: _step(model, ids))
    found["ms"] = median(_timed(lambda: _step(model, ids)) for _ in range(rounds)) * 1e3
    both = _lora(_quantized(count, "eager"), False)
    _step(both, ids)
    found["above_lora"] = _peak(lambda: _step(both, ids))
    return found


# -- models ------------------------------------------------------------------------------------------


def _model(count: int, implementation: str, dtype: Any = None, four: bool = False) -> Any:
    """A Qwen3-MoE from disk; ``four``: its linear layers in 4 bits, and experts as ``load_in_4bit`` leaves them."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig

    dtype = dtype or torch.float32
    sizes = dict(vocab_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    config = Qwen3MoeConfig(**WIDE, **sizes, num_experts=count, num_experts_per_tok=TOP)
    torch.manual_seed(0)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    options = {"quantization_config": nf4, "device_map": {"": "cpu"}} if four else {}
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
        made = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation=implementation, **options
        )
    return made.requires_grad_(False)


def _quantized(count: int, implementation: str, dtype: Any = None) -> Any:
    import patches

    return patches.quantize_experts(_model(count, implementation, dtype, four=True))


def _linears(model: Any) -> Any:
    """As transformers 4 had it: three layers an expert, and a loop over the experts that tokens chose."""
    for name, module in list(model.named_modules()):
        if name.endswith("mlp.experts"):
            model.set_submodule(name, _experts_of_linears(module))
    return model


def _experts_of_linears(module: Any) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit

    def layer(weight: Any) -> Any:
        options = {"bias": False, "quant_type": "nf4", "compress_statistics": False, "compute_dtype": weight.dtype}
        new = Linear4bit(weight.shape[1], weight.shape[0], **options)
        new.load_state_dict({"weight": weight})
        return new.to("cpu")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gates = [weight.chunk(2) for weight in module.gate_up_proj.data]
            self.gate_proj = torch.nn.ModuleList(layer(gate) for gate, _ in gates)
            self.up_proj = torch.nn.ModuleList(layer(up) for _, up in gates)
            self.down_proj = torch.nn.ModuleList(layer(down) for down in module.down_proj.data)

        def forward(self, hidden: Any, chosen: Any, weights: Any) -> Any:
            out = torch.zeros_like(hidden)
            mask = torch.nn.functional.one_hot(chosen, len(self.gate_proj)).permute(2, 1, 0)
            for number in mask.sum((-1, -2)).nonzero()[:, 0].tolist():
                place, token = torch.where(mask[number])
                x = hidden[token]
                x = self.down_proj[number](module.act_fn(self.gate_proj[number](x)) * self.up_proj[number](x))
                out.index_add_(0, token, x * weights[token, place, None])
            return out

    return Experts()


def _lora(model: Any, linears: bool, on_experts: bool = True) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "v_proj"]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if on_experts and not linears else None
    if linears:
        names += [
            name for name, module in model.named_modules() if isinstance(module, Linear4bit) and ".experts." in name
        ]
    torch.manual_seed(1)
    config = LoraConfig(r=RANK, target_modules=names, target_parameters=parameters, init_lora_weights=False)
    made = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    made.enable_input_require_grads()
    return made


# -- measures ----------------------------------------------------------------------------------------


def _step(model: Any, ids: Any) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def _timed(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _bytes(model: Any) -> int:
    """Of parameters and quantization states."""
    from bitsandbytes.nn import Params4bit

    every = list(model.parameters())
    return sum(p.nbytes + (p.quant_state.absmax.nbytes if isinstance(p, Params4bit) else 0) for p in every)


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
