"""``patches.inspect()``: what it says of models as users have them, and that it only looks."""

from __future__ import annotations

import html.parser
import json
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from packaging.version import Version

import patches

from .inspected import dispatched, llama, load, lora, loss, offloaded, trained


def lines(model: Any, kind: str, **having: Any) -> list[Any]:
    """The lines of the table about layers of class ``kind`` for which all of ``having`` is so."""
    found = [line for line in patches.inspect(model).facts.layers if line.kind == kind]
    return [line for line in found if all(getattr(line, key) == value for key, value in having.items())]


def only(model: Any, kind: str, **having: Any) -> Any:
    (line,) = lines(model, kind, **having)
    return line


# -- layers -----------------------------------------------------------------------------------------


def test_a_4_bit_model_and_why_some_of_it_is_not_quantized():
    model = load(4, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.up_proj"])
    quantized = only(model, "Linear4bit")
    assert (quantized.count, quantized.quantized, quantized.storage, quantized.compute) == (
        13,
        "nf4, double",
        "uint8",
        "float32",
    )
    assert quantized.statistics == "present" and quantized.devices == {"cpu": 13} and not quantized.tied
    codes = sum(m.weight.numel() for m in model.modules() if isinstance(m, bnb.nn.Linear4bit))
    assert codes < quantized.bytes < 1.1 * codes and quantized.parameters == 2 * codes
    assert only(model, "Embedding").reason == "an embedding"
    assert only(model, "LlamaRMSNorm").reason == "one-dimensional, as in norms"
    reasons = {line.names: line.reason for line in lines(model, "Linear")}
    assert reasons == {
        ("model.layers.0.mlp.up_proj",): "in the skip list (llm_int8_skip_modules)",
        ("lm_head",): "the output head",
    }
    assert patches.inspect(model).problems == ()


def test_an_int8_model_before_and_after_its_first_forward_and_wrapped():
    model = load(8)
    before = only(model, "Linear8bitLt")
    assert (before.count, before.quantized, before.storage, before.statistics) == (14, "int8", "int8", "present")
    loss(model)
    assert only(model, "Linear8bitLt") == before, "the scales move from the weight to the state"
    wrapped = torch.compile(lora(model))
    assert only(wrapped, "Linear8bitLt").count == 14
    assert only(wrapped, "Linear").reason == "the output head"


def test_layers_made_by_hand():
    four, eight = bnb.nn.Linear4bit(64, 64, quant_type="nf4"), bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    made = [four, eight, bnb.nn.Embedding8bit(64, 64), bnb.nn.EmbeddingNF4(64, 64), torch.nn.Linear(64, 64)]
    convolution = torch.nn.Conv1d(4, 4, 3)
    facts = patches.inspect(torch.nn.Sequential(*made, convolution).to("cpu")).facts
    assert {line.kind: line.quantized for line in facts.layers} == {
        "Linear4bit": "nf4, double", "Linear8bitLt": "int8", "Embedding8bit": "int8", "EmbeddingNF4": "nf4",
        "Linear": "", "Conv1d": "",
    }  # fmt: skip
    assert facts.layers[-1].reason == "not an nn.Linear"
    assert facts.layers[-2].reason == "not made as a quantized layer"
    assert {line.reason for line in patches.inspect(llama()).facts.layers} == {"no layer of this model is quantized"}


def test_experts_in_three_dimensions():
    model = load(4, "moe")
    experts = only(model, "Qwen3MoeExperts")
    assert experts.reason == "3-D expert parameters: only nn.Linear layers are quantized" and experts.count == 2
    assert only(model, "Qwen3MoeTopKRouter").reason == "not an nn.Linear"


def test_experts_that_were_quantized_by_hand():
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize", reason="this release cannot quantize parameters")
    model = load(4, "moe")
    experts = only(model, "Qwen3MoeExperts")
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(layer.mlp.experts, name)
    line = only(model, "ParametrizationList")
    assert (line.count, line.quantized, line.statistics) == (4, "nf4", "present")
    assert line.parameters == experts.parameters and line.bytes < experts.bytes / 6


def test_what_is_tied_is_counted_once():
    whole = sum(p.numel() for p in llama(tie_word_embeddings=True).parameters())
    facts = patches.inspect(llama(tie_word_embeddings=True)).facts
    assert sum(line.parameters for line in facts.layers) == whole
    assert sum(line.bytes for line in facts.layers) == 4 * whole
    assert [(line.kind, line.tied) for line in facts.layers if line.tied] == [("Embedding", 1), ("Linear", 1)]


@pytest.mark.parametrize("bits", [4, 8])
def test_what_accelerate_offloads_and_where_it_runs(bits):
    with patches.applied("bitsandbytes-params4bit-meta"):
        model = dispatched(load(bits))
        facts = patches.inspect(model).facts
    quantized = [line for line in facts.layers if line.quantized]
    assert sum(line.offloaded.get("disk, runs on cpu", 0) for line in quantized) == 7
    assert sum(line.devices.get("cpu", 0) for line in quantized) == 7
    assert {line.statistics.split(",")[0] for line in quantized} == {"present"}
    assert facts.problems == ()
    whole = patches.inspect(load(bits)).facts
    kept = sum(line.bytes for line in facts.layers) - sum(line.bytes for line in whole.layers)
    if bits == 8 and Version(bnb.__version__) < Version("0.48"):
        codes = (m.weight for m in model.model.layers[1].modules() if isinstance(m, bnb.nn.Linear8bitLt))
        assert kept == sum(weight.numel() for weight in codes), "the codes of what is offloaded stay in memory"
    else:
        assert kept == 0


def test_a_plain_model_that_is_offloaded_to_memory():
    facts = patches.inspect(offloaded(llama())).facts
    assert {place for line in facts.layers for place in line.offloaded} == {"cpu, runs on cpu"}
    assert not any(line.devices for line in facts.layers) and not facts.problems


def test_a_model_of_torchao():
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama().to(torch.bfloat16)
    torchao.quantize_(model.model, torchao.Int8WeightOnlyConfig())
    (line,) = [line for line in lines(model, "Linear") if line.quantized]
    assert (line.count, line.storage, line.compute) == (14, "int8", "bfloat16")
    elements = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    assert elements < line.bytes < 1.1 * elements and line.parameters == elements


# -- adapters and training ----------------------------------------------------------------------------


def test_adapters_by_kind_and_name():
    import peft

    model = lora(load(4), modules_to_save=["lm_head"], use_dora=True)
    model.add_adapter("other", peft.LoraConfig(target_modules=["k_proj"]))
    found = {(line.kind, line.name): line for line in patches.inspect(model).facts.adapters}
    assert found.keys() == {("dora", "default"), ("lora", "other"), ("modules_to_save", "default")}
    dora, other = found["dora", "default"], found["lora", "other"]
    assert (dora.count, dora.active, dora.merged, dora.tensors, dora.trainable) == (4, 4, 0, 12, 12)
    assert (other.count, other.active, other.trainable) == (2, 0, 0)
    assert dora.dtypes == {"float32": 12} and dora.devices == {"cpu": 12}
    copies = sum(p.numel() for n, p in model.named_parameters() if "modules_to_save" in n)
    assert found["modules_to_save", "default"].bytes == 4 * copies
    assert sum(line.count for line in patches.inspect(model).facts.layers) == 21, "those of the model alone"


@pytest.mark.parametrize("kind", ["VeraConfig", "PromptTuningConfig"])
def test_adapters_that_share_parameters_or_stand_before_the_model(kind):
    import peft

    options = (
        {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"} if "Prompt" in kind else {"target_modules": ["q_proj"]}
    )
    model = peft.get_peft_model(llama(), getattr(peft, kind)(**options))
    (line,) = patches.inspect(model).facts.adapters
    own = {id(p): p for n, p in model.named_parameters() if "vera" in n or "prompt" in n}
    buffers = [b for n, b in model.named_buffers() if "vera_" in n and "layers.0" in n]
    assert line.bytes == sum(t.nbytes for t in (*own.values(), *buffers)) and line.trainable == len(trained(model))


def test_what_trains_beside_the_adapters():
    model = lora(llama())
    assert patches.inspect(model).facts.training.outside == ()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    training = patches.inspect(model).facts.training
    assert training.names == tuple(n for n, p in model.named_parameters() if p.requires_grad) and training.tensors == 9
    assert training.outside == ("base_model.model.model.norm.weight",)
    assert "outside of adapters: base_model.model.model.norm.weight" in " ".join(str(patches.inspect(model)).split())
    assert patches.inspect(llama()).facts.training.outside == tuple(n for n, _ in llama().named_parameters())


def test_a_merged_adapter():
    model = lora(llama())
    model.merge_adapter()
    (line,) = patches.inspect(model).facts.adapters
    assert (line.count, line.merged) == (4, 4)


def test_what_trains_has_gradients_and_an_optimizer_state_in_8_bits():
    if Version(bnb.__version__) < Version("0.50"):
        pytest.skip("before 0.50 the optimizers of bitsandbytes have no kernels for a CPU")
    model = lora(load(4), modules_to_save=["lm_head"]).train()
    optimizer = bnb.optim.AdamW8bit(trained(model))
    facts = patches.inspect(model, optimizer).facts
    assert (facts.training.tensors, facts.training.gradients, facts.optimizer.stepped) == (9, 0, 0)
    loss(model).backward()
    optimizer.step()
    facts = patches.inspect(model, optimizer).facts
    assert facts.training.parameters == sum(p.numel() for p in trained(model))
    assert (facts.training.gradients, facts.training.without_gradient) == (9, ())
    state = facts.optimizer
    assert (state.bits, state.smallest, state.tensors, state.stepped, state.in_8_bits) == (8, 4096, 9, 9, 1)
    held = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert state.bytes == sum(t.nbytes for t in held) and state.dtypes["uint8"] == 2
    assert "1 of them in 8 bits" in str(patches.inspect(model, optimizer))


def test_a_state_of_32_bits_and_an_optimizer_that_accelerate_has_wrapped():
    from accelerate import Accelerator

    model = lora(llama())
    optimizer = Accelerator(cpu=True).prepare(torch.optim.AdamW(trained(model)))
    loss(model).backward()
    optimizer.step()
    state = patches.inspect(model, optimizer).facts.optimizer
    assert (state.kind, state.bits, state.stepped, state.in_8_bits) == ("torch's AdamW", None, 8, 0)


# -- how it looks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    model = lora(load(4, "tied", llm_int8_skip_modules=["none"]), modules_to_save=["norm"])
    shown = str(patches.inspect(model, bnb.optim.AdamW8bit(trained(model))))
    assert max(map(len, shown.splitlines())) <= width
    for word in (
        "Linear4bit",
        "nf4",
        "LlamaRMSNorm",
        "lora 'default'",
        "AdamW8bit",
        "1 problem",
        "1. 4-bit layers hold",
    ):
        assert word in " ".join(shown.split())


def test_in_a_notebook_and_as_data():
    class Cells(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.depth, self.tags = 0, []

        def handle_starttag(self, tag, attrs):
            self.depth += 1
            self.tags.append(tag)

        def handle_endtag(self, tag):
            self.depth -= 1

    model = lora(load(8, "tied", llm_int8_skip_modules=["none"]))
    found = patches.inspect(model)
    read = Cells()
    read.feed(found._repr_html_())
    assert read.depth == 0 and read.tags.count("table") == 2
    rows = len(found.facts.layers) + len(found.facts.adapters) + 1 + len(found.facts.problems)
    assert read.tags.count("tr") == rows + 3, "and two heads, and what was asked for"
    data = json.loads(found.to_json())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert data["problems"][0]["patch"] == "bitsandbytes-int8-plain-weight" and data["layers"][0]["kind"] == "Embedding"
    assert repr(found) == "<inspection of PeftModel: 1 problem>"
