"""The dtype of adapters on quantized layers, where a user says that it is not to be float32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import patches
from patches.engine.gate import satisfied

ID = "peft-autocast-adapter-dtype"
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small Llama in each 16-bit dtype, saved."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    found = {}
    for dtype in HALVES:
        torch.manual_seed(0)
        found[dtype] = str(tmp_path_factory.mktemp("llama"))
        transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(found[dtype])
    return found


def loaded(folder: str, dtype: torch.dtype, bits: int):
    options = (
        {"load_in_8bit": True}
        if bits == 8
        else {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_type": "nf4"}
    )
    config = transformers.BitsAndBytesConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def dtypes(model) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters() if p.requires_grad}


CONFIGS = {"LoRA": {}, "DoRA": {"use_dora": True}}


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_have_the_dtype_of_the_model(name, bits, dtype, folders, tmp_path):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **CONFIGS[name])
    tokens = torch.arange(8)[None]
    with patches.applied():
        model = peft.get_peft_model(loaded(folders[dtype], dtype, bits), config, autocast_adapter_dtype=False)
        assert dtypes(model) == {dtype}
        model(tokens).logits.float().sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        model.save_pretrained(tmp_path)
        expected = model.eval()(tokens).logits
        again = peft.PeftModel.from_pretrained(
            loaded(folders[dtype], dtype, bits), tmp_path, is_trainable=True, autocast_adapter_dtype=False
        )
        assert dtypes(again) == {dtype}
        assert torch.equal(again.eval()(tokens).logits, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_default_stays_float32(bits, folders):
    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    with patches.applied():
        assert dtypes(peft.get_peft_model(loaded(folders[torch.bfloat16], torch.bfloat16, bits), config)) == {
            torch.float32
        }


def test_without_the_patch_adapters_on_int8_are_float32(folders):
    model = loaded(folders[torch.bfloat16], torch.bfloat16, 8)
    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    assert dtypes(peft.get_peft_model(model, config, autocast_adapter_dtype=False)) == {torch.float32}


def test_the_magnitude_of_dora_has_the_compute_dtype(folders):
    """Of a 4-bit layer that was quantized from float32, and computes in bfloat16."""

    def made():
        base = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4")).to("cpu")
        config = peft.LoraConfig(target_modules=["0"], use_dora=True)
        return peft.get_peft_model(base, config, autocast_adapter_dtype=False)

    assert torch.float32 in dtypes(made())
    with patches.applied():
        assert dtypes(made()) == {torch.bfloat16}


def test_a_model_whose_norms_were_cast_to_float32_gets_float32(folders):
    with patches.applied():
        model = peft.prepare_model_for_kbit_training(loaded(folders[torch.bfloat16], torch.bfloat16, 8))
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]), autocast_adapter_dtype=False)
        assert dtypes(model) == {torch.float32}


def int8(bias: torch.dtype | None) -> torch.nn.Module:
    layer = bnb.nn.Linear8bitLt(64, 64, bias=bias is not None, has_fp16_weights=False)
    if bias is not None:
        layer.bias.data = layer.bias.data.to(bias)
    return layer


def test_a_layer_that_tells_nothing_keeps_float32():
    with patches.applied():
        model = peft.get_peft_model(
            torch.nn.Sequential(int8(None)).to("cpu"),
            peft.LoraConfig(target_modules=["0"]),
            autocast_adapter_dtype=False,
        )
        assert dtypes(model) == {torch.float32}


def test_a_module_whose_weight_is_a_number_is_passed_over():
    class Loss(torch.nn.Module):
        weight = 0.5

    base = torch.nn.Sequential(Loss(), torch.nn.LayerNorm(64, dtype=torch.bfloat16), int8(None)).to("cpu")
    with patches.applied():
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["2"]), autocast_adapter_dtype=False)
        assert dtypes(model) == {torch.bfloat16}


def test_the_bias_of_a_layer_tells_more_than_the_model():
    base = torch.nn.Sequential(torch.nn.LayerNorm(64), int8(torch.bfloat16)).to("cpu")
    with patches.applied():
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["1"]), autocast_adapter_dtype=False)
        assert dtypes(model) == {torch.bfloat16}


def test_a_second_adapter_does_not_change_the_first():
    base = torch.nn.Sequential(torch.nn.LayerNorm(64, dtype=torch.bfloat16), int8(None)).to("cpu")
    with patches.applied():
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["1"]))
        model.add_adapter("more", peft.LoraConfig(target_modules=["1"]), **(
            {"autocast_adapter_dtype": False} if satisfied("peft>=0.18") else {}
        ))  # fmt: skip
        layer = model.base_model.model[1]
        assert layer.lora_A["default"].weight.dtype == torch.float32
        if satisfied("peft>=0.18"):  # before, it has no such argument
            assert layer.lora_A["more"].weight.dtype == torch.bfloat16


@pytest.mark.skipif(not satisfied("peft>=0.20"), reason="HiRA came with peft 0.20")
def test_a_layer_that_computes_in_float32_keeps_it():
    """AdaLoRA, HiRA and FRoD cast their input to float32: with an adapter in 16 bits they would raise an error."""
    base = torch.nn.Sequential(torch.nn.LayerNorm(64, dtype=torch.bfloat16), int8(None)).to("cpu")
    base.is_loaded_in_8bit = True
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with patches.applied():
        model = peft.get_peft_model(base, peft.HiraConfig(target_modules=["1"]), autocast_adapter_dtype=False)
        assert dtypes(model) == {torch.float32}
        model(x).float().sum().backward()


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
def test_unquantized_layers_are_as_before(dtype):
    def made():
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=dtype))
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]), autocast_adapter_dtype=False)

    before = made()
    with patches.applied(ID):
        after = made()
        assert all(map(torch.equal, before.parameters(), after.parameters()))
        assert dtypes(after) == {dtype}
