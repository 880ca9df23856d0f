"""DBRX, the one mixture of transformers whose experts are in parameters of two dimensions: named, and left as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

import patches  # noqa: E402
from patches.repairs.reproducers.log_records import record_logs  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = transformers.DbrxConfig(
        d_model=64, n_heads=4, n_layers=1, vocab_size=64, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dbrx")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )


def test_it_is_named_with_the_reason_and_nothing_changes(folder):
    model = load(folder)
    with torch.no_grad():
        expected = model(torch.arange(20)[None]).logits
    name = "transformer.blocks.0.ffn.experts.mlp.w1"
    with pytest.raises(ValueError, match=rf"it keeps them in parameters of two dimensions \({name} and 2 more\)"):
        patches.quantize_experts(model)
    assert "2-D parameters of all experts: nothing quantizes these" in str(patches.inspect(model))
    with patches.applied("transformers-experts-of-linear-layers", "transformers-experts-not-quantized"):
        with record_logs() as said, patches.quantize_experts():
            again = load(folder)
    messages = " ".join(record.getMessage() for record in said)
    assert "quantize_experts changed nothing: the experts of this DbrxForCausalLM cannot be quantized" in messages
    assert "are not quantized (196.6 kB" in messages and name in messages
    for each in (model, again):
        assert type(each.get_parameter(name)) is torch.nn.Parameter
        with torch.no_grad():
            assert torch.equal(each(torch.arange(20)[None]).logits, expected)


def test_what_the_warning_of_an_upcast_advises_casts_experts_alone(folder):
    peft = pytest.importorskip("peft")
    model = load(folder).bfloat16()
    packed = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    with patches.applied("peft-upcasts-experts"), record_logs() as said:
        peft.prepare_model_for_kbit_training(model)
    (message,) = (record.getMessage() for record in said if "casts the experts" in record.getMessage())
    advice = re.search(r"\((for .+?): (if .+?): (p\.data = .+?\))\) and train", message)
    exec("{}:\n {}:\n  {}".format(*advice.groups()), {"model": model, "torch": torch})
    assert packed and all(model.get_parameter(name).dtype == torch.uint8 for name in packed)
    assert all(torch.equal(model.get_parameter(name), p) for name, p in packed.items())
    found = {name: p.dtype for name, p in model.named_parameters() if name not in packed}
    assert {dtype for name, dtype in found.items() if ".experts." in name} == {torch.bfloat16}
    assert {dtype for name, dtype in found.items() if ".experts." not in name} == {torch.float32}


@pytest.mark.release("the walk over all mixtures, tests/experts/walk.py")
def test_no_other_model_of_transformers_has_such_experts():
    """By the sources of all models, built or not: each parameter of a class of experts that is no bias has three sizes."""
    found, flat = 0, set()
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = file.read_text()
        for node in ast.parse(source).body if "Expert" in source else ():
            if isinstance(node, ast.ClassDef) and "Expert" in node.name:
                sizes = dict(_parameters(node))
                found += bool(sizes)
                flat |= {node.name for name, count in sizes.items() if count < 3 and "bias" not in name}
    assert found > 40 and flat == {"DbrxExpertGLU"}


def _parameters(node):
    """``self.name = nn.Parameter(torch.empty(a, b, c))``: the name, and how many sizes."""
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Assign)
            and isinstance(each.value, ast.Call)
            and "nn.Parameter" in ast.unparse(each.value)
        ):
            made = each.value.args[0]
            if isinstance(made, ast.Call):
                sizes = made.args[0].elts if isinstance(made.args[0], ast.Tuple) else made.args
                yield ast.unparse(each.targets[0]), len(sizes)
