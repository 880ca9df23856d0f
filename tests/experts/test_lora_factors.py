"""LoRA on experts in 4 bits through ``target_parameters``, against the same model with experts rounded in floating point."""

from __future__ import annotations

import warnings
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import patches
from patches.engine.gate import satisfied

if satisfied("transformers<5") or satisfied("peft<0.19"):
    pytest.skip(
        "experts are parameters from transformers 5 on, which peft adapts from 0.19 on", allow_module_level=True
    )

from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from patches.experts.dense_operations import COUNTS
from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts
from patches.experts.tensor import Experts4bit, as_parameter
from tests.experts.models import loaded, rounded, saved

pytestmark = pytest.mark.one_in(2)

ID = "torch-quantized-experts"
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]
EXPERTS, WIDTH = 8, 64
IDS = torch.arange(24)[None] % 32


def pair(kind="eager", dtype=torch.float32, double=False, layers=2, experts=EXPERTS):
    """A mixture whose experts are rounded in floating point, and one that holds them in 4 bits."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=WIDTH, moe_intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=kind) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for plain, quantized in zip(*(model.model.layers for model in models), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(plain.mlp.experts, name)
            four = split_and_quantize_experts(
                parameter.data, 2 if name == "gate_up_proj" else 1, QuantizationConfig("nf4", double, torch.uint8)
            )
            setattr(quantized.mlp.experts, name, as_parameter(four, dtype))
            parameter.data = getattr(quantized.mlp.experts, name).dequantize()
    return models


def with_lora(model, seed=1, **options):
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(target_parameters=TARGETS, **options)).train()


def step(model):
    """Loss and gradients of all that trains, by name."""
    torch.manual_seed(2)
    result = model(input_ids=IDS, labels=IDS)
    result.loss.backward()
    return {"loss": result.loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}}


def gap(got, expected):
    assert got.keys() == expected.keys() and all(tensor is not None for tensor in got.values())
    return max(float((got[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def off(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def nothing_goes_dense(request):
    """No test here makes all experts of a layer dense, but for the one that shows it."""
    COUNTS.clear()
    yield
    assert bool(COUNTS) == ("dense" in request.node.name), dict(COUNTS)


def test_without_the_patch_it_goes_dense():
    step(with_lora(pair(layers=1)[1]))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_it_trains_what_floating_point_trains(kind, checkpointing):
    plain, quantized = pair(kind, double=checkpointing)
    with patches.applied(ID):
        models = [with_lora(plain), with_lora(quantized)]
        for model in models:
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
        expected, got = map(step, models)
        assert len(got) == 1 + 2 * 2 * 3, "A and B of two parameters of experts and q_proj, in two layers"
        assert gap(got, expected) < 2e-6


def test_parameters_that_something_refers_to_weakly():
    """As torch.compile does: torch would exchange each parameter with itself, which it refuses then."""
    with patches.applied(ID):
        model = with_lora(pair(layers=1)[1])
        held = [weakref.ref(parameter) for parameter in model.parameters()]
        step(model)
        assert all(reference() is not None for reference in held)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_in_bfloat16_it_is_no_less_exact_than_floating_point(kind, autocast):
    with patches.applied(ID):
        truth = step(with_lora(pair(kind)[0].to(torch.bfloat16).float()))
        plain, quantized = pair(kind, torch.bfloat16)
        expected, got = [], []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for model, found in ((plain, expected), (quantized, got)):
                found.append(step(with_lora(model)))
        assert got[0].keys() == expected[0].keys()
        assert {n: t.dtype for n, t in got[0].items()} == {n: t.dtype for n, t in expected[0].items()}
        for name in (n for n in truth if "experts" in n):
            mine, theirs = (off(found[0][name].float(), truth[name]) for found in (got, expected))
            assert mine < 1.5 * theirs + 0.02, name


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_no_step_makes_a_tensor_of_the_size_of_all_experts(kind):
    """The largest allocation in a step, against the experts of one parameter in floating point."""
    quantized = pair(kind, layers=1, experts=64)[1]
    with patches.applied(ID):
        model = with_lora(quantized, r=1, target_modules=[])
        with torch.profiler.profile(profile_memory=True) as seen:
            step(model)
    whole = quantized.get_base_model() if hasattr(quantized, "get_base_model") else quantized
    size = next(p for p in whole.parameters() if isinstance(p, Experts4bit)).numel() * 4
    largest = max(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    assert largest < size / 8, f"{largest} of {size} bytes"


def test_after_revert_a_merged_model_runs_merging_says_what_to_do_and_lora_goes_dense():
    quantized = pair(layers=1)[1]
    with patches.applied(ID), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = with_lora(quantized, target_modules=[])
        before = logits(model)
        model.merge_adapter()
        merged = logits(model)
        other = with_lora(pair(layers=1)[1], target_modules=[])
    assert torch.equal(logits(model), merged)
    with pytest.raises(RuntimeError, match=r"torch-quantized-experts: call patches.apply\(\) before"):
        other.merge_adapter()
    assert off(logits(other), before) < 2e-6, "nothing was merged"
    with patches.applied(ID):
        model.unmerge_adapter()
        assert torch.equal(logits(model), before)


@pytest.mark.skipif(satisfied("peft<0.20"), reason="peft before 0.20 has one adapter with target_parameters")
def test_several_adapters(tmp_path):
    with patches.applied(ID):
        results = []
        for base in pair():
            model = with_lora(base)
            torch.manual_seed(5)
            other = peft.LoraConfig(
                r=2, use_rslora=True, target_parameters=TARGETS, init_lora_weights=False, target_modules=["q_proj"]
            )
            model.add_adapter("other", other)
            found = {"first": logits(model)}
            model.base_model.set_adapter(["default", "other"])
            found["both"] = logits(model)
            model.set_adapter("other")
            found["other"] = logits(model)
            with model.disable_adapter():
                found["none"] = logits(model)
            model.delete_adapter("default")
            found["deleted"] = logits(model)
            model.save_pretrained(tmp_path / str(len(results)))
            results.append(found)
        expected, got = results
        assert gap(got, expected) < 2e-6
        assert off(got["both"], got["other"]) > 1e-3 < off(got["first"], got["none"])
        assert torch.equal(got["deleted"], got["other"])
        read = [logits(peft.PeftModel.from_pretrained(pair()[1], tmp_path / f"{i}" / "other")) for i in range(2)]
        assert torch.equal(*read) and torch.equal(read[0], got["other"]), "saved by either model, loaded in 4 bits"


@pytest.mark.parametrize("double", [False, True])
def test_a_merge_quantizes_the_sum_and_unmerging_puts_back_what_was(double):
    plain, quantized = pair(double=double)
    with patches.applied(ID), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experts = quantized.model.layers[0].mlp.experts
        before = {n: t.clone() for n, t in experts.down_proj.packed.tensors().items()}
        reference, model = with_lora(plain, target_modules=[]), with_lora(quantized, target_modules=[])
        reference.merge_adapter()
        for safe in (False, True):
            model.merge_adapter(safe_merge=safe)
            for name in ("gate_up_proj", "down_proj"):
                rounded = split_and_quantize_experts(
                    getattr(plain.model.layers[0].mlp.experts.base_layer.base_layer, name).data,
                    2 if name == "gate_up_proj" else 1, QuantizationConfig("nf4", double, torch.uint8),
                )  # fmt: skip
                same = getattr(experts, name).packed.tensors()["codes_0"] == rounded.tensors()["codes_0"]
                assert same.float().mean() > 0.999, "but for sums between two codes"
            with model.disable_adapter():  # unmerges
                logits(model)
            assert all(torch.equal(t, before[n]) for n, t in experts.down_proj.packed.tensors().items())
        merged = logits(model.merge_and_unload())
        assert isinstance(experts.down_proj, Experts4bit) and off(merged, logits(reference)) < 0.2


def test_an_adapter_that_is_broken_is_not_merged():
    quantized = pair(layers=1)[1]
    with patches.applied(ID), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = with_lora(quantized)
        experts = quantized.model.layers[0].mlp.experts.get_base_layer()
        before = {n: t.clone() for n, t in experts.down_proj.packed.tensors().items()}
        model.base_model.model.model.layers[0].mlp.experts.lora_A["default"].weight.data[0] = float("nan")
        with pytest.raises(ValueError, match="seems to be broken"):
            model.merge_adapter(safe_merge=True)
        assert all(torch.equal(t, before[n]) for n, t in experts.down_proj.packed.tensors().items())


def test_experts_in_floating_point_are_as_before():
    expected = step(with_lora(pair()[0]))
    with patches.applied(ID):
        got = step(with_lora(pair()[0]))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4"])
def test_it_trains_other_architectures(kind, tmp_path):
    """gpt-oss: transposed, with biases. Llama 4: one product of all experts."""
    saved(tmp_path, kind)
    ends = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    results = []
    with patches.applied(ID):
        for prepare in (rounded, patches.quantize_experts):
            torch.manual_seed(1)
            options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
            config = peft.LoraConfig(target_parameters=ends, **options)
            results.append(step(peft.get_peft_model(prepare(loaded(tmp_path)), config).train()))
    assert gap(results[1], results[0]) < 5e-6
    assert sum("experts" in name for name in results[0]) == 2 * 2 * 2
