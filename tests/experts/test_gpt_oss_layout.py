"""gpt-oss in 4 bits as unsloth writes it: transposed linear layers, whose matrices may be square."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="the patch is for 5.0 and later")

from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import patches  # noqa: E402
from patches.engine.gate import satisfied  # noqa: E402
from patches.experts import dense_operations  # noqa: E402
from patches.experts.experts_in_model import find_experts  # noqa: E402
from patches.experts.tensor import Experts4bit  # noqa: E402
from tests.experts.models import CONFIGS, gap, loaded, saved, step  # noqa: E402

pytestmark = pytest.mark.one_in(2)

FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def patched():
    dense_operations.COUNTS.clear()
    with patches.applied():
        yield
    assert not dense_operations.COUNTS


def read(folder, **options):
    options = {"dtype": torch.float32, "device_map": {"": "cpu"}, "experts_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture
def written(tmp_path):
    """The folder of such a checkpoint, and its model with experts of floating point that were rounded so."""
    config = CONFIGS["gpt_oss"]()
    assert config.intermediate_size != config.hidden_size
    saved(tmp_path / "dense", "gpt_oss")
    reference = loaded(tmp_path / "dense")
    reference.save_pretrained(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / FILE)
    for one in find_experts(reference):
        del tensors[one.full_name]
        bias = tensors.pop(f"{one.full_name}_bias")
        for number, expert in enumerate(one.parameter.data):
            name = f"{one.full_name}s.{number}"
            codes, state = quantize_4bit(expert.t().contiguous(), quant_type="nf4", compress_statistics=True)
            expert.copy_(dequantize_4bit(codes, state).t())
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = codes, bias[number].clone()
            tensors.update({f"{name}.weight.{k}": v.clone() for k, v in state.as_dict(packed=True).items()})
    for name in [name for name in tensors if ".router." in name]:
        tensors[name.replace(".router.", ".router.linear.")] = tensors.pop(name)
    save_file(tensors, tmp_path / "packed" / FILE, metadata={"format": "pt"})
    return tmp_path / "packed", reference


def test_read_and_saved_again(written, tmp_path):
    folder, reference = written
    model = read(folder)
    for one in find_experts(model):
        expected = reference.get_parameter(one.full_name)
        assert type(one.parameter) is Experts4bit and one.parameter.shape == expected.shape
        assert torch.equal(one.parameter.dequantize(), expected)
    for name, parameter in model.named_parameters():
        if "bias" in name or "router" in name:
            assert torch.equal(parameter, reference.get_parameter(name)), name
    expected = step(reference)
    assert gap(expected, step(copy.deepcopy(model))) < 1e-6
    model.save_pretrained(tmp_path / "again")
    was, now = load_file(folder / FILE), load_file(tmp_path / "again" / FILE)
    assert all(torch.equal(now[name], was[name]) for name in was if "_projs" in name and "bias" not in name)
    if satisfied("transformers>=5.17"):  # before, biases and router get the names of the model
        assert set(was) == set(now)
    assert gap(expected, step(read(tmp_path / "again"))) < 1e-6


def test_on_the_disk(written, tmp_path):
    folder, _ = written
    whole = read(folder)
    places = {f"model.layers.{i}": "cpu" if i else "disk" for i in range(whole.config.num_hidden_layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = read(folder, device_map=places, offload_folder=str(tmp_path / "off"))
    assert model.model.layers[0].mlp.experts.gate_up_proj.is_meta
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert (model(ids).logits - whole(ids).logits).abs().max() < 1e-2  # linear layers in memory: see docs/limits.md
    model.save_pretrained(tmp_path / "again")
    was, now = load_file(folder / FILE), load_file(tmp_path / "again" / FILE)
    assert all(torch.equal(now[name], was[name]) for name in was if "_projs" in name and "bias" not in name)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_the_other_implementations(written, implementation):
    folder, reference = written
    assert gap(step(reference), step(read(folder, experts_implementation=implementation))) < 3e-6


def test_lora_is_trained_and_merged(written):
    peft = pytest.importorskip("peft", minversion="0.19", reason="it adapts experts from 0.19 on")
    folder, reference = written
    model, results = read(folder), []
    before = [one.parameter.dequantize() for one in find_experts(model)]
    for each in (reference, model):
        torch.manual_seed(1)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
        results.append(peft.get_peft_model(each, config).train())
    found = []
    for wrapped in results:
        ids = torch.arange(24)[None] % 32
        wrapped(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad})
    assert gap(*found) < 5e-6 and sum("experts" in name for name in found[0]) == 2 * 2 * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for wrapped in results:
            wrapped.merge_adapter()
    for one, was in zip(find_experts(model), before, strict=True):
        expected = reference.get_parameter(one.full_name)
        assert (one.parameter.dequantize() - expected).norm() < 0.3 * (was - expected).norm()


def test_copies_and_states(written):
    model = read(written[0])
    other = read(written[0])
    with torch.no_grad():
        for one in find_experts(other):
            one.parameter.packed.parts[0].codes.zero_()
    other.load_state_dict(model.state_dict())
    assert gap(step(model), step(other)) == 0
