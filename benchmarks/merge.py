"""What the patches cost in a merge: ``python -m benchmarks.merge``. A ratio of two times, each the least of many tries in turn."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["PATCHES_AUTOLOAD"] = "0"

import bitsandbytes as bnb  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402

import patches  # noqa: E402

SIZE, TRIES = 1024, 30
LAYERS = {
    "INT8": lambda: bnb.nn.Linear8bitLt(SIZE, SIZE, bias=False, has_fp16_weights=False),
    "NF4": lambda: bnb.nn.Linear4bit(SIZE, SIZE, bias=False, quant_type="nf4"),
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    base: Any = torch.nn.Sequential(LAYERS[kind]()).to("cpu")
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = kind == "INT8", kind != "INT8"
    return peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["0"], init_lora_weights=False))


def merge(kind: str) -> float:
    model = model_of(kind)
    start = time.perf_counter()
    model.merge_adapter()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    for kind in LAYERS:
        least = {False: float("inf"), True: float("inf")}
        merge(kind)
        for patched in (False, True) * 3:  # applying takes longer than a merge
            (patches.apply if patched else patches.revert)()
            least[patched] = min(least[patched], *(merge(kind) for _ in range(TRIES)))
        print(
            f"{kind}: {1e3 * least[False]:.1f} ms as is, {1e3 * least[True]:.1f} ms patched: {least[True] / least[False]:.2f}"
        )


if __name__ == "__main__":
    main()
