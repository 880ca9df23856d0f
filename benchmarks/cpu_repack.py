"""``python -m benchmarks.cpu_repack``: 4-bit layers on CPUs with AVX512-BF16, unpatched and patched. Two minutes.

Unpatched and patched calls take turns in one process, so what slows the machine slows both; processor time of one
thread. Ratios are medians of those of the rounds, times the best.

The first table is of calls. ``canonical`` is a layer that never packs, as on a processor without the instruction;
``looking`` is what it takes, between products, to see that the weight is still what was packed. The second is of
programs in which a packed copy cannot pay: seconds of a pass, patched and without packing.

On a processor with AVX512-BF16 the kernel is the real one. On others it is emulated and computes nothing at all,
so that the bookkeeping around it is all that is measured: the ratio is then the worst that a layer of size zero
would see.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

IDS = ("bitsandbytes-cpu-repack", "bitsandbytes-params4bit-meta")
SIZES = ("512x512", "2048x2048", "4096x11008")
SECONDS = 0.05
"""Of calls in a row, before it is the other's turn."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_repack", description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="in x out (default: %(default)s)")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 128], help="of the input (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    parser.add_argument("--no-programs", action="store_true", help="leave out the second table")
    options = parser.parse_args()

    logging.disable()
    warnings.simplefilter("ignore")
    real = _prepare()
    import bitsandbytes
    import torch

    torch.set_num_threads(1)
    kernel = "the kernel of this processor" if real else "a kernel that takes no time"
    print(f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}, {kernel}, one thread")
    with torch.no_grad():
        print(f"{'us a call':>12s} {'rows':>5s} {'unpatched':>10s} {'patched':>9s} {'ratio':>6s} {'looking':>8s}"
              f" {'canonical':>10s}")  # fmt: skip
        for size in options.sizes if real else ("256x256",):
            columns, outputs = map(int, size.split("x"))
            for rows in options.rows:
                print(f"{size:>12s} {rows:5d} {_calls(columns, outputs, rows, options.rounds)}", flush=True)
        if not options.no_programs:
            print(f"{'ms a pass':>34s} {'patched':>9s} {'canonical':>10s} {'ratio':>6s}")
            for program in (from_disk, views_of_one_storage, new_contents, evaluation_between_steps):
                print(f"{program.__name__.replace('_', ' '):>34s} {_passes(program, options.rounds)}", flush=True)


# -- calls -------------------------------------------------------------------------------------------


def _calls(columns: int, outputs: int, rows: int, rounds: int) -> str:
    import torch

    import patches

    x = torch.randn(rows, columns, dtype=torch.bfloat16)
    one, other = (_layer(columns, outputs) for _ in range(2))
    plain = _never(other)
    unpatched, patched = [], []
    for _ in range(rounds):
        unpatched.append(_microseconds(lambda: one(x)))
        with patches.applied(*IDS):
            patched.append(_microseconds(lambda: other(x)))
    canonical = min(_microseconds(lambda: plain(x)) for _ in range(3))
    ratio = statistics.median(b / a for a, b in zip(unpatched, patched))
    return f"{min(unpatched):10.0f} {min(patched):9.0f} {ratio:6.3f} {_looking(other, x):>8s} {canonical:10.0f}"


def _looking(layer: Any, x: Any) -> str:
    """Microseconds to compare the weight with what was packed; nothing if it was not."""
    from patches.quantized.four_bit import block_scales
    from patches.operators import packed_copies

    packed = vars(layer.weight.untyped_storage()).get(packed_copies._COPIES, {}).get(layer.weight.data_ptr())
    if packed is None:
        return "-"
    state, spent = layer.weight.quant_state, []
    sources = (layer.weight.data, *block_scales.statistics_of(state)[0], state.code)
    for _ in range(50):
        packed.product(x, None)
        start = time.perf_counter()
        packed.contents.are_those_of(sources)
        spent.append(time.perf_counter() - start)
    return f"{statistics.median(spent) * 1e6:.0f}"


def _microseconds(call: Callable[[], Any]) -> float:
    call()  # packs; and what is slow for the first time
    calls, spent = 0, 0.0
    while spent < SECONDS:
        start = time.process_time()
        for _ in range(5):
            call()
        spent += time.process_time() - start
        calls += 5
    return spent / calls * 1e6


# -- programs: each makes what is called for one pass ------------------------------------------------


def from_disk(layers: Any, x: Any) -> Callable[[], Any]:
    """accelerate brings each weight for each forward."""
    import accelerate
    import torch

    folder = tempfile.TemporaryDirectory(prefix="bnb-patches-bench-")
    accelerate.disk_offload(layers, folder.name, torch.device("cpu"))
    return lambda folder=folder: layers(x)  # removed with the last who holds it


def views_of_one_storage(layers: Any, x: Any) -> Callable[[], Any]:
    """As a loader leaves them that reads a file as one piece."""
    import torch

    flat, start = torch.cat([layer.weight.data.view(-1) for layer in layers]), 0
    for layer in layers:
        layer.weight.data = flat[start : start + layer.weight.numel()].view(-1, 1)
        start += layer.weight.numel()
    return lambda: layers(x)


def new_contents(layers: Any, x: Any) -> Callable[[], Any]:
    """All layers are streamed through one buffer."""
    host = [layer.weight.data.clone() for layer in layers]
    for layer in layers:
        layer.weight.data = layers[0].weight.data

    def stream() -> None:
        out = x
        for layer, codes in zip(layers, host):
            layer.weight.data.copy_(codes)
            out = layer(out)

    return stream


def evaluation_between_steps(layers: Any, x: Any) -> Callable[[], Any]:
    """Trains on 64 rows, then evaluates 64 and decodes 8 times."""
    import torch

    batch = torch.randn(64, x.shape[1], dtype=x.dtype)

    def turn() -> None:
        with torch.enable_grad():
            layers.train()(batch.clone().requires_grad_()).sum().backward()
        layers.eval()(batch)
        for _ in range(8):
            layers(x)

    return turn


def _passes(program: Callable[[Any, Any], Callable[[], Any]], rounds: int) -> str:
    import torch

    import patches

    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(_layer(1024, 1024) for _ in range(4)))
    x = torch.randn(1, 1024, dtype=torch.bfloat16)
    with patches.applied(*IDS):
        packing, never = (program(model, x) for model in (layers, _never(layers)))
        both = [(_microseconds(packing), _microseconds(never)) for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in both)
    patched, canonical = (min(times) / 1e3 for times in zip(*both))
    return f"{patched:9.2f} {canonical:10.2f} {ratio:6.3f}"


def _layer(columns: int, outputs: int) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    layer = Linear4bit(columns, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    return layer.bfloat16().to("cpu").eval()


def _never(model: Any) -> Any:
    """A copy that never packs."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _prepare() -> bool:
    """Whether this processor has the instruction; if not, stand in for it before bitsandbytes asks."""
    from tests import processor
    from tests.processor import avx512bf16

    if processor.host_has_avx512bf16():
        return True
    avx512bf16.KERNELS.update(dict.fromkeys(avx512bf16.KERNELS, lambda *arguments: None))
    processor.pretend("emulated")
    return False


if __name__ == "__main__":
    main()
