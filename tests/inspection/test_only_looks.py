"""``patches.inspect()`` changes nothing, imports nothing, refuses what is no model, and keeps nobody waiting."""

from __future__ import annotations

import time
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from packaging.version import Version

import patches

from .inspected import dispatched, llama, load, lora, loss, moe, offloaded, trained


def everything(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """The identity of all that hangs on a model, how often each tensor was written, and the generators."""
    tensors = [*model.parameters(), *model.buffers()]
    modules = {name: {key: id(value) for key, value in vars(m).items()} for name, m in model.named_modules()}
    inside = {
        (name, key): list(value) if not isinstance(value, dict) else [(k, id(v)) for k, v in value.items()]
        for name, m in model.named_modules()
        for key, value in vars(m).items()
        if isinstance(value, dict | list | set)
    }
    return {
        "modules": modules,
        "inside": inside,
        "tensors": [
            (id(t), t._version, t.device, t.dtype, id(t.grad), t.requires_grad, sorted(vars(t))) for t in tensors
        ],
        "random": torch.get_rng_state().tolist(),
        "state": {id(p): {k: id(v) for k, v in s.items()} for p, s in optimizer.state.items()} if optimizer else {},
        "mode": (torch.is_grad_enabled(), torch._C._is_torch_function_enabled()),
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: lora(load(4), modules_to_save=["lm_head"]),
        lambda: lora(load(8)),
        lambda: load(4, "moe"),
        lambda: load(8, "tied", llm_int8_skip_modules=["none"]),
        lambda: lora(dispatched(load(8))),
        lambda: offloaded(llama()),
        lambda: torch.compile(llama()),
        moe,
    ],
    ids=["4-bit LoRA", "INT8 LoRA", "4-bit MoE", "INT8 tied", "INT8 on disk", "offloaded", "compiled", "MoE"],
)  # fmt: skip
def test_it_changes_nothing(make):
    model = make()
    before = everything(model)
    found = patches.inspect(model)
    str(found), found._repr_html_(), found.to_json(), repr(found)
    assert everything(model) == before
    assert not patches.report().with_status(patches.Status.APPLIED)


def test_it_changes_nothing_of_a_step():
    model = lora(load(4)).train()
    kind = bnb.optim.AdamW8bit if Version(bnb.__version__) >= Version("0.50") else torch.optim.AdamW  # on a CPU
    optimizer = kind(trained(model)[:3])
    loss(model).backward()
    optimizer.step()
    before = everything(model, optimizer)
    patches.inspect(model, optimizer)
    assert everything(model, optimizer) == before


def test_it_imports_nothing(fresh):
    said = fresh(
        """
        import sys
        import patches
        try:
            patches.inspect(3)
        except TypeError as error:
            print(error, "torch" in sys.modules)
        import torch
        torch.nn.Linear(2, 2)  # what torch imports by itself on a first use
        before = set(sys.modules)
        print(patches.inspect(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(3, 4))))
        print(sorted(name for name in set(sys.modules) - before if not name.startswith("bnb_patches.")))
        """,
        COLUMNS="120",
    ).splitlines()
    assert said[0] == "patches.inspect: model must be a torch.nn.Module, not int False"
    assert said[-1] == "[]", "nor any of the libraries that it knows"
    assert any("Embedding" in line and "48 B" in line for line in said)


@pytest.mark.parametrize("model", [None, "a model", {}, torch.nn.Linear, torch.zeros(2), 3])
def test_what_is_no_model_is_a_type_error_that_says_what_it_is(model):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not (the class )?\w+"):
        patches.inspect(model)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Adam, torch.nn.Linear(2, 2), [torch.zeros(2)]])
def test_what_is_no_optimizer_is_a_type_error(optimizer):
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not (the class )?\w+"):
        patches.inspect(torch.nn.Linear(2, 2), optimizer)


def test_the_smallest_models():
    assert "0 parameters" in str(patches.inspect(torch.nn.Module()))
    assert "1 layer, 24 B, 6 parameters" in str(patches.inspect(torch.nn.Linear(2, 2)))
    lazy = torch.nn.LazyLinear(4)
    assert patches.inspect(lazy).facts.layers[0].bytes == 0, "a parameter without a shape has no size yet"


@pytest.mark.parametrize("layers", [20, pytest.param(300, marks=pytest.mark.release("twenty layers"))])
def test_each_layer_of_a_large_model_is_counted(capsys, layers):
    """How long it takes is printed, not asserted: ``-s`` shows it."""
    with torch.device("meta"):
        model = llama(layers)
    for name, module in list(model.model.named_modules()):
        if type(module) is torch.nn.Linear:
            layer = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, quant_type="nf4", device="cpu"
            ).to("cpu")
            model.model.set_submodule(name, layer)
    model = lora(model.to_empty(device="cpu") if any(p.is_meta for p in trained(model)) else model)
    clock, processor = time.perf_counter(), time.process_time()
    found = patches.inspect(model)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    with capsys.disabled():
        print(
            f"\n{layers} layers, {len(list(model.modules()))} modules: {clock:.2f} s, {processor:.2f} s of the processor"
        )
    assert sum(line.count for line in found.facts.layers) == layers * 9 + 3
