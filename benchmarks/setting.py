"""What measurements on a processor begin with: the machine that they run on, and libraries that say nothing."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any


INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
"""What decides which kernels torch and bitsandbytes run, by its flag in ``/proc/cpuinfo``; each has those before it."""


def processor() -> str:
    """Return the name of the processor, with the family and model that tell its generation, and its widest instructions.

    A virtual machine may say ``AMD EPYC`` of all of them.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in said:
        return platform.processor() or platform.machine()
    flags = said.get("flags", "").split()
    widest = [words for flag, words in INSTRUCTIONS.items() if flag in flags][-1:]
    number = f"family {said.get('cpu family')} model {said.get('model')}"
    return f"{said['model name']} ({', '.join([number, *widest])})"


def host() -> dict[str, Any]:
    """Return the name of the processor, its load, and the versions of torch and bitsandbytes."""
    load = round(os.getloadavg()[0], 1)
    return {"processor": processor(), "load": load, **{each: version(each) for each in ("torch", "bitsandbytes")}}


def sentence(host: dict[str, Any]) -> str:
    """Return what :func:`host` gave, in words."""
    return f"{host['processor']}, one thread, load {host['load']}, torch {host['torch']}, bitsandbytes {host['bitsandbytes']}"


def begin() -> None:
    """Silence the libraries, compute on one thread, and apply the patches."""
    logging.disable()
    warnings.simplefilter("ignore")

    import torch
    import transformers

    import patches

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    patches.apply()
