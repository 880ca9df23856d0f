"""UniLora on quantized layers, against the same adapter on the weights that these stand for."""

from __future__ import annotations

import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import patches
from patches.engine.gate import satisfied
from tests.repairs.peft.stood_for import X, gradients, models, relative_error

ID = "peft-unilora-scales"

if satisfied("peft<0.20"):
    pytest.skip("peft has UniLora from 0.20 on", allow_module_level=True)


def with_adapter(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    torch.manual_seed(1)
    config = peft.UniLoraConfig(r=4, theta_d_length=128, target_modules=["0", "2"])
    return peft.get_peft_model(model, config, **options).train()


def parts(model: torch.nn.Module) -> list[torch.Tensor]:
    """The scales of all layers."""
    return [b for name, b in model.named_buffers() if "unilora_scales" in name]


@pytest.mark.parametrize("bits", [8, 4])
def test_without_the_patch_nothing_is_learned(bits):
    model = with_adapter(models(bits)[0])
    x_grad, vector_grad = gradients(model)
    assert x_grad.count_nonzero() and not vector_grad.count_nonzero()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("which", ["alone", "all"])
def test_it_trains_as_on_the_weights_that_are_stood_for(bits, which):
    model, plain = models(bits)
    with patches.applied(*([ID] if which == "alone" and satisfied("bitsandbytes>=0.48") else [])):
        model, plain = with_adapter(model), with_adapter(plain)
        optimizers = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (model, plain)
        ]
        first = relative_error(model(X), plain(X))
        before = plain(X).detach()
        for _ in range(3):
            for trained, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                gradients(trained)
                optimizer.step()
        assert first < 0.02 and relative_error(model(X), plain(X)) < 0.02
        assert relative_error(plain(X), before) > 0.2, "it has learned something"


@pytest.mark.parametrize("bits", [8, 4])
def test_the_scales_are_those_of_the_unquantized_model(bits):
    model, plain = models(bits)
    with patches.applied(ID):
        found, expected = parts(with_adapter(model)), parts(with_adapter(plain))
    assert len(found) == 4
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unquantized_layers_are_bit_identical(dtype):
    plain = models(8)[1].to(dtype)
    x = X.to(dtype)
    unpatched = with_adapter(copy.deepcopy(plain))
    with patches.applied(ID):
        patched = with_adapter(plain)
        assert [p.dtype for p in parts(patched)] == [p.dtype for p in parts(unpatched)]
        assert all(map(torch.equal, parts(patched), parts(unpatched)))
        assert torch.equal(patched(x), unpatched(x))


def test_floating_point_storage_is_bit_identical():
    if satisfied("bitsandbytes<0.47"):
        pytest.skip("before 0.47 a CPU dequantizes from uint8 storage only")

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        layer = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4", quant_storage=torch.bfloat16)
        return with_adapter(torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(64, 64)).to("cpu"))

    unpatched = made()
    with patches.applied(ID):
        patched = made()
        assert all(map(torch.equal, parts(patched), parts(unpatched)))
        assert torch.equal(patched(X), unpatched(X))


@pytest.mark.parametrize("bits", [8, 4])
def test_in_half_precision_throughout(bits):
    model = models(bits)[0]
    with patches.applied():
        model = with_adapter(model, autocast_adapter_dtype=False).to(torch.bfloat16)
        x = X.bfloat16().requires_grad_()
        model(x).float().square().sum().backward()
        (vector,) = (p for p in model.parameters() if p.requires_grad)
        assert vector.dtype == torch.bfloat16 and vector.grad.count_nonzero() > 100


@pytest.mark.parametrize("bits", [8, 4])
def test_a_saved_adapter_gives_the_same_outputs(bits, tmp_path):
    with patches.applied():
        model = with_adapter(models(bits)[0]).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1)
        expected = model(X)
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(models(bits)[0], tmp_path).eval()
        assert torch.equal(again(X), expected)


def test_adapters_that_were_put_on_before_are_reported():
    gc.collect()
    model = with_adapter(models(4)[0])
    with patches.applied(ID) as report:
        (note,) = report[ID].notes
    assert note.startswith("2 UniLora layers") and "add the adapter again" in note
    del model
    with patches.applied(ID) as report:
        assert not report[ID].notes
