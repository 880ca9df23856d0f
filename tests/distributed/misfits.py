"""Ranks that do not fit together: the plugin on some only, one that is killed."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from tests.distributed import models
from tests.distributed.training import Outcome, shard


def cell(folder: Path, what: str) -> Outcome:
    """What this rank was told, or how long it waited."""
    int8 = what.endswith("int8")
    model = shard(models.adapted("int8" if int8 else "nested", "lora"))
    # get_model_state_dict() of an INT8 model raises an error without the plugin.
    state_of = type(model).state_dict if int8 else get_model_state_dict
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if what.startswith("save"):
            dcp.save(state_of(model), checkpoint_id=folder / what)
        elif what.startswith("load"):
            dcp.load(state_of(model), checkpoint_id=folder / what.replace("load", "save"))
        elif what.startswith("broadcast"):
            broadcast(model, what)
    said = [str(warning.message) for warning in caught if "bnb-patches" in str(warning.message)]
    return "right", "; ".join(said)


def broadcast(model: object, what: str) -> None:
    plain = models.adapted("nested", "lora", seed=0 if what.endswith("same") else 3).state_dict()
    if "alone" in what:  # as it is saved without the plugin
        plain = {key: value for key, value in plain.items() if ".weight." not in key}
    if "killed" in what and dist.get_rank() == 1:
        os._exit(0)  # as if killed; an exit code that says so would end the other rank with it
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    began = time.monotonic()
    try:
        set_model_state_dict(model, plain if dist.get_rank() == 0 else {}, options=options)  # type: ignore[arg-type]
    except Exception as error:
        raise RuntimeError(f"after {time.monotonic() - began:.0f} s: {error}") from error
