"""Worker of test_fsdp2.py, one process a rank: ``fsdp2.py OUT MODEL``.

A 4-bit and then an INT8 Llama with LoRA, loaded from MODEL as users load it, is trained for two steps: once
whole, on the whole batch, and once under FSDP2 over both ranks, each on its half. Then it is saved and
loaded in each way that torch offers. The parent's tests judge what is written to ``OUT/<rank>.json``.
The entry point of bitsandbytes has applied the patches, unless ``PATCHES_AUTOLOAD=0``.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from bitsandbytes.utils import unpack_tensor_to_dict  # with this import the entry point runs
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import patches

OUT, MODEL = Path(sys.argv[1]), sys.argv[2]
Tensors = dict[str, torch.Tensor]
IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5))
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    answers: dict[str, Any] = {}
    try:
        for bits in ("4", "8"):
            answers[bits] = {"states": {r.id: str(r.status) for r in patches.check_ranks()}}
            run(rank, bits, answers[bits])
    finally:
        (OUT / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def run(rank: int, bits: str, answer: dict[str, Any]) -> None:
    attempt, load = partial(_attempt, answer), partial(_load, bits)
    whole = load(MODEL)
    optimizer = optimizer_of(whole)
    losses = [step(whole, optimizer, IDS) for _ in range(2)]
    reference = {k: v.clone() for k, v in whole.state_dict().items()}
    expected = logits(whole)

    model = shard(load(MODEL))
    answer["sharded types"] = sorted({type(p.data).__name__ for p in model.parameters()})
    optimizer = optimizer_of(model)
    if not attempt("train", lambda: answer.update(losses=[losses, train(model, optimizer)])):
        return
    answer["logits after training"] = difference(logits(model), expected)

    full = attempt("full state dict", lambda: get_model_state_dict(model, options=FULL))
    if rank == 0 and full:
        answer["keys"] = [sorted(full.keys() - reference.keys()), sorted(reference.keys() - full.keys())]
        answer["trained"] = max(difference(full[k], reference[k]) for k in full if "lora_" in k)
        answer["codes and statistics equal"] = all(
            k in full and same(k, full[k], reference[k]) for k in reference if "lora_" not in k
        )

    sharded = {"model": attempt("get_model_state_dict", lambda: get_model_state_dict(model))}
    sharded["optimizer"] = get_optimizer_state_dict(model, optimizer)
    attempt("save", lambda: dcp.save(sharded, checkpoint_id=OUT / bits) and None)

    trained = logits(model)
    fresh = shard(load(f"{MODEL}-other", seed=7))  # other codes, other statistics, other adapters
    answer["logits of another model"] = difference(logits(fresh), trained)
    fresh_optimizer = optimizer_of(fresh)
    attempt("load", lambda: load_checkpoint(OUT / bits, fresh, fresh_optimizer))
    answer["logits after load"] = difference(logits(fresh), trained)
    answer["next losses"] = [train(model, optimizer), train(fresh, fresh_optimizer)]

    if rank == 0 and full:
        alone = load(f"{MODEL}-other", seed=8)
        attempt("full into one process", lambda: alone.load_state_dict(full) and None)
        answer["logits in one process"] = difference(logits(alone), trained)

    everywhere: list[Any] = [full or {}]
    dist.broadcast_object_list(everywhere, src=0)
    again = shard(load(f"{MODEL}-other", seed=9))
    options = StateDictOptions(full_state_dict=True)
    attempt("full into sharded", lambda: set_model_state_dict(again, dict(everywhere[0]), options=options) and None)
    answer["logits from full"] = difference(logits(again), trained)

    last = shard(load(f"{MODEL}-other", seed=10))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    attempt("broadcast", lambda: set_model_state_dict(last, dict(full or {}), options=options) and None)
    answer["logits from broadcast"] = difference(logits(last), trained)

    cast = shard(load(MODEL), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    attempt("mixed precision", lambda: answer.update(cast=difference(logits(cast), logits(load(MODEL)))))


def _load(bits: str, path: str, seed: int = 1) -> torch.nn.Module:
    options = {"load_in_8bit": True}
    if bits == "4":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options["bnb_4bit_compute_dtype"] = torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**options)
    )
    model.config.use_cache = False
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora).train()


def shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two steps on this rank's half of the batch; the losses of the whole batch."""
    losses = torch.tensor([step(model, optimizer, IDS[dist.get_rank()][None]) for _ in range(2)])
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    into = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(into, checkpoint_id=folder)
    set_model_state_dict(model, into["model"])
    set_optimizer_state_dict(model, optimizer, into["optimizer"])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest value."""
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def same(name: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    if "bitsandbytes__" in name:  # JSON
        return unpack_tensor_to_dict(a) == unpack_tensor_to_dict(b)
    return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())


def _attempt(answer: dict[str, Any], name: str, run: Callable[[], Any]) -> Any:
    """The result, or None and the error in ``answer``. What it was that failed is for the tests to judge."""
    try:
        result = run()
        answer[name] = "ok"
        return True if result is None else result
    except (RuntimeError, AttributeError, ValueError, dcp.CheckpointException) as error:
        answer[name] = f"{type(error).__name__}: {error}"
        return None


if __name__ == "__main__":
    main()
