"""What ``patches.inspect()`` says will go wrong with weights does go wrong, and what it says to do helps."""

from __future__ import annotations

import re
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from packaging.version import Version

import patches
from patches.inspection import problems

from .inspected import dispatched, fine, llama, load, lora, loss, offloaded, only, trained


def test_every_patch_that_it_names_is_one():
    source = Path(problems.__file__).read_text()
    named = set(re.findall(r'"((?:bitsandbytes|transformers|peft|accelerate)-[a-z0-9-]+)"', source))
    assert len(named) >= 12 and named <= patches.REGISTRY.patches.keys()


def test_a_plain_weight_in_a_4_bit_layer():
    model = load(4, "tied", llm_int8_skip_modules=["none"])
    problem = only(model)
    assert problem.what.startswith("4-bit layers hold a plain weight") and problem.where == ("lm_head",)
    with pytest.raises(AssertionError):
        loss(model)
    model = load(4, "tied", llm_int8_skip_modules=["lm_head"])
    assert fine(model) and loss(model).isfinite()


def test_a_plain_weight_in_an_int8_layer_and_the_patch_for_it():
    model = load(8, "tied", llm_int8_skip_modules=["none"])
    problem = only(model)
    assert problem.where == ("lm_head",) and problem.patch == "bitsandbytes-int8-plain-weight"
    assert problem.status in ("available", "reverted"), "by a test before this one"
    assert f"repairs it; the patch is {problem.status} here." in " ".join(str(patches.inspect(model)).split())
    with pytest.raises(AttributeError, match="CB"):
        loss(model)
    with patches.applied(problem.patch):
        assert only(model).repaired and patches.inspect(model).problems == ()
        assert "no problems, and 1 that is repaired" in " ".join(str(patches.inspect(model)).split())
        assert loss(model).isfinite()


def test_layers_that_nobody_has_moved():
    four = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type="nf4"))
    assert "never quantized" in only(four).what and only(four).where == ("0",)
    with pytest.raises(AssertionError):
        four(torch.randn(2, 64))
    assert fine(four.to("cpu")) and four(torch.randn(2, 64)).isfinite().all()


def test_codes_without_their_scales():
    one, two = (bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu") for _ in range(2))
    weight = bnb.nn.Int8Params(one.weight.data, requires_grad=False, has_fp16_weights=False)
    two.weight = weight
    problem = only(two)
    assert problem.what.startswith("packed INT8 weights have no row scales") and "cannot be computed" in problem.remedy
    assert fine(one)


def test_4_bit_codes_without_their_statistics():
    one, two = (bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4").to("cpu") for _ in range(2))
    two.weight = torch.nn.Parameter(one.weight.data, requires_grad=False)
    two.quant_state = None
    problem = only(two)
    assert problem.what.startswith("packed 4-bit weights have no quantization state")
    with pytest.raises((AssertionError, AttributeError, ValueError)):
        two(torch.randn(2, 64))
    assert fine(one)


def test_statistics_that_went_to_meta():
    model = offloaded(load(4))
    problem = only(model)
    assert problem.patch == "bitsandbytes-params4bit-meta" and len(problem.where) == 14
    with pytest.raises(NotImplementedError, match="meta"):
        loss(model)
    with patches.applied(problem.patch):
        model = offloaded(load(4))
        assert fine(model) and loss(model).isfinite()


def test_offloaded_codes_that_stay_where_they_ran():
    model = offloaded(load(8))
    assert fine(model)
    with torch.no_grad(), patches.applied("accelerate-int8-offload-resident-weights"):
        loss(model)
        assert fine(model)
    model = offloaded(load(8))
    with torch.no_grad():
        loss(model)
    problem = only(model)
    assert problem.patch == "accelerate-int8-offload-resident-weights" and len(problem.where) == 14
    assert not model.model.layers[0].mlp.up_proj.state.CB.is_meta


def test_weights_that_nothing_brings():
    with torch.device("meta"):
        model = llama()
    assert "they have no values" in only(model).what and len(only(model).where) == 21
    assert fine(model.to_empty(device="cpu"))


def test_4_bit_weights_that_this_processor_has_packed(forked):
    if Version(bnb.__version__) < Version("0.49"):
        pytest.skip("before 0.49 bitsandbytes does not repack")
    said = forked(
        """
        import bitsandbytes, patches, torch
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
        layer.requires_grad_(False).eval()
        print(len(patches.inspect(layer).problems))
        layer(torch.randn(4, 64, dtype=torch.bfloat16))
        (problem,) = patches.inspect(layer).problems
        print(problem.patch, problem.status)
        """,
        PATCHES_TEST_PROCESSOR="emulated",
    )
    assert said.split("\n")[:2] == ["0", "bitsandbytes-cpu-repack available"]


def test_experts_that_were_not_quantized():
    model = load(4, "moe", torch.bfloat16)
    problem = only(model)
    experts = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
    assert problem.what.startswith("63% of the parameters are 3-D expert parameters")
    assert f"{2 * experts / 1000:.1f} kB of bfloat16" in problem.what and len(problem.where) == 2
    assert problem.patch == "transformers-experts-not-quantized"


def test_experts_that_were_made_float32():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.prepare_model_for_kbit_training(load(4, "moe", torch.bfloat16), use_gradient_checkpointing=False)
    problem = only(model)
    experts = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
    assert f"{4 * experts / 1000:.1f} kB of float32" in problem.what and "bf16=True" in problem.remedy
    assert problem.patch == "peft-upcasts-experts"


def test_float32_that_the_first_input_has_fixed():
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    layer.weight.data = layer.weight.data.bfloat16()
    layer.to("cpu")
    assert fine(layer)
    with patches.applied("bitsandbytes-matmul4bit-dtype-write"):  # 0.49 forgets what the weights were
        layer(torch.randn(2, 64))
    problem = only(layer)
    assert "by their first input" in problem.what and problem.patch == "bitsandbytes-linear4bit-compute-dtype"
    model = load(4, dtype=torch.bfloat16, bnb_4bit_compute_dtype=torch.float32)
    assert "the default of bnb_4bit_compute_dtype" in only(model).what and only(model).patch == ""
    assert fine(load(4, dtype=torch.bfloat16)) and fine(load(4))


@pytest.mark.parametrize(
    ("options", "patch", "tensors"),
    [
        ({}, "peft-adapters-on-meta", 4),
        ({"target_modules": ["q_proj"], "modules_to_save": ["layers.1.mlp"]}, "peft-modules-to-save-offloaded", 3),
    ],
)
def test_adapters_on_meta(options, patch, tensors):
    found = patches.inspect(lora(dispatched(llama()), **options)).facts.problems
    (problem,) = (problem for problem in found if problem.patch == patch)
    assert (
        problem.what.startswith("adapters of offloaded layers are on the meta device") and len(problem.where) == tensors
    )
    with patches.applied():
        model = lora(dispatched(llama()), **options).train()
        assert fine(model)
        loss(model).backward()
        assert fine(model) and all(p.grad is not None for p in trained(model))


def test_a_prompt_on_meta():
    import peft

    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    assert only(peft.get_peft_model(offloaded(llama()), config)).patch == "peft-adapters-on-meta"
    with patches.applied("peft-adapters-on-meta"):
        assert fine(peft.get_peft_model(offloaded(llama()), config))
