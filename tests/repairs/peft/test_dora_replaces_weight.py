"""DoRA on INT8 layers: trained, merged, saved and loaded as the layer's own product and scales say."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.engine.gate import satisfied

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ID = "peft-dora-replaces-weight"
REPAIRED = pytest.mark.skipif(
    not satisfied("bitsandbytes!=0.47.0,!=0.48.0"),
    reason="this release keeps its scales all the same: not repaired there",
)

LAYERS = {
    "int8-0": lambda: bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False),
    "int8-6": lambda: bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False, threshold=6.0),
    "nf4": lambda: bnb.nn.Linear4bit(64, 48, quant_type="nf4", compute_dtype=torch.float32),
    "plain": lambda: torch.nn.Linear(64, 48),
}


def base_of(kind: str, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    base = torch.nn.Sequential(LAYERS[kind]()).to(device)
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = kind.startswith("int8"), kind == "nf4"
    return base.requires_grad_(False)


def dora_on(base: torch.nn.Module, **options) -> torch.nn.Module:
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["0"], "use_dora": True, "init_lora_weights": False, **options}
    return peft.get_peft_model(base, peft.LoraConfig(**options)).train()


def inputs(device: str) -> torch.Tensor:
    torch.manual_seed(2)
    x = torch.randn(2, 3, 64, device=device)
    x[..., 5] *= 10  # an outlier column, for the threshold
    return x


def steps(call, model: torch.nn.Module, x: torch.Tensor, count: int = 3) -> list[torch.Tensor]:
    """Outputs, input gradients and adapter gradients of ``count`` steps of SGD."""
    found = []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    for _ in range(count):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().mean().backward()
        found += [y.detach(), leaf.grad, *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_hand(model: torch.nn.Module, weight: torch.Tensor):
    """DoRA (arXiv 2402.09353, eq. 5) on the product of the base layer, with a weight that nobody touches."""
    layer = model.base_model.model[0]
    A, B = layer.lora_A["default"], layer.lora_B["default"]
    base, scaling = layer.base_layer, layer.scaling["default"]
    m = layer.lora_magnitude_vector["default"].weight

    def call(x: torch.Tensor) -> torch.Tensor:
        delta = B(A(torch.eye(64, device=x.device))).T
        norm = torch.linalg.norm(weight + scaling * delta.detach(), dim=1).detach()
        result, factor = base(x), (m / norm).view(1, -1)
        return result + ((factor - 1) * (result - base.bias) + factor * B(A(x)) * scaling)

    return call


@pytest.mark.parametrize("kind", ["int8-0", "int8-6"])
def test_trained_as_by_hand(kind, device):
    """No difference at all: the same product of the same packed weights, the norm of the same weight."""
    x = inputs(device)
    with patches.applied(ID):
        base = base_of(kind, device)
        packed, scales = base[0].weight.data.clone(), base[0].weight.SCB.clone()
        weight = bnb.functional.int8_vectorwise_dequant(packed, scales)
        model = dora_on(base)
        expected = steps(by_hand(model, weight), model, x)
        model = dora_on(base_of(kind, device))
        got = steps(model, model, x)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("kind", ["int8-0", "int8-6"])
def test_trained_as_the_dequantized_model(kind, device):
    """Against ``nn.Linear``, dequantized. Before 0.48, and on a GPU, inputs are rounded too."""
    x = inputs(device)
    with patches.applied(ID):
        base = base_of(kind, device)
        reference = base_of("plain", device)
        dequantized = bnb.functional.int8_vectorwise_dequant(base[0].weight.data, base[0].weight.SCB)
        reference[0].load_state_dict({"weight": dequantized, "bias": base[0].bias})
        reference, model = dora_on(reference), dora_on(base)
        expected, got = steps(reference, reference, x), steps(model, model, x)
    rounds = device != "cpu" or satisfied("bitsandbytes<0.48")
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))
    assert error < (3e-2 if rounds else 1e-5), error


@REPAIRED
@pytest.mark.parametrize("kind", ["int8-0", "int8-6", "nf4"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_weight_stays_the_same_parameter(kind, dropout, device):
    with patches.applied(ID):
        model = dora_on(base_of(kind, device), lora_dropout=dropout)
        layer, x = model.base_model.model[0].base_layer, inputs(device)
        before = layer.weight
        steps(model, model, x, count=1)
        assert layer.weight is before
        model.eval()(x)
        assert layer.weight is before


@REPAIRED
def test_packed_weights_that_were_replaced_before_the_first_forward_count(device):
    """``weight.data`` is new and ``weight.CB`` is not: a parameter that ``to`` makes has both from the data."""
    if device != "cpu":
        pytest.skip("peft moves no weight that is on a GPU, and there `weight.CB` counts, with and without the patch")
    x = inputs(device)
    with patches.applied(ID):
        base = base_of("int8-0", device)
        expected = 2 * base[0].bias - base_of("int8-0", device).eval()(x)
        base[0].weight.data = -base[0].weight.data
        model = dora_on(base, init_lora_weights=True).eval()
        got = model(x).detach()
    assert float((got - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("kind", ["nf4", "plain"])
def test_other_layers_train_to_the_bit_as_before(kind, device):
    x = inputs(device)
    model = dora_on(base_of(kind, device))
    expected = steps(model, model, x)
    with patches.applied(ID):
        model = dora_on(base_of(kind, device))
        got = steps(model, model, x)
    assert all(map(torch.equal, got, expected))


def test_merged_and_unmerged_weights_are_those_of_dora(device):
    """Both quantize anew: no element is off by more than half a step of its row, in float16."""

    def weight_and_half_step() -> tuple[torch.Tensor, torch.Tensor]:
        state, weight = layer.base_layer.state, layer.base_layer.weight
        scales = weight.SCB if state.SCB is None else state.SCB
        return bnb.functional.int8_vectorwise_dequant(weight.data, scales), 0.51 * scales.view(-1, 1) / 127

    with patches.applied(ID):
        model, x = dora_on(base_of("int8-0", device)), inputs(device)
        steps(model, model, x)
        layer = model.base_model.model[0]
        before, _ = weight_and_half_step()
        delta = layer.get_delta_weight("default")
        factor = layer.lora_magnitude_vector["default"].weight / (before + delta).norm(dim=1)
        factor = factor.detach().view(-1, 1)
        expected = factor * (before + delta)
        model.merge_adapter()
        model.eval()(x)
        merged, lost = weight_and_half_step()
        assert bool(((merged - expected).abs() <= lost + 1e-3 * expected.abs()).all())
        model.unmerge_adapter()
        after, lost_again = weight_and_half_step()
        assert bool(((after - before).abs() <= lost / factor + lost_again + 1e-4).all())
        model.train()
        assert all(t.isfinite().all() for t in steps(model, model, x))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen2, whose attention has biases, in bfloat16 on disk."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    folder = str(tmp_path_factory.mktemp("qwen2"))
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def loaded(folder: str, **options) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": torch.device("cpu")}, **options
    )
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def quantized(folder: str) -> torch.nn.Module:
    return loaded(folder, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(8).view(2, 4), use_cache=False).logits


def test_a_model_is_trained_saved_loaded_and_merged(saved, tmp_path):
    """With ``int8-requantized-codes``, without which 0.46 and 0.47 load an INT8 checkpoint wrongly."""
    config = peft.LoraConfig(
        r=2, target_modules="all-linear", use_dora=True, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    ids = torch.arange(8).view(2, 4)
    with patches.applied(ID, "bitsandbytes-int8-scales-lost-on-offload"):
        base = quantized(saved)
        without = logits(base)
        model = peft.get_peft_model(base, config).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        losses = []
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        trained = logits(model)
        with model.disable_adapter():
            assert torch.equal(logits(model), without)
        model.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(quantized(saved), tmp_path / "adapter")
        assert torch.equal(logits(again), trained)
        merged = model.merge_and_unload()
        expected = logits(merged)
        assert float((expected - trained).norm() / trained.norm()) < 0.1
        merged.save_pretrained(tmp_path / "merged")
        assert torch.equal(logits(loaded(tmp_path / "merged")), expected)
        assert torch.equal(logits(merged), expected), "saving changed the model"
