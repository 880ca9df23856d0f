"""``python -m benchmarks.step_shares``: on what a step of an offloaded model spends its time. Two minutes.

A Llama on the disk but for one decoder layer, in 16 bits, 4 bits and INT8, and in 4 bits whole; LoRA on all linear layers,
non-reentrant checkpointing, one thread, all on the processor. The files are in the page cache. Operators are timed by
torch's profiler. What is left of the step is Python and files: :mod:`cProfile`, in steps of its own, tells how much of
it is Python of this plugin, and how much opening files and reading from them. A profiler slows Python down, so that these
shares are rather too high than too low. Shares, not speed: the step of :mod:`benchmarks.does_not_fit` is timed there.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import re
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from . import offload
from .present import markdown, write
from .setting import begin, host, sentence

WAYS = (("16 bits", "disk"), ("4 bits", "disk"), ("INT8", "disk"), ("4 bits", ""))
KINDS = {
    "products": "matrix products, attention",
    "dequantizing": "dequantizing",
    "copies": "copies and casts",
    "operators": "other operators",
    "files": "files",
    "ours": "Python of the plugin",
    "python": "other Python",
}
_PRODUCT = re.compile(r"aten::(addmm|bmm|mm|baddbmm|mkldnn_linear|_scaled_dot_product\w*)$")
_QUANTIZED = re.compile(r"bitsandbytes::|MatMul(4Bit|8bitLt|8bitFp)")
_COPY = re.compile(r"aten::(copy_|_to_copy|clone|contiguous)$")
_FILE = re.compile(r"safe_open|get_tensor|get_slice|posix_fadvise|built-in method (io\.open|posix\.)|numpy.*memmap")
_OURS = "/patches/"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_shares", description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="that each profiler sees (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of a step (default: %(default)s)")
    parser.add_argument("--folder", help="where the files of the models lie")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args()
    begin()
    about = {**host(), "hidden": options.hidden, "tokens": options.tokens}
    data: dict[str, Any] = {"host": about, "ways": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for kind, place in WAYS:
            step = _prepared(Path(name), kind, place, options.hidden, options.tokens)
            data["ways"].append({"kind": kind, "place": place or "whole", **shares(step, options.steps)})
    write(options.output / "step_shares", data, table(data))
    print(table(data))


def table(data: dict[str, Any]) -> str:
    host = data["host"]
    about = (
        f"{sentence(host)}; "
        f"a step of {host['tokens']} tokens, {offload.LAYERS} layers of width {host['hidden']}, "
        f"{offload.LAYERS - offload.ON_DEVICE} of them on the disk where it says so."
    )
    rows = [
        (f"{way['kind']}, {way['place']}", f"{way['ms']:.0f}", *(f"{way['shares'][kind]:.1%}" for kind in KINDS))
        for way in data["ways"]
    ]
    return f"{about}\n\n{markdown(('model', 'ms', *KINDS.values()), rows)}"


def shares(step: Any, steps: int) -> dict[str, Any]:
    """Milliseconds of ``step`` without a profiler, and the share of each of :data:`KINDS`."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the first learns the order in which layers are read
        step()
    ms = 1000 * median(offload._seconds(step) for _ in range(steps))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        whole = 1e6 * (time.perf_counter() - began)
    found = Counter(dict.fromkeys(KINDS, 0.0))
    for event in profiler.events():
        found[_kind(event)] += event.self_cpu_time_total / whole
    with cProfile.Profile(time.process_time) as python:
        for _ in range(steps):
            step()
    statistics = pstats.Stats(python)
    for (file, _, function), (_, _, own, _, _) in statistics.stats.items():  # type: ignore[attr-defined]
        kind = "ours" if _OURS in file else "files" if _FILE.search(function) else ""
        if kind:
            found[kind] += own / statistics.total_tt  # type: ignore[attr-defined]
    found["python"] = max(0.0, 1 - sum(found.values()))
    return {"ms": ms, "shares": dict(found)}


def _kind(event: Any) -> str:
    """Which of :data:`KINDS` an operator belongs to, by its name and those of what called it."""
    names, above = [], event
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    for pattern, kind in ((_PRODUCT, "products"), (_QUANTIZED, "dequantizing"), (_COPY, "copies")):
        if any(pattern.match(name) for name in names):
            return kind
    return "operators"


def _prepared(folder: Path, kind: str, place: str, hidden: int, tokens: int) -> Any:
    """A step of a model that was made, saved and loaded."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if not (folder / kind).exists():
        offload._save(folder / kind, hidden)
    model = offload._load(folder, kind, "cpu", place)
    how = {"use_reentrant": False}
    if kind == "16 bits":
        model.gradient_checkpointing_enable(how)
        model.enable_input_require_grads()
    else:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=how)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    return partial(_step, model, torch.arange(tokens)[None])


def _step(model: Any, ids: Any) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()


if __name__ == "__main__":
    main()
