"""Image models are quantized and loaded on a machine that has only a CPU; elsewhere nothing changes."""

from __future__ import annotations

import pytest
import torch

import patches

from . import image_options

diffusers = pytest.importorskip("diffusers")

ID = "diffusers-quantizes-without-gpu"
BOTH = pytest.mark.parametrize("how", image_options.BOTH.values(), ids=image_options.BOTH)
only_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")


def from_pretrained(folder, how=None, **also):
    quantized = {} if how is None else {"quantization_config": diffusers.BitsAndBytesConfig(**how)}
    return diffusers.FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **quantized, **also)


@only_cpu
@BOTH
@pytest.mark.parametrize("also", [{}, {"device_map": "cpu"}], ids=["no map", "cpu"])
def test_it_is_the_model_that_a_machine_with_a_gpu_quantizes(flux, how, also):
    expected = image_options.load(flux, how)
    with patches.applied(ID):
        model = from_pretrained(flux, how, **also)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    for name, weight in image_options.packed(expected).items():
        assert torch.equal(model.get_parameter(name).data, weight)
    assert torch.equal(image_options.output(model), image_options.output(expected))


@only_cpu
@BOTH
def test_a_quantized_checkpoint_is_loaded(flux, how, tmp_path):
    expected = image_options.load(flux, how)
    expected.save_pretrained(tmp_path)
    with patches.applied(ID):
        model = from_pretrained(tmp_path)
    assert torch.equal(image_options.output(model), image_options.output(expected))


@only_cpu
@BOTH
def test_a_map_with_another_device_gives_the_same_error(flux, how):
    for place in ("cuda", 0, {"": "cuda:0"}, {"": 0}, {"": "cpu", "proj_out": torch.device("cuda")}):
        with pytest.raises(RuntimeError, match="No GPU found"), patches.applied(ID):
            from_pretrained(flux, how, device_map=place)


@BOTH
def test_another_accelerator_is_refused_as_before(flux, how, monkeypatch):
    for kind in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(kind, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="No GPU found"), patches.applied(ID):
        from_pretrained(flux, how)


@BOTH
def test_with_a_gpu_it_stays_the_default(how, monkeypatch):
    from diffusers.quantizers import DiffusersAutoQuantizer

    for kind, there in ((torch.cuda, True), (torch.xpu, False), (torch.mps, False), (torch.accelerator, True)):
        monkeypatch.setattr(kind, "is_available", lambda there=there: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with patches.applied(ID):
        quantizer = DiffusersAutoQuantizer.from_config(diffusers.BitsAndBytesConfig(**how), pre_quantized=False)
        quantizer.validate_environment(device_map=None)
        assert quantizer.update_device_map(None) == {"": "cuda:0"}
        assert quantizer.update_device_map({"": 1}) == {"": 1}


@only_cpu
@pytest.mark.skipif("int8" in image_options.BOTH, reason="for bitsandbytes before 0.48")
def test_int8_that_would_be_wrong_stays_refused(flux):
    with pytest.raises(RuntimeError, match="No GPU found"), patches.applied(ID):
        from_pretrained(flux, image_options.INT8)


def test_a_machine_whose_gpu_is_not_found_is_told_once(flux, caplog):
    from diffusers import BitsAndBytesConfig, FluxTransformer2DModel

    from patches.repairs.diffusers import quantizes_without_gpu

    def load(**options):
        config = BitsAndBytesConfig(**image_options.NF4)
        FluxTransformer2DModel.from_pretrained(flux, quantization_config=config, torch_dtype=torch.bfloat16, **options)

    quantizes_without_gpu._tell.cache_clear()
    with patches.applied(ID), caplog.at_level("WARNING", "bnb_patches"):
        load(device_map="cpu")
        assert not caplog.records
        load()
        load()
    (record,) = caplog.records
    assert "finds no accelerator" in record.getMessage()
