"""Worker of test_accelerate_ranks.py, one process a rank: ``accelerate_ranks.py OUT MODEL [--resume FORMER] KIND...``.

A loop of the user's own: ``Accelerator.prepare``, two steps, ``save_state``, two more. ``--resume`` goes on with what other
ranks wrote to the folder ``FORMER``, in a model of other adapters. Writes the losses to ``OUT/<rank>.json``.

The ranks say that they are accelerators before accelerate looks, as in fsdp2_trainer.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import bitsandbytes as bnb  # with this import the entry point runs
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from fsdp2_trainer import load, main
from peft import LoraConfig, get_peft_model

IDS = torch.stack([(torch.arange(12) * (i + 3)) % 128 for i in range(2)])


def prepared(kind: str, model: Path, state_dict: str, seed: int) -> tuple[Accelerator, Any, Any]:
    """A model and its optimizer, sharded by accelerate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state_dict, cpu_ram_efficient_loading=False, reshard_after_forward=True,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin)
    base = load(kind.removesuffix("-8bit"), model)
    base.config.use_cache = False
    torch.manual_seed(seed)
    rank = 64 if kind.endswith("-8bit") else 4  # smaller parameters have optimizer states of 32 bits
    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(base, lora).train()
    kinds = bnb.optim.AdamW8bit if kind.endswith("-8bit") else torch.optim.AdamW
    optimizer = kinds([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(adapted, optimizer)


def steps(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    """Two of them, each on this rank's part of the batch; the losses of the whole."""
    ids = IDS.chunk(accelerator.num_processes)[accelerator.process_index]
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def run(kind: str, options: argparse.Namespace, at: Path, state_dict: str) -> dict[str, Any]:
    accelerator, sharded, optimizer = prepared(kind, options.model, state_dict, seed=4 if options.resume else 3)
    if options.resume:
        accelerator.load_state(str(options.resume / at))
    else:
        steps(accelerator, sharded, optimizer)
        (options.out / at).mkdir(parents=True, exist_ok=True)
        accelerator.save_state(str(options.out / at))
    return {
        "losses": steps(accelerator, sharded, optimizer),
        "ranks": accelerator.num_processes,
        "parameters": sorted({type(p.data).__name__ for p in sharded.parameters()}),
        "8 bits": any(
            t.dtype == torch.uint8 for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)
        ),
    }


if __name__ == "__main__":
    main(run)
