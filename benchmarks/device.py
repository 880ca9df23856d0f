"""Time and memory of what runs on a GPU, on the simulated one of ``tests/device``, or on a processor."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import device as simulated


def device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return "a processor"
    return "simulated" if simulated.kind() else torch.cuda.get_device_name()


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Of a call, until the device has done its work."""
    import torch

    start = time.perf_counter()
    call()
    if device != "cpu" and not simulated.kind():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bytes_held(device: str) -> int:
    """Bytes that tensors hold on the device, garbage collected first; 0 on a processor, where torch does not say."""
    import torch

    gc.collect()
    if device == "cpu":
        return 0
    return torch.ops.simulated.memory(0) if simulated.kind() else torch.cuda.memory_allocated()


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most that tensors held during ``call``, as :func:`bytes_held`."""
    import torch

    if device == "cpu":
        call()
        return 0
    torch.ops.simulated.reset_peak(0) if simulated.kind() else torch.cuda.reset_peak_memory_stats()
    call()
    return torch.ops.simulated.peak(0) if simulated.kind() else torch.cuda.max_memory_allocated()


def bytes_copied(call: Callable[[], Any]) -> int | None:
    """Bytes that ``call`` copies from the host to the device, as the device logs them; None if it logs none."""
    if simulated.kind():
        from tests.device import watch

        with watch.watch() as seen:
            call()
        return seen.moved("host to device")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(str(file := Path(folder) / "trace.json"))
        events = json.loads(file.read_text())["traceEvents"]
    copies = [event["args"]["bytes"] for event in events if event.get("name", "").startswith("Memcpy HtoD")]
    return sum(copies) if copies else None


def map_with(away: int, layers: int, device: int | str, place: str) -> dict[str, int | str]:
    """A device map of a Llama: the last ``away`` of its ``layers`` are in ``place``, the rest on ``device``."""
    outside = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), device)
    return {**outside, **{f"model.layers.{i}": device if i < layers - away else place for i in range(layers)}}
