"""Experts in INT8 compute what transformers 4 computes, which has one ``Linear8bitLt`` for each matrix of each expert."""

from __future__ import annotations

import copy
import json
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

from bitsandbytes.nn import Int8Params, Linear8bitLt  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import patches  # noqa: E402
from patches.experts import dense_operations  # noqa: E402
from patches.experts.experts_in_model import find_experts  # noqa: E402
from patches.experts.tensor import Experts8bit  # noqa: E402
from tests.experts.models import IDS, gap, loaded, pack_int8, saved, step  # noqa: E402

pytestmark = pytest.mark.one_in(2)

ID = "transformers-experts-of-linear-layers"
INT8 = dict(load_in_4bit=False, load_in_8bit=True)
LINEAR = ("bitsandbytes-int8-scales-lost-on-offload", "bitsandbytes-int8-copies", "bitsandbytes-int8-load-state-dict")
"""What linear layers in INT8 need, on older releases of bitsandbytes to be read at all."""
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def patched():
    dense_operations.COUNTS.clear()
    with patches.applied(ID, "transformers-save-prequantized", "transformers-skip-list-of-checkpoint", *LINEAR):
        yield
    assert not dense_operations.COUNTS


def read(folder, **options):
    options = {"dtype": torch.float32, "device_map": {"": "cpu"}, "experts_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


class ExpertsOfLinears(torch.nn.Module):
    """Experts as transformers 4 has them: a layer for each matrix, and a loop over the experts that tokens chose."""

    def __init__(self, module, threshold):
        super().__init__()

        def layer(weight):
            new = Linear8bitLt(*reversed(weight.shape), bias=False, has_fp16_weights=False, threshold=threshold)
            new.weight = Int8Params(weight.contiguous(), requires_grad=False, has_fp16_weights=False)
            return new.to("cpu")

        def layers(weights):
            return torch.nn.ModuleList(map(layer, weights))

        gate, up = module.gate_up_proj.data.chunk(2, dim=1)
        self.gate_proj, self.up_proj, self.down_proj = layers(gate), layers(up), layers(module.down_proj.data)
        self.act_fn = module.act_fn

    def forward(self, hidden, chosen, weights):
        out = torch.zeros_like(hidden)
        mask = torch.nn.functional.one_hot(chosen, len(self.gate_proj)).permute(2, 1, 0)
        for number in mask.sum((-1, -2)).nonzero()[:, 0].tolist():
            place, token = torch.where(mask[number])
            x = hidden[token]
            x = self.act_fn(self.gate_proj[number](x)) * self.up_proj[number](x)
            out.index_add_(0, token, self.down_proj[number](x) * weights[token, place, None])
        return out


def with_linears(model, threshold=6.0):
    for layer in model.model.layers:
        layer.mlp.experts = ExpertsOfLinears(layer.mlp.experts, threshold)
    return model


def outlying(folder, by=40):
    """A model whose embedding makes outliers, which LLM.int8 multiplies in floating point."""
    saved(folder, "qwen3_moe")
    for name, tensor in (tensors := load_file(folder / FILE)).items():
        if "post_attention_layernorm" in name:
            tensor[[3, 40]] *= by
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def outputs(model):
    """Logits in eval, and the gradient of the embedding: where ``Linear8bitLt`` multiplies in INT8 on a CPU too."""
    model.eval().requires_grad_(False)
    embedding = model.get_input_embeddings().weight.requires_grad_(True)
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return {"logits": out.logits.detach(), "embedding": embedding.grad}


def equal(expected, got):
    """Logits to the bit; gradients but for rounding: backward multiplies by gate and up in one product."""
    assert torch.equal(expected["logits"], got["logits"])
    assert gap(expected, got) < (3e-3 if got["logits"].dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("threshold", [6.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equal_to_linear8bitlt(tmp_path, threshold, dtype):
    config = {**INT8, "llm_int8_threshold": threshold}
    folder = outlying(tmp_path)
    expected = outputs(with_linears(loaded(folder, dtype=dtype, **config), threshold))
    model = patches.quantize_experts(loaded(folder, dtype=dtype, **config))
    assert all(type(one.parameter) is Experts8bit for one in find_experts(model))
    equal(expected, outputs(model))
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected["logits"])
    other = loaded(folder, dtype=dtype, **{**config, "llm_int8_threshold": 6.0 - threshold})
    assert gap(expected, outputs(patches.quantize_experts(other))) > 0, "the threshold matters here"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_other_implementations(tmp_path, implementation):
    folder = outlying(tmp_path)
    expected = outputs(patches.quantize_experts(loaded(folder, **INT8)))
    assert gap(expected, outputs(patches.quantize_experts(loaded(folder, implementation, **INT8)))) < 3e-3


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_in_one_graph(tmp_path, implementation):
    torch._dynamo.reset()
    model = patches.quantize_experts(loaded(saved(tmp_path, "qwen3_moe"), implementation, **INT8))
    mlp = model.requires_grad_(False).model.layers[0].mlp
    results = []
    for module in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")):
        x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append({"y": y.detach(), "x": x.grad})
    assert gap(*results) < 1e-5


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_transposed_experts_are_dequantized(tmp_path, kind):
    """transformers 4 has none of these in INT8: the reference is the model with rounded experts."""
    saved(tmp_path, kind)
    expected, model = (patches.quantize_experts(loaded(tmp_path, **INT8)) for _ in range(2))
    for one in find_experts(expected):
        one.module._parameters[one.name] = torch.nn.Parameter(one.parameter.dequantize())
    assert gap(step(expected), step(model)) == 0


def test_while_it_is_read(tmp_path):
    saved(tmp_path, "qwen3_moe", torch.bfloat16)
    expected = patches.quantize_experts(loaded(tmp_path, dtype=torch.bfloat16, **INT8))
    with patches.quantize_experts():
        model = loaded(tmp_path, dtype=torch.bfloat16, **INT8)
    for one in find_experts(expected):
        other = model.get_parameter(one.full_name)
        assert type(other) is Experts8bit and one.parameter.packed.layout() == other.packed.layout()
        tensors = other.packed.tensors()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in one.parameter.packed.tensors().items())
    assert gap(outputs(expected), outputs(model)) == 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_checkpoint_of_transformers_4(tmp_path, kind):
    saved(tmp_path / "packed", kind)
    values = pack_int8(tmp_path / "packed")
    model = read(tmp_path / "packed")
    experts = list(find_experts(model))
    assert experts and all(type(one.parameter) is Experts8bit for one in experts)
    names = [name for name in values if ".experts.2." in name and name.endswith(("down_proj.weight", "w2.weight"))]
    for one, name in zip([one for one in experts if one.name == "down_proj"], sorted(names), strict=True):
        assert torch.equal(one.parameter[2].dequantize(), values[name])

    model.save_pretrained(tmp_path / "again")
    was, now = load_file(tmp_path / "packed" / FILE), load_file(tmp_path / "again" / FILE)
    assert set(was) == set(now) and all(torch.equal(was[name], now[name]) for name in was)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["load_in_8bit"]
    assert gap(outputs(model), outputs(read(tmp_path / "again"))) == 0


def test_read_equals_linear8bitlt(tmp_path):
    folder = outlying(tmp_path / "plain")
    expected = outputs(with_linears(loaded(folder, **INT8)))
    pack_int8(outlying(tmp_path / "packed"))
    equal(expected, outputs(read(tmp_path / "packed")))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_quantized_here_saved_and_read(tmp_path, kind):
    saved(tmp_path / "plain", kind)
    with patches.quantize_experts():
        model = loaded(tmp_path / "plain", **INT8)
    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    again = read(tmp_path / "packed")
    assert all(type(one.parameter) is Experts8bit for one in find_experts(again))
    assert gap(outputs(model), outputs(again)) == 0


EXPERT = "model.layers.0.mlp.experts.2.up_proj."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}SCB"), "4 experts are packed, but 3 have SCB"),
        (lambda t: [t.pop(key) for key in list(t) if key.startswith(EXPERT)], r"3 of 4 experts.*missing: \[2\]"),
        (lambda t: t[f"{EXPERT}weight_format"].fill_(2), "in a GPU layout"),
        (lambda t: t.update({f"{EXPERT}SCB": torch.ones(3)}), r"expert 2 has shape .* and scales of \(3,\)"),
    ],
    ids=["scales", "expert", "layout", "shape"],
)
def test_a_checkpoint_that_is_not_whole(tmp_path, change, message, caplog, monkeypatch):
    import logging

    saved(tmp_path, "qwen3_moe")
    pack_int8(tmp_path)
    change(tensors := load_file(tmp_path / FILE))
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    caplog.set_level(logging.WARNING, logger="transformers")
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    with pytest.raises(RuntimeError) as raised:
        read(tmp_path)
    text = str(raised.value) + caplog.text
    assert re.search(message, text), text[-3000:]


def test_a_layer_in_floating_point(tmp_path):
    saved(tmp_path, "qwen3_moe")
    values, tensors = pack_int8(tmp_path), load_file(tmp_path / FILE)
    for name in [name for name in values if "layers.1.mlp.experts" in name]:
        tensors[name] = values[name]
        del tensors[name.replace("weight", "SCB")], tensors[name.replace("weight", "weight_format")]
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    first, second = (layer.mlp.experts for layer in read(tmp_path).model.layers)
    assert type(first.gate_up_proj) is Experts8bit and type(second.gate_up_proj) is torch.nn.Parameter
    expected = [values[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] for i in range(4)]
    assert torch.equal(second.down_proj.data, torch.stack(expected))


def test_copies_dequantizing_and_what_is_shown(tmp_path):
    model = patches.quantize_experts(loaded(saved(tmp_path, "qwen3_moe"), **INT8))
    expected = outputs(model)
    assert gap(expected, outputs(copy.deepcopy(model))) == 0
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        for one in find_experts(model):
            one.parameter.packed.parts[0].codes.zero_()
    assert gap(expected, outputs(model)) > 0
    experts = {k: v for k, v in torch.load(tmp_path / "state.pt", weights_only=True).items() if "experts" in k}
    model.load_state_dict(experts, strict=False)
    assert gap(expected, outputs(model)) == 0

    (layers,) = [each for each in patches.inspect(model).facts.layers if each.kind == "Qwen3MoeExperts"]
    assert layers.quantized == "int8 experts" and layers.statistics == "present"
    assert model.get_memory_footprint() < 0.45 * sum(p.numel() * 4 for p in model.parameters())
    values = {one.full_name: one.parameter.dequantize() for one in find_experts(model)}
    plain = model.dequantize()
    for name, value in values.items():
        assert type(plain.get_parameter(name)) is torch.nn.Parameter and torch.equal(plain.get_parameter(name), value)


def test_lora_trains_merges_and_unmerges(tmp_path):
    peft = pytest.importorskip("peft", minversion="0.19", reason="it adapts experts from 0.19 on")
    saved(tmp_path, "qwen3_moe")
    config = dict(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )  # fmt: skip
    with patches.applied("torch-quantized-experts"):
        torch.manual_seed(1)
        model = peft.get_peft_model(patches.quantize_experts(loaded(tmp_path, **INT8)), peft.LoraConfig(**config))
        model(input_ids=IDS, labels=IDS).loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert len(trained) == 12 and all(p.grad is not None and p.grad.any() for p in trained.values())

        plain, quantized = (model.eval()(input_ids=IDS).logits.detach() for _ in range(2))
        with model.disable_adapter(), torch.no_grad():
            base = model(input_ids=IDS).logits
        packed = [one.parameter.packed.tensors() for one in find_experts(model)]
        with pytest.warns(UserWarning, match="rounds the merged weights"):
            model.merge_adapter()
        with torch.no_grad():
            merged = model(input_ids=IDS).logits
        assert (merged - plain).norm() < 0.2 * (plain - base).norm()
        model.unmerge_adapter()
        after = [one.parameter.packed.tensors() for one in find_experts(model)]
        assert len(packed) == len(after) == 4 and torch.equal(plain, quantized)
        assert all(torch.equal(one[name], other[name]) for one, other in zip(packed, after) for name in one)
