"""What Python asks of the device: the functions of ``torch.cuda``, or of a module ``torch.sim``."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch


def install(kind: str) -> None:
    """Make the device that lies behind the library known to Python, as ``torch.<kind>``."""
    if kind == "cuda":
        for name, value in functions(kind).items():
            setattr(torch.cuda, name, value)
        for name, value in _RANDOM.items():
            setattr(torch.cuda.random, name, value)
        _fill_the_gaps_of_a_build_without_cuda()
        return
    module = types.ModuleType(f"torch.{kind}")
    vars(module).update(functions(kind))
    torch.utils.rename_privateuse1_backend(kind)
    torch._register_device_module(kind, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def functions(kind: str) -> dict[str, Any]:
    """What a device module of torch has, as far as torch, accelerate, transformers and peft ask for it."""
    ops, total = torch.ops.simulated, _Properties.total_memory

    def index(device: Any = None) -> int:
        if device is None:
            return ops.get_device()
        found = device if isinstance(device, int) else torch.device(device).index
        return ops.get_device() if found is None else found

    class on:
        def __init__(self, device: Any) -> None:
            self.index = index(device)

        def __enter__(self) -> None:
            self.before = exchange(self.index)

        def __exit__(self, *_: Any) -> None:
            ops.set_device(self.before)

    def exchange(device: int) -> int:
        before = ops.get_device()
        if device >= 0:
            ops.set_device(device)
        return before

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return min(ops.limit(index(device)), total) - ops.memory(index(device)), total

    class Stream(_Stream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.device = torch.device(kind, index(device))

    memory, peak = (lambda device=None: ops.memory(index(device))), (lambda device=None: ops.peak(index(device)))
    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False, "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: 2, "current_device": ops.get_device, "device": on,
        "set_device": lambda device: ops.set_device(index(device)),
        "_exchange_device": lambda device: exchange(device), "_maybe_exchange_device": lambda device: exchange(device),
        "synchronize": lambda device=None: ops.synchronize(), "empty_cache": lambda: None,
        "memory_allocated": memory, "memory_reserved": memory, "mem_get_info": mem_get_info,
        "max_memory_allocated": peak, "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: ops.reset_peak(index(device)),
        "get_device_properties": _Properties, "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "simulated", "is_bf16_supported": lambda *_, **__: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "Stream": Stream, "Event": _Event, "current_stream": Stream, "default_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(), "is_current_stream_capturing": lambda: False,
        **_RANDOM,
    }  # fmt: skip


# There is one generator, that of the CPU, which torch seeds and keeps itself.
_RANDOM: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()] * 2,
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
}


class _Stream:
    """The one stream of the device: everything on it is in order, and done."""

    device: torch.device
    stream_id = cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...

    wait_event = record_event = wait_stream

    def synchronize(self) -> None:
        torch.ops.simulated.synchronize()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    wait = record

    def synchronize(self) -> None:
        torch.ops.simulated.synchronize()

    def query(self) -> bool:
        return True


class _Properties:
    name, major, minor, multi_processor_count, warp_size = "simulated", 8, 0, 1, 32
    total_memory = 1 << 34  # on paper; watch.limited_to says how much of it

    def __init__(self, device: Any = None) -> None: ...


def _fill_the_gaps_of_a_build_without_cuda() -> None:
    """Such a build makes no storage on "cuda" and has no graphs to reset."""
    trees = types.ModuleType("torch._inductor.cudagraph_trees")
    trees.reset_cudagraph_trees = lambda: None  # type: ignore[attr-defined]
    sys.modules[trees.__name__] = trees

    def storage(size: int, device: torch.device) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    move, clone = torch.storage._to, torch.storage._StorageBase.clone

    def to(self: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type != "cuda" or self.device == device:
            return move(self, device, non_blocking)
        return storage(self.nbytes(), device).copy_(self, non_blocking)

    def cloned(self: Any) -> Any:
        return storage(self.nbytes(), self.device).copy_(self) if self.device.type == "cuda" else clone(self)

    torch.storage._to = to
    torch.storage._StorageBase.clone = cloned
