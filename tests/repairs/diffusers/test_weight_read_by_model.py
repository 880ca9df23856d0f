"""Layers whose weight an image model reads stay in floating point, and only these."""

from __future__ import annotations

import pytest
import torch

import patches

diffusers = pytest.importorskip("diffusers", minversion="0.42", reason="it has AnyFlow")

from patches.repairs.reproducers.image_models import as_with_gpu  # noqa: E402
from tests.architectures.judged import off, weights  # noqa: E402
from tests.image_models.found import TABLE  # noqa: E402
from tests.image_models import models  # noqa: E402
from tests.image_models.models import CPU, Judged, Plain, run  # noqa: E402

from . import image_options  # noqa: E402

pytestmark = pytest.mark.one_in(2)

ID = "diffusers-weight-read-by-model"
PRECISIONS = [each for each in models.PRECISIONS if each != "INT8" or "int8" in image_options.BOTH]
READ = {
    "UNet2DConditionModel (Kandinsky 2.2)": ["encoder_hid_proj.image_embeds"],
    "HunyuanDiT2DModel": [f"time_extra_emb.pooler.{name}_proj" for name in "ckqv"],
    "AnyFlowTransformer3DModel": ["condition_embedder.delta_embedder.linear_1"],
}


def plain(name: str, folder: object) -> Plain:
    return Plain(getattr(diffusers, name.partition(" ")[0]), TABLE[name], folder / "plain")


def config_of(model: torch.nn.Module) -> dict[str, object]:
    config = model.config["quantization_config"]
    return config if isinstance(config, dict) else config.to_dict()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", READ)
def test_it_is_the_rounded_model_also_saved_and_loaded(tmp_path, name, precision):
    model = plain(name, tmp_path)
    with patches.applied(ID):
        each = Judged(model, precision)
        each.model.save_pretrained(tmp_path / "packed")
    assert each.layers and not {*READ[name]} & {*each.layers}
    assert config_of(each.model)["llm_int8_skip_modules"] == READ[name]
    with as_with_gpu():  # without the plugin
        again = model.kind.from_pretrained(tmp_path / "packed", torch_dtype=torch.float32, device_map=CPU).eval()
    expected = run(each.reference, each.inputs)
    for found in (each.model, again):
        assert off(run(found, each.inputs), expected) < (0.03 if precision == "INT8" else 2e-3)


def test_steps_of_time_in_bfloat16(tmp_path):
    """FIBO 2 in INT8 casts them to the dtype of a weight; Z-Image has the same class, and runs as it is."""
    model = plain("BriaFibo2Transformer2DModel", tmp_path)
    with patches.applied(ID):
        each = Judged(model, "INT8")
        assert "t_embedder.mlp.0" not in each.layers and "t_embedder.mlp.2" in each.layers
        found = each.load(torch.bfloat16)
    assert run(found, each.inputs, torch.bfloat16).isfinite().all()
    other = plain("ZImageTransformer2DModel", tmp_path / "other")
    with patches.applied(ID):
        assert "t_embedder.mlp.0" in Judged(other, "INT8").layers
        assert "t_embedder.mlp.0" in Judged(model, "NF4").layers


def test_a_list_of_the_user_is_kept_and_not_changed(tmp_path):
    model, mine = plain("HunyuanDiT2DModel", tmp_path), ["proj_out", "pooler.q_proj"]
    config = diffusers.BitsAndBytesConfig(
        load_in_8bit=True, llm_int8_skip_modules=mine, llm_int8_enable_fp32_cpu_offload=True
    )
    with patches.applied(ID), as_with_gpu():
        found = model.load(quantization_config=config, device_map=CPU)
    assert config_of(found)["llm_int8_skip_modules"] == [*mine, *READ["HunyuanDiT2DModel"]]
    assert config.llm_int8_skip_modules is mine and len(mine) == 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_model_is_the_same(tmp_path, precision):
    model = plain("FluxTransformer2DModel", tmp_path)
    expected = Judged(model, precision)
    with patches.applied(ID):
        each = Judged(model, precision)
    assert weights(each.model).keys() == weights(expected.model).keys()
    assert config_of(each.model) == config_of(expected.model)
    assert torch.equal(run(each.model, each.inputs), run(expected.model, each.inputs))
