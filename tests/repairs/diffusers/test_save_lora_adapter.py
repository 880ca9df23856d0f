"""The adapter of a quantized image model is saved; the model stays as it is."""

from __future__ import annotations

import pytest
import torch

import patches

from . import image_options

safetensors_torch = pytest.importorskip("safetensors.torch")
peft = pytest.importorskip("peft")

ID = "diffusers-save-lora-adapter"
FILE = "pytorch_lora_weights.safetensors"


def adapted(flux, how, **lora):
    model = image_options.load(flux, how)
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["to_k"], **lora}))
    return model


def state(model):
    return {name: (tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)
@pytest.mark.parametrize("upcast", [False, True], ids=["as it is", "upcast"])
def test_the_file_holds_the_adapter_and_the_model_is_unchanged(flux, tmp_path, how, upcast):
    model = adapted(flux, how)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    before = state(model)
    with patches.applied(ID):
        model.save_lora_adapter(tmp_path, upcast_before_saving=upcast)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(before[name][0] is after[name][0] and torch.equal(before[name][1], after[name][1]) for name in before)
    saved = safetensors_torch.load_file(tmp_path / FILE)
    assert len(saved) == 4 and {tensor.dtype for tensor in saved.values()} == {
        torch.float32 if upcast else torch.bfloat16
    }
    for name, tensor in saved.items():
        own = name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
        assert torch.equal(tensor, before[own][1].to(tensor.dtype))


@pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)
def test_another_model_computes_the_same_with_it(flux, tmp_path, how):
    model, other = adapted(flux, how), image_options.load(flux, how)
    base = image_options.output(image_options.load(flux, how))
    with patches.applied(ID):
        model.save_lora_adapter(tmp_path)
    other.load_lora_adapter(tmp_path, prefix=None, weight_name=FILE)
    expected = image_options.output(model)
    assert torch.equal(image_options.output(other), expected) and not torch.equal(expected, base)


def test_packed_bytes_of_a_floating_dtype_are_not_cast(flux, tmp_path):
    how = {**image_options.NF4, "bnb_4bit_quant_storage": torch.bfloat16}
    model = adapted(flux, how, modules_to_save=["x_embedder"])
    weight = model.x_embedder.modules_to_save["default"].weight
    with patches.applied(ID):
        model.save_lora_adapter(tmp_path, upcast_before_saving=True)
    saved = safetensors_torch.load_file(tmp_path / FILE)
    assert saved["x_embedder.weight"].dtype is torch.bfloat16
    assert torch.equal(saved["x_embedder.weight"].view(torch.int16), weight.data.view(torch.int16))
    assert saved["x_embedder.bias"].dtype is torch.float32


@pytest.mark.parametrize("upcast", [False, True], ids=["as it is", "upcast"])
def test_a_model_that_is_not_quantized_is_saved_as_before(flux, tmp_path, upcast):
    def save(folder):
        model = adapted(flux, None)
        model.save_lora_adapter(folder, upcast_before_saving=upcast)
        return model.dtype, safetensors_torch.load_file(folder / FILE)

    expected_dtype, expected = save(tmp_path / "unpatched")
    with patches.applied(ID):
        dtype, saved = save(tmp_path / "patched")
    assert dtype is expected_dtype and saved.keys() == expected.keys()
    assert all(saved[name].dtype is expected[name].dtype and torch.equal(saved[name], expected[name]) for name in saved)
