"""4-bit mixtures that transformers 4 saved are loaded as they are, and saved under the same names."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

from safetensors.torch import load_file, save_file  # noqa: E402

import patches  # noqa: E402
from patches.engine.gate import satisfied  # noqa: E402
from patches.experts import dense_operations  # noqa: E402
from patches.experts.experts_in_model import find_experts  # noqa: E402
from patches.experts.tensor import Experts4bit  # noqa: E402
from patches.repairs.reproducers.mixtures import pack_checkpoint  # noqa: E402
from tests.experts.models import IDS, gap, loaded, saved, step  # noqa: E402

pytestmark = pytest.mark.one_in(2)

ID = "transformers-experts-of-linear-layers"
OTHERS = ["olmoe", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen2_moe", "qwen3_5_moe", "ernie4_5_moe"]
REST = [pytest.param(kind, marks=pytest.mark.release("qwen3_moe and mixtral")) for kind in OTHERS]
FILE = "model.safetensors"
EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.fixture(autouse=True)
def counted():
    dense_operations.COUNTS.clear()


@pytest.fixture
def patched():
    with patches.applied(ID, "transformers-save-prequantized", "transformers-skip-list-of-checkpoint"):
        yield


def read(folder, **options):
    options = {"dtype": torch.float32, "device_map": {"": "cpu"}, "experts_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def packed(folder, kind="qwen3_moe", double=False):
    """A checkpoint of transformers 4 in ``folder``, and what its packed weights stand for."""
    saved(folder, kind)
    return pack_checkpoint(folder, double)


def rewrite(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("double", [False, True], ids=["absmax", "double"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", *REST])
def test_read_and_saved_again(tmp_path, patched, kind, double):
    values = packed(tmp_path / "packed", kind, double)
    shutil.copytree(tmp_path / "packed", tmp_path / "dense")
    rewrite(
        tmp_path / "dense",
        lambda tensors: (
            [tensors.pop(f"{n}.{s}", None) for n in values if ".experts." in n for s in statistics(tensors, n)]
            + [tensors.update({n: v for n, v in values.items() if ".experts." in n})]
        ),
    )
    model, expected = read(tmp_path / "packed"), read(tmp_path / "dense")
    experts = list(find_experts(model))
    assert experts and all(isinstance(one.parameter, Experts4bit) for one in experts)
    for one in experts:
        assert torch.equal(one.parameter.dequantize(), expected.get_parameter(one.full_name))
    assert gap(step(expected), step(model)) == 0 and not dense_operations.COUNTS
    assert model.get_memory_footprint() < 0.5 * expected.get_memory_footprint()

    model.save_pretrained(tmp_path / "again")
    was, now = load_file(tmp_path / "packed" / FILE), load_file(tmp_path / "again" / FILE)
    assert set(was) == set(now) and all(torch.equal(was[name], now[name]) for name in was)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["load_in_4bit"]


def statistics(tensors, name):
    return [key.removeprefix(f"{name}.") for key in list(tensors) if key.startswith(f"{name}.")]


def unpack(tensors, values, chosen):
    """Leave the matrices ``chosen`` in floating point, as skipped modules are."""
    for name in filter(chosen, values):
        for key in statistics(tensors, name):
            del tensors[f"{name}.{key}"]
        tensors[name] = values[name]


def test_a_layer_in_floating_point(tmp_path, patched):
    values = packed(tmp_path)
    rewrite(tmp_path, lambda tensors: unpack(tensors, values, lambda name: "layers.1.mlp" in name))
    first, second = (layer.mlp.experts for layer in read(tmp_path).model.layers)
    assert isinstance(first.gate_up_proj, Experts4bit) and type(second.gate_up_proj) is torch.nn.Parameter
    expected = [values[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] for i in range(4)]
    assert torch.equal(second.down_proj.data, torch.stack(expected))


def test_an_expert_in_floating_point(tmp_path, patched, caplog, monkeypatch):
    """The parameter is right, and whole in floating point; the log says so."""
    monkeypatch.setattr(logging.getLogger("bnb_patches"), "propagate", True)
    values = packed(tmp_path)
    rewrite(tmp_path, lambda tensors: unpack(tensors, values, lambda name: "layers.0.mlp.experts.2." in name))
    experts = read(tmp_path).model.layers[0].mlp.experts
    expected = [values[f"model.layers.0.mlp.experts.{i}.down_proj.weight"] for i in range(4)]
    assert torch.equal(experts.down_proj.data, torch.stack(expected))
    assert "down_proj: 3 of 4 matrices are packed" in caplog.text


def test_another_dtype(tmp_path, patched):
    values = packed(tmp_path)
    experts = read(tmp_path, dtype=torch.bfloat16).model.layers[0].mlp.experts
    assert experts.down_proj.dtype == torch.bfloat16
    expected = values["model.layers.0.mlp.experts.2.down_proj.weight"].to(torch.bfloat16)
    off = 0 if satisfied("bitsandbytes>=0.49") else 1e-2  # its CPU kernel rounded to bfloat16 otherwise
    torch.testing.assert_close(experts.down_proj[2].dequantize(), expected, rtol=off, atol=0)


def test_the_disk_is_refused(tmp_path, patched):
    packed(tmp_path)
    layers = {f"model.layers.{i}": "cpu" if i else "disk" for i in range(2)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    with pytest.raises((NotImplementedError, ValueError), match="disk"):
        read(tmp_path, device_map={**layers, **rest}, offload_folder=str(tmp_path / "off"))


def test_after_revert_the_model_still_runs(tmp_path):
    packed(tmp_path)
    with patches.applied(ID):
        model = read(tmp_path)
        with torch.no_grad():
            expected = model(IDS).logits
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)


def test_a_quantized_checkpoint_with_experts_in_floating_point(tmp_path, patched):
    """As transformers 5 saves it by itself; experts are quantized if that is asked for."""
    plain = loaded(saved(tmp_path / "dense", "qwen3_moe"))
    plain.save_pretrained(tmp_path / "half")
    assert not any(isinstance(one.parameter, Experts4bit) for one in find_experts(read(tmp_path / "half")))
    with patches.quantize_experts():
        model = read(tmp_path / "half")
    assert all(isinstance(one.parameter, Experts4bit) for one in find_experts(model))
    assert gap(step(patches.quantize_experts(plain)), step(model)) == 0


# -- quantized by us ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        "gpt_oss",
        *(
            pytest.param(k, marks=pytest.mark.release("qwen3_moe and gpt_oss"))
            for k in ("gemma4", "granitemoe", "jetmoe")
        ),
    ],
)
def test_quantized_here_saved_and_read(tmp_path, patched, kind):
    saved(tmp_path / "dense", kind)
    model = patches.quantize_experts(loaded(tmp_path / "dense", None, bnb_4bit_use_double_quant=True))
    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map={"": "cpu"})
    for one in find_experts(model):
        other = again.get_parameter(one.full_name)
        assert isinstance(other, Experts4bit) and torch.equal(one.parameter.dequantize(), other.dequantize())
    assert gap(step(model), step(again)) == 0


def test_dequantized(tmp_path, patched):
    model = patches.quantize_experts(loaded(saved(tmp_path, "qwen3_moe")))
    expected = {one.full_name: one.parameter.dequantize() for one in find_experts(model)}
    plain = model.dequantize()
    for name, values in expected.items():
        parameter = plain.get_parameter(name)
        assert type(parameter) is torch.nn.Parameter and torch.equal(parameter.data, values)


def test_llama4_keeps_its_experts(tmp_path, patched):
    """For a quantized checkpoint transformers makes linear layers of them."""
    model = patches.quantize_experts(loaded(saved(tmp_path / "dense", "llama4")))
    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    again = read(tmp_path / "packed")
    assert all(isinstance(one.parameter, Experts4bit) for one in find_experts(again))
    assert {type(one.module).__name__ for one in find_experts(again)} == {"Llama4TextExperts"}
    assert gap(step(model), step(again)) == 0
    patches.revert("transformers-skip-list-of-checkpoint")
    with pytest.raises(
        NotImplementedError, match="_proj.*The patch transformers-skip-list-of-checkpoint prevents that"
    ):
        read(tmp_path / "packed")
