"""``python -m tools.gpu.smoke FILE``: whether quantized layers run on the device at all, and what runs there."""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "bitsandbytes", "transformers", "peft", "accelerate", "triton", "bnb-patches")
ROWS, INSIDE, OUTSIDE = 64, 256, 128


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.smoke", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    logging.disable()
    began = time.perf_counter()
    data: dict[str, Any] = {"python": platform.python_version(), "layers": {}}

    import bitsandbytes  # noqa: F401  which applies the plugin
    import torch

    import patches
    from patches.engine import gate

    data["versions"] = {name: gate.installed_version(name) or "" for name in PACKAGES}
    report = patches.report()
    data["statuses"] = {status.name.lower(): len(report.with_status(status)) for status in patches.Status}
    data["device"] = options.device
    if options.device != "cpu":
        found = torch.cuda.get_device_properties(0)
        data["device"] = {"name": found.name, "memory": found.total_memory, "capability": [found.major, found.minor],
                          "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}  # fmt: skip
    for name, make in LAYERS.items():
        try:
            data["layers"][name] = _differs(make(), options.device)
        except Exception as error:  # the next may run
            data["layers"][name] = f"{type(error).__name__}: {error}"[:500]
        data["seconds"] = time.perf_counter() - began
        options.file.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data, indent=1))
    if not data["statuses"]["applied"] or any(isinstance(one, str) for one in data["layers"].values()):
        raise SystemExit(1)


def _four_bit(nested: bool) -> Any:
    import torch
    from bitsandbytes.nn import Linear4bit

    options = {"quant_type": "nf4", "compress_statistics": nested, "compute_dtype": torch.bfloat16}
    return Linear4bit(INSIDE, OUTSIDE, bias=True, **options)


def _int8() -> Any:
    from bitsandbytes.nn import Linear8bitLt

    return Linear8bitLt(INSIDE, OUTSIDE, bias=True, has_fp16_weights=False, threshold=6.0)


LAYERS = {"NF4": lambda: _four_bit(False), "NF4, nested": lambda: _four_bit(True), "INT8": _int8}


def _differs(layer: Any, device: str) -> dict[str, float]:
    """Output and gradient of the input beside those of the unquantized layer, as shares of their norms."""
    import torch

    torch.manual_seed(0)
    plain = torch.nn.Linear(INSIDE, OUTSIDE)
    layer.load_state_dict(plain.state_dict())
    layer, plain = layer.to(device, torch.bfloat16), plain.to(device)
    found = []
    for each, dtype in ((layer, torch.bfloat16), (plain, torch.float32)):
        x = torch.randn(ROWS, INSIDE, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
        out = each(x)
        out.float().square().sum().backward()
        found.append({"output": out.detach().float(), "gradient": x.grad.float()})
    ours, theirs = found
    return {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours}


if __name__ == "__main__":
    main()
