"""``python -m benchmarks.cpu_repack``: the packed 4-bit kernel for CPUs, unpatched and patched, call by call.

On a processor with AVX512-BF16 the kernel is the real one. On others it is emulated and computes nothing at
all, so that the bookkeeping around it is all that is measured: the ratio is then the worst that a layer of
size zero would see.
"""

from __future__ import annotations

import argparse
import logging
import time
import timeit
import warnings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_repack", description=__doc__)
    parser.add_argument("--features", type=int, default=2048, help="in and out (default 2048)")
    parser.add_argument("--rows", type=int, default=1, help="of the input (default 1: decoding)")
    options = parser.parse_args()

    logging.disable()
    warnings.simplefilter("ignore")
    real = _prepare()
    import bitsandbytes
    import torch

    import patches

    features = options.features if real else 256
    x = torch.randn(options.rows, features, dtype=torch.bfloat16)

    def layer() -> torch.nn.Module:
        torch.manual_seed(0)
        made = bitsandbytes.nn.Linear4bit(features, features, compute_dtype=torch.bfloat16, quant_type="nf4")
        return made.bfloat16().to("cpu").eval()

    def microseconds(model: torch.nn.Module) -> float:
        with torch.no_grad():
            model(x)
            runs = timeit.repeat(lambda: model(x), number=200, repeat=9, timer=time.process_time)
        return min(runs) / 200 * 1e6

    unpatched = microseconds(layer())
    with patches.applied("bitsandbytes-cpu-repack"):
        patched = microseconds(layer())
        plain = layer()
        plain.support_avx512bf16_for_cpu = False
        canonical = microseconds(plain)
    kernel = "the kernel of this processor" if real else "a kernel that takes no time"
    print(f"bitsandbytes {bitsandbytes.__version__}, {kernel}, {features} x {features}, {options.rows} rows, us a call:")
    print(f"unpatched {unpatched:.0f}, patched {patched:.0f} (ratio {patched / unpatched:.2f}), ", end="")
    print(f"without the packed kernel {canonical:.0f}")


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
