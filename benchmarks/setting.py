"""What measurements on a processor begin with: the machine that they run on, and libraries that say nothing."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any


def host() -> dict[str, Any]:
    """Return the name of the processor, its load, and the versions of torch and bitsandbytes."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())
    load = round(os.getloadavg()[0], 1)
    return {"processor": name, "load": load, **{each: version(each) for each in ("torch", "bitsandbytes")}}


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
