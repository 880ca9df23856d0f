"""Loading a mixture of experts says how much of it is not quantized."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import patches

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ID = "transformers-experts-not-quantized"
SIZE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


def save(folder: Path, kind: str) -> Path:
    from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

    chosen = {"num_experts_per_tok": 2}
    config = {
        "llama": lambda: LlamaConfig(**SIZE),
        "mixtral": lambda: MixtralConfig(**SIZE, num_local_experts=4, **chosen),
        "qwen3": lambda: Qwen3MoeConfig(**SIZE, num_experts=4, moe_intermediate_size=32, head_dim=16, **chosen),
    }[kind]()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, **options) -> torch.nn.Module:
    given = {"quantization_config": transformers.BitsAndBytesConfig(**options)} if options else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, **given
    )


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "bnb_patches"]


@pytest.fixture(autouse=True)
def listening(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("bnb_patches"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="bnb_patches")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
@pytest.mark.parametrize("options", [NF4, {"load_in_8bit": True}], ids=["4bit", "int8"])
def test_said_once_with_the_figure(tmp_path, caplog, kind, options):
    save(tmp_path, kind)
    expected = load(tmp_path, **options)
    assert not warnings(caplog)
    with patches.applied(ID):
        model = load(tmp_path, **options)
    (message,) = warnings(caplog)
    whole = sum(parameter.numel() for parameter in load(tmp_path).parameters())
    experts = [p for n, p in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))]
    share = sum(p.numel() for p in experts) / whole
    assert len(experts) == 4 and share > 0.5
    assert message.startswith(f"{100 * share:.0f} % of the parameters of this {type(model).__name__}")
    assert f"{sum(p.nbytes for p in experts) / 1000:.1f} kB" in message and "bfloat16" in message
    assert "model.layers.0.mlp.experts.gate_up_proj and 3 more" in message
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_said_again_of_what_is_loaded_again(tmp_path, caplog):
    """A checkpoint that is quantized already, whose experts are not."""
    save(tmp_path / "float", "qwen3")
    load(tmp_path / "float", **NF4).save_pretrained(tmp_path / "four bit")
    with patches.applied(ID):
        load(tmp_path / "four bit")
    (message,) = warnings(caplog)
    assert "are not quantized" in message


@pytest.mark.parametrize(("kind", "options"), [("llama", NF4), ("qwen3", {})], ids=["dense", "bf16"])
def test_silent_where_there_is_nothing_to_say(tmp_path, caplog, kind, options):
    save(tmp_path, kind)
    with patches.applied(ID):
        load(tmp_path, **options)
    assert not warnings(caplog)


def test_what_it_advises_can_be_done(tmp_path, caplog):
    save(tmp_path, "qwen3")
    with patches.applied(ID):
        model = load(tmp_path, **NF4)
        assert "patches.quantize_experts(model) quantizes them" in warnings(caplog)[0]
        ids = torch.arange(8)[None]
        before = model(ids).logits.float()
        after = patches.quantize_experts(model)(ids).logits.float()
    assert 0 < (after - before).norm() < 0.3 * before.norm()


def test_a_model_whose_experts_are_quantized_is_not_warned_about(tmp_path):
    from patches.experts.unquantized import find_unquantized_experts

    model = load(save(tmp_path, "qwen3"), **NF4)
    assert find_unquantized_experts(model) is not None
    assert find_unquantized_experts(patches.quantize_experts(model)) is None
