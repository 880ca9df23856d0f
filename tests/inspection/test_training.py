"""What ``patches.inspect()`` says will go wrong in training does go wrong, and what it says to do helps."""

from __future__ import annotations

import os
import warnings

import bitsandbytes as bnb
import pytest
import torch
from packaging.version import Version

import patches
from tests.processor import ROOT

from .inspected import fine, llama, load, lora, loss, only, trained


def test_a_merged_adapter_that_trains():
    model = lora(llama()).train()
    model.merge_adapter()
    problem = only(model)
    assert "it gets no gradient" in problem.what and len(problem.where) == len(trained(model)) == 8
    assert not loss(model).requires_grad
    model.unmerge_adapter()
    assert fine(model) and loss(model).requires_grad


def test_adapters_of_which_none_trains(tmp_path):
    import peft

    lora(llama()).save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(llama(), tmp_path)
    assert "no parameter requires grad" in only(model).what and "is_trainable=True" in only(model).remedy
    assert fine(peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True))


class Branches(torch.nn.Module):
    """One of them is not on the way to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.unused(x)
        return self.used(x) + y


def test_what_got_no_gradient_now_and_after_zero_grad():
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters())
    assert fine(model, optimizer), "before the first backward nothing has one"
    model(torch.randn(2, 4)).sum().backward()
    problem = only(model)
    assert problem.where == ("unused.weight", "unused.bias") and "in the last backward" in problem.what
    optimizer.step()
    optimizer.zero_grad()
    assert fine(model), "alone it cannot know"
    assert only(model, optimizer).where == problem.where and "in any step" in only(model, optimizer).what


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_is_on_and_idle_in_eval_mode(reentrant):
    model = llama().eval()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model = lora(model)
    found = patches.inspect(model)
    assert found.facts.checkpointing.layers == 2
    assert found.facts.checkpointing.kind == ("reentrant" if reentrant else "non-reentrant")
    problem = only(model)
    assert "they are in eval mode" in problem.what and problem.patch == "transformers-checkpointing-in-eval"
    assert not model.base_model.model.model.layers[0].training
    assert fine(model.train())


def test_reentrant_checkpointing_without_inputs_that_require_grad():
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.requires_grad_(True)
    model.train()
    if fine(model):  # newer transformers make the inputs require grad by themselves
        model.disable_input_require_grads()
    problem = only(model)
    assert "nothing makes the inputs" in problem.what and "enable_input_require_grads" in problem.remedy
    assert not loss(model).requires_grad
    model.enable_input_require_grads()
    assert fine(model)
    loss(model).backward()
    assert fine(model) and all(p.grad is not None for p in trained(model))


def test_the_hook_of_peft_is_one_too():
    from peft import prepare_model_for_kbit_training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prepare_model_for_kbit_training(load(4), gradient_checkpointing_kwargs={"use_reentrant": True})
    model = lora(model).train()
    assert fine(model)
    loss(model).backward()
    assert all(p.grad is not None for p in trained(model))


def test_float16_under_an_8_bit_optimizer():
    model = llama().half()
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    assert "with an 8-bit optimizer" in only(model, optimizer).what
    assert "an 8-bit" not in only(model, torch.optim.AdamW(model.parameters())).what
    weight = next(model.parameters()).detach()
    updated = (weight.float() * (1 + 2e-4)).half()
    assert torch.equal(updated[weight.abs() > 1e-3], weight[weight.abs() > 1e-3]), "0.02 % is rounded away"
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.lm_head(torch.randn(2, 64).half()).float().sum()).backward()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(optimizer)
    assert fine(llama().bfloat16())


def test_an_optimizer_that_was_made_too_early():
    model = llama()
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model = lora(model)
    problem = only(model, optimizer)
    assert problem.where == tuple(n for n, p in model.named_parameters() if p.requires_grad)
    assert "8 parameters require grad and are not in the optimizer" in problem.what
    other = torch.optim.SGD(llama().parameters())
    assert "updates 21 parameters that are not in the model" in patches.inspect(model, other).problems[0].what
    assert fine(model, bnb.optim.AdamW8bit(trained(model)))


SHARDED = """
import bitsandbytes, patches, torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from tests.inspection.inspected import load, lora, loss, trained

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = distributed.init_device_mesh("cpu", (1,))


def said(model, optimizer):
    return [problem.what for problem in patches.inspect(model, optimizer).problems]


with patches.applied():
    for options in ({"bits": 4, "bnb_4bit_quant_storage": torch.float32}, {"bits": 8}):
        model = lora(load(**options))
        whole = {line.kind: (line.bytes, line.statistics) for line in patches.inspect(model).facts.layers}
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert {line.kind: (line.bytes, line.statistics) for line in patches.inspect(model).facts.layers} == whole
        optimizer = bitsandbytes.optim.AdamW(trained(model), lr=0)
        loss(model).backward()
        fails = ["an optimizer of bitsandbytes updates 8 sharded tensors (FSDP2): step() raises an error"]
        assert said(model, bitsandbytes.optim.LAMB(trained(model))) == fails
        assert said(model, optimizer) == []
        optimizer.step()
        optimizer = bitsandbytes.optim.AdamW(trained(model), lr=0)
        patches.revert("bitsandbytes-steps-on-shards")
        assert said(model, optimizer) == fails
        try:
            optimizer.step()
        except (NotImplementedError, RuntimeError):
            print(options["bits"])
        patches.apply("bitsandbytes-steps-on-shards")
"""


def test_a_sharded_model_and_an_optimizer_that_can_step_it_or_not(forked):
    if Version(bnb.__version__) < Version("0.50"):
        pytest.skip("before 0.50 the optimizers of bitsandbytes have no kernels for a CPU, sharded or not")
    assert forked(SHARDED, PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}").split() == ["4", "8"]
