"""What the examples share: a model on disk, text, a run without the plugin, and the report."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

LENGTH = 128  # tokens, here bytes, in a sample
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


@functools.cache
def fast_dtype() -> torch.dtype:
    """bfloat16 where the device computes in it; a processor without instructions for it is many times faster in float32."""
    if DEVICE != "cpu":
        return torch.bfloat16
    info = Path("/proc/cpuinfo")
    return torch.bfloat16 if info.exists() and has_bf16(info.read_text()) else torch.float32


def has_bf16(cpuinfo: str) -> bool:
    """Whether the processor that ``cpuinfo`` describes has instructions for bfloat16."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(cpuinfo.split()))


def in_dtype(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The keyword of transformers for ``dtype``, which had another name before 4.56."""
    return {"dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype": dtype}


def save_llama(folder: Path, hidden: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save a Llama with fresh weights, as a checkpoint from the Hub would lie on disk."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ByT5Tokenizer(extra_ids=0).vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=LENGTH,
        initializer_range=0.06,
        use_cache=False,
    )
    AutoModelForCausalLM.from_config(config, **in_dtype(dtype)).save_pretrained(folder)


def batches(size: int, device: str) -> Iterator[torch.Tensor]:
    """Token ids of shape ``(size, LENGTH)``: random pieces of the sources of Python's standard library."""
    tokens = corpus()
    order = torch.Generator().manual_seed(2)
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (size, 1), generator=order)
        yield tokens[starts + torch.arange(LENGTH)].to(device)


@functools.cache
def corpus() -> torch.Tensor:
    """Some 200,000 bytes of Python's standard library as token ids, shape ``(tokens,)``."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    return torch.tensor([token for source in sources for token in tokenizer(source.read_text("utf-8")).input_ids])


def gradients(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of every trainable parameter after one forward and backward."""
    model.zero_grad()
    model(input_ids=batch, labels=batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference between two sets of tensors with the same names."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"not the same tensors: {sorted(ours.keys() ^ theirs.keys())}")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def run_without_plugin(base: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This script again, for one step on the model in ``base``, in a process that has no plugin."""
    command = [sys.executable, *sys.argv, *arguments, "--attempt", str(base)]
    return subprocess.run(command, env={**os.environ, "PATCHES_AUTOLOAD": "0"}, capture_output=True, text=True)


def print_changes() -> None:
    """How much the plugin changed in this process, and where that is said."""
    import patches

    applied = patches.report().with_status(patches.Status.APPLIED)
    print(f"\n{len(applied)} patches are applied in this process: `python -m patches report` lists them,")
    print("`python -m patches diff` shows the changed lines, `patches.revert()` restores the originals.")


def quiet() -> None:
    """Leave the screen to the figures: no loading bars, no notes on names that peft still uses or kernels to install."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
