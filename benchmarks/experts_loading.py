"""``python -m benchmarks.experts_loading``: what a mixture of 1 GB takes while it is loaded, in memory and in time.

Experts of 1 GB in bfloat16, in shards of 200 MB. Each way of loading is a process of its own, after a tiny model of the same
kind. Memory is beyond what the process had then: of the CPU the most that ``RssAnon`` shows, read every millisecond; of a
device the most that the simulated one (tests/device) counts. ``a Linear4bit each`` has the same matrices as linear layers, which
``load_in_4bit`` quantizes by itself. Processor time, one thread. Ten minutes, 2.5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .present import markdown, write
from .setting import begin

SIZES = dict(vocab_size=256, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
MIXTURE = dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=512)
LAYERS = 20
TEXTS = {
    "in floating point": "in floating point",
    "quantized": "quantized while it is read",
    "packed": "from a checkpoint in 4 bits",
    "linears": "a Linear4bit each",
}
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts_loading", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of 50 MB each; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of the ways that are timed; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        return _load(*options.load)
    import bitsandbytes
    import torch

    data: dict[str, Any] = {"torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__, "loads": []}
    with tempfile.TemporaryDirectory() as folder:
        data["sizes"] = _save(Path(folder), options.layers)
        for where in ("cpu", "cuda:0"):
            for way in ("in floating point", "quantized", "packed"):
                data["loads"].append(_measured(folder, way, where))
        data["times"] = {way: [] for way in ("in floating point", "quantized", "linears")}
        for _ in range(options.rounds):
            for way, times in data["times"].items():
                times.append(_measured(folder, way, "cpu")["seconds"])
    write(options.output / "experts_loading", data, table(data))
    print(table(data))
    return None


def table(data: dict[str, Any]) -> str:
    sizes = data["sizes"]
    parts = [
        f"Experts of {sizes['experts']:.0f} MB in bfloat16, {sizes['layer']:.0f} MB a layer; {sizes['packed']:.0f} MB is the model "
        f"in 4 bits. torch {data['torch']}, bitsandbytes {data['bitsandbytes']}, one thread."
    ]
    head = ("loaded", "on", "model MB", "most MB", "beyond the model, in layers")
    rows = [
        (TEXTS[one["way"]], one["device"], f"{one['size']:.0f}", f"{one['peak']:.0f}",
         f"{(one['peak'] - one['size']) / sizes['layer']:.2f}")
        for one in data["loads"]
    ]  # fmt: skip
    parts.append(markdown(head, rows))
    times = data["times"]
    ratios = {
        way: median(a / b for a, b in zip(seconds, times["linears"], strict=True)) for way, seconds in times.items()
    }
    rows = [(TEXTS[way], f"{median(seconds):.1f}", f"{ratios[way]:.2f}") for way, seconds in times.items()]
    return "\n\n".join([*parts, markdown(("loaded on the CPU", "seconds", "of a Linear4bit each"), rows)])


# -- what is loaded ----------------------------------------------------------------------------------


def _save(folder: Path, layers: int) -> dict[str, float]:
    """The mixture in bfloat16, the same in 4 bits, and its matrices as linear layers; sizes in MB."""
    import torch

    begin()
    for name, count in (("tiny", 1), ("large", layers)):
        model = _mixture(count)
        model.save_pretrained(folder / name / "in floating point", max_shard_size="200MB")
        if name == "large":
            experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
            sizes = {"experts": sum(p.nbytes for p in experts) / MB, "layer": sum(p.nbytes for p in experts[:2]) / MB}
        linears = _linears(model)
        linears.save_pretrained(folder / name / "linears", max_shard_size="200MB")
        del model, linears
        four = _from(folder / name / "in floating point", "quantized", "cpu")
        four.save_pretrained(folder / name / "packed", max_shard_size="200MB")
        sizes_of = four.get_memory_footprint() / MB
        del four
    torch.manual_seed(0)
    return {**sizes, "packed": sizes_of}


def _mixture(layers: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(**SIZES, **MIXTURE, num_hidden_layers=layers)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _linear_model() -> Any:
    """A class of models that have nothing but the matrices of experts, each a linear layer."""
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    class Config(PretrainedConfig):  # type: ignore[misc]
        model_type = "benchmark_linears"

        def __init__(self, layers: int = 1, **rest: Any) -> None:
            self.layers = layers
            super().__init__(**rest)

    class Linears(PreTrainedModel):  # type: ignore[misc]
        config_class = Config
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            hidden, inner = SIZES["hidden_size"], MIXTURE["moe_intermediate_size"]
            shapes = [(hidden, inner), (hidden, inner), (inner, hidden)]
            self.matrices = torch.nn.ModuleList(
                torch.nn.Linear(*shape, bias=False)
                for _ in range(config.layers * MIXTURE["num_experts"])
                for shape in shapes
            )
            self.post_init()

        def forward(self, x: Any) -> Any:
            return x

    return Linears, Config


def _linears(model: Any) -> Any:
    import torch

    kind, config = _linear_model()
    with torch.device("meta"):
        made = kind(config(layers=len(model.model.layers))).to(torch.bfloat16)
    weights = []
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for both, down in zip(experts.gate_up_proj.data, experts.down_proj.data, strict=True):
            weights += [*(half.contiguous() for half in both.chunk(2)), down]
    state = {f"matrices.{i}.weight": weight for i, weight in enumerate(weights)}
    made.load_state_dict(state, assign=True)
    return made


def _from(folder: Path, way: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import patches

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": device}}
    if way == "quantized":
        with patches.quantize_experts():
            return AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4, **options)
    if way == "linears":
        return _linear_model()[0].from_pretrained(folder, quantization_config=nf4, **options)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


# -- one load, in a process of its own -----------------------------------------------------------------


def _measured(folder: str, way: str, device: str) -> dict[str, Any]:
    from tests import device as simulated

    environ = {**os.environ, **({} if device == "cpu" else {simulated.VARIABLE: "cuda"})}
    command = [sys.executable, "-m", "benchmarks.experts_loading", "--load", folder, way, device, "-"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return {"way": way, "device": device, **json.loads(done.stdout.splitlines()[-1])}


def _load(folder: str, way: str, device: str, _: str) -> None:
    """Load one model, and print what that took."""
    if device != "cpu":
        from tests import device as simulated

        simulated.pretend(simulated.kind())
    begin()
    source = "in floating point" if way == "quantized" else way
    _from(Path(folder, "tiny", source), way, device)  # what is imported and allocated once
    start, peak = time.process_time(), _on_cpu if device == "cpu" else _on_device
    model, most = peak(lambda: _from(Path(folder, "large", source), way, device))
    print(json.dumps({"peak": most / MB, "size": _size(model) / MB, "seconds": time.process_time() - start}))


def _size(model: Any) -> int:
    """Of parameters and quantization states."""
    states = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    return int(model.get_memory_footprint()) + sum(state.absmax.nbytes for state in states if state is not None)


def _on_cpu(load: Callable[[], Any]) -> tuple[Any, int]:
    """What ``load`` gives, and the most that the process had of its own meanwhile."""
    before, most, done = _private(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            most[0] = max(most[0], _private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = load()
    finally:
        done.set()
        watcher.join()
    return model, max(most[0], _private()) - before


def _private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def _on_device(load: Callable[[], Any]) -> tuple[Any, int]:
    from tests.device import watch

    with watch.peak() as most:
        model = load()
    return model, most[0]


if __name__ == "__main__":
    main()
