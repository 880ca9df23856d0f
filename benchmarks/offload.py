"""``python -m benchmarks.offload``: a forward of a model with layers on the CPU or the disk, in 4 bits and INT8 beside 16 bits.

One process, one thread, wall-clock time; the models take turns, and ``of 16 bits`` is the median over rounds of two that
ran one after the other. The 16 bits are accelerate's own offload. "cold": the pages that a layer was read from are
dropped when it has computed (``posix_fadvise``), as in memory that does not hold the model. ``limit`` is what bringing the
bytes takes, at the bandwidth of reading the same files, or of copying to the device, measured in the same round. ``ahead``
is the forward beside the same one with ``PATCHES_PREFETCH=0``. ``loading`` is beside loading whole. The CPU is a place to
wait only for an accelerator, so without one these rows are left out. Three minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from patches.offload.prefetch import Region, tensor_regions

from .device import map_with
from .present import markdown, write
from .setting import begin, host, sentence

LAYERS, ON_DEVICE = 8, 1
KINDS = ("16 bits", "4 bits", "INT8")
PLAIN = ", not ahead"
TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    parser.add_argument("--folder", help="where the files of the models lie, on the disk that is measured")
    options = parser.parse_args()
    begin()

    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for kind in KINDS:  # a file that another model has mapped stays in the page cache
            _save(folder / kind, options.hidden)
        data: dict[str, Any] = {"host": {**host(), "device": device, "hidden": options.hidden}, "rows": []}
        data["loading"] = _loading(folder, device, options.rounds)
        for place in ["disk, warm", "disk, cold", *(["cpu"] if device != "cpu" else [])]:
            data["rows"] += _compared(folder, device, place, options.rounds)
    write(options.output / "offload", data, table(data))
    print(table(data))


def table(data: dict[str, Any]) -> str:
    host = data["host"]
    about = (
        f"{sentence(host)}; "
        f"{LAYERS - ON_DEVICE} of {LAYERS} layers of width {host['hidden']} offloaded, forward of {TOKENS} tokens on {host['device']}."
    )
    head = ("where", "model", "MB brought", "ms", "of 16 bits", "limit ms", "ahead")
    rows = [
        (r["place"], r["kind"], f"{r['bytes'] / 1e6:.1f}", f"{r['ms']:.0f}", f"{r['ratio']:.2f}", f"{r['limit']:.0f}",
         f"{r['ahead']:.2f}" if r["ahead"] else "") for r in data["rows"]
    ]  # fmt: skip
    loading = [(kind, f"{one['s']:.1f}", f"{one['ratio']:.2f}") for kind, one in data["loading"].items()]
    return "\n\n".join([about, markdown(head, rows), markdown(("loading", "s", "of whole"), loading)])


def _save(folder: Path, hidden: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_attention_heads": 8, "vocab_size": 1000}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **size)).to(torch.bfloat16).save_pretrained(folder)


def _load(folder: Path, kind: str, device: str, place: str) -> Any:
    import torch
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how: dict[str, Any] = {}
    if kind == "4 bits":
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    elif kind == "INT8":
        how["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    where = map_with(LAYERS - ON_DEVICE, LAYERS, device, place) if place else {"": device}
    return LlamaForCausalLM.from_pretrained(
        folder / kind, device_map=where, dtype=torch.bfloat16, offload_folder=folder / "off", **how
    )


def _loading(folder: Path, device: str, rounds: int) -> dict[str, Any]:
    found = {}
    for kind in KINDS[1:]:
        pairs = [
            [_seconds(partial(_load, folder, kind, device, place)) for place in ("", "disk")] for _ in range(rounds)
        ]
        found[kind] = {"s": median(away for _, away in pairs), "ratio": median(away / whole for whole, away in pairs)}
    return found


def _compared(folder: Path, device: str, place: str, rounds: int) -> list[dict[str, Any]]:
    where, _, state = place.partition(", ")
    models = {kind: _load(folder, kind, device, where) for kind in KINDS}
    if where == "disk":
        os.environ["PATCHES_PREFETCH"] = "0"
        models |= {kind + PLAIN: _load(folder, kind, device, where) for kind in KINDS[1:]}
        del os.environ["PATCHES_PREFETCH"]
    if state == "cold":
        for model in models.values():
            _drop(_regions(model))
            _drop_behind(model)
    timed: dict[str, dict[str, list[float]]] = {kind: {"ms": [], "limit": []} for kind in models}
    for _ in range(rounds + 1):
        for kind, model in models.items():
            if state == "cold":
                _drop(_regions(model))
            timed[kind]["limit"].append(_bandwidth(model) if where == "disk" else _copying(device))
            if state == "cold":
                _drop(_regions(model))
                _forward(model, device)  # leaves in the page cache what one forward leaves to the next
            timed[kind]["ms"].append(1000 * _seconds(partial(_forward, model, device)))
    rows = []
    for kind in KINDS:
        size = _brought(models[kind])
        limits = [1000 * size / bandwidth for bandwidth in timed[kind]["limit"][1:]]  # the first warms up
        ms, limit = median(timed[kind]["ms"][1:]), median(limits)
        ratio = median(a / b for a, b in zip(timed[kind]["ms"][1:], timed[KINDS[0]]["ms"][1:]))
        without = timed.get(kind + PLAIN, {"ms": []})["ms"]
        ahead = median(a / b for a, b in zip(timed[kind]["ms"][1:], without[1:])) if without else None
        rows.append(
            {"place": place, "kind": kind, "bytes": size, "ms": ms, "ratio": ratio, "limit": limit, "ahead": ahead}
        )
    return rows


def _brought(model: Any) -> int:
    import patches

    return sum(sum(place.brings.values()) for place in patches.inspect(model).facts.places)


def _regions(module: Any, recurse: bool = True) -> list[Region]:
    """What the hooks in ``module`` read: files, first bytes, numbers of bytes."""
    found: list[Region] = []
    for part in module.modules() if recurse else [module]:
        weights = getattr(getattr(part, "_hf_hook", None), "weights_map", None)
        entries = getattr(getattr(weights, "dataset", None), "index", {})
        for name, _ in part.named_parameters(recurse=False):
            if entry := entries.get(weights.prefix + name if weights else name):
                tensors = tensor_regions(entry["safetensors_file"])
                found += [tensors[entry["weight_name"]]]
    return found


def _drop(regions: Iterable[Region]) -> None:
    for file, first, count in regions:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), first, count, os.POSIX_FADV_DONTNEED)


def _drop_behind(model: Any) -> None:
    for module in model.modules():
        if regions := _regions(module, recurse=False):
            module.register_forward_hook(lambda *_, regions=regions: _drop(regions))


def _bandwidth(model: Any) -> float:
    """Bytes a second of reading what ``model`` reads through the file system."""
    start, read, buffer = time.perf_counter(), 0, bytearray(2**22)
    for file, first, count in _regions(model):
        with open(file, "rb", buffering=0) as opened:
            opened.seek(first)
            while count > 0 and (got := opened.readinto(memoryview(buffer)[: min(count, len(buffer))])):
                read, count = read + got, count - got
    return read / (time.perf_counter() - start)


def _copying(device: str) -> float:
    import torch

    one = torch.empty(2**26, dtype=torch.uint8)
    return one.nbytes / _seconds(lambda: one.to(device))


def _forward(model: Any, device: str) -> None:
    import torch

    with torch.inference_mode():
        model(input_ids=torch.arange(TOKENS, device=device)[None])


def _seconds(call: Callable[[], Any]) -> float:
    import torch

    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
