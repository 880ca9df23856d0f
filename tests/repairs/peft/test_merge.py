"""Adapters merged into quantized layers, against quantizing the weights that the merged layers should hold."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import patches
from patches.engine.gate import satisfied

pytestmark = [
    pytest.mark.one_in(2),
    pytest.mark.filterwarnings("ignore:Merge|Unmerge|Adapter cannot be set:UserWarning"),
]
X = torch.linspace(-2, 2, 6 * 64).view(2, 3, 64).cos()
IDS = ("peft-merge-randlora", "peft-merge-oft", "peft-merge-into-packed-weights")
PUT_BACK = ("peft-unmerge", "peft-unmerge")  # OFT's own unmerge from INT8 is 0.18 off
IN_4BIT = ("bitsandbytes-params4bit-meta",)  # without it RandLoRA leaves a 4-bit layer unquantized

RIGHT = {}
if satisfied("peft>=0.16"):
    RIGHT["RandLoRA"] = lambda: peft.RandLoraConfig(r=4, target_modules=["0"], init_weights=False)
if satisfied("peft>=0.16,<0.21"):
    RIGHT["OFT"] = lambda: peft.OFTConfig(r=0, oft_block_size=16, target_modules=["0"], init_weights=False)
REFUSED = {}
if satisfied("peft>=0.16"):
    REFUSED["C3A"] = lambda: peft.C3AConfig(block_size=16, target_modules=["0"], init_weights="gaussian")
if satisfied("peft>=0.17,<0.20"):
    REFUSED["MiSS"] = lambda: peft.MissConfig(r=4, target_modules=["0"], init_weights=False)
if satisfied("peft<0.19"):
    REFUSED["Bone"] = lambda: peft.BoneConfig(r=4, target_modules=["0"], init_weights=False)
if satisfied("peft>=0.20"):
    BACKEND = {
        "BOFT": lambda: peft.BOFTConfig(boft_block_size=16, target_modules=["0"], init_weights=False),
        "MiSS": lambda: peft.MissConfig(r=4, target_modules=["0"], init_weights=False),
        "SHiRA": lambda: peft.ShiraConfig(r=4, target_modules=["0"], init_weights=False),
    }
else:
    BACKEND = {}


def layer(bits: int, out: int, bias: bool = True) -> torch.nn.Module:
    if bits == 8:
        return bnb.nn.Linear8bitLt(64, out, bias=bias, has_fp16_weights=False)
    return bnb.nn.Linear4bit(64, out, bias=bias, compute_dtype=torch.float32, quant_type="nf4")


def adapted(make, bits: int, out: int = 64) -> torch.nn.Module:
    torch.manual_seed(0)
    base = torch.nn.Sequential(layer(bits, out) if bits < 16 else torch.nn.Linear(64, out)).to("cpu")
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = bits == 8, bits == 4  # as from_pretrained says it
    torch.manual_seed(1)
    return peft.get_peft_model(base, make()).eval()


@torch.no_grad()
def quantized_again(model: torch.nn.Module, bits: int, out: int) -> torch.nn.Module:
    """A layer of bitsandbytes that quantizes the weight which the layer with its adapter stands for."""
    bias = model(torch.zeros(1, 64))[0]
    again = layer(bits, out)
    again.weight.data.copy_((model(torch.eye(64)) - bias).T)
    again.bias.data.copy_(bias)
    return again.to("cpu")


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    return ((result.double() - reference.double()).norm() / reference.double().norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "OFT" or satisfied("peft<0.20")])
def test_without_the_patch_another_weight_is_merged(name):
    model = adapted(RIGHT[name], 8)
    before = model(X)
    model.merge_adapter()
    assert relative_error(model(X), before) > 0.3


@torch.no_grad()
@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
@pytest.mark.parametrize("out", [64, 48, 96])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [*RIGHT, *BACKEND])
def test_a_merge_is_as_good_as_quantizing_the_merged_weight(name, bits, out, safe):
    with patches.applied(*IDS, *IN_4BIT):
        model = adapted((RIGHT | BACKEND)[name], bits, out)
        before, reference = model(X), quantized_again(model, bits, out)(X)
        model.merge_adapter(safe_merge=safe)
        rounding = relative_error(reference, before)
        assert relative_error(model(X), before) < 2 * rounding
        assert 0 < rounding < (0.03 if bits == 8 else 0.2)


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", RIGHT)
def test_unloaded_and_taken_out_again(name, bits):
    with patches.applied(*IDS, *IN_4BIT, *PUT_BACK):
        model = adapted(RIGHT[name], bits)
        before = model(X)
        model.merge_adapter()
        merged = model(X)
        assert torch.equal(model.merge_and_unload()(X), merged)
        model = adapted(RIGHT[name], bits)
        model.merge_adapter()
        model.unmerge_adapter()
        assert relative_error(model(X), before) < (0.05 if bits == 8 else 0.25)


@pytest.mark.skipif("OFT" not in RIGHT or satisfied("peft<0.20"), reason="of peft 0.20 only")
@pytest.mark.parametrize("bits", [8, 4])
def test_oft_can_be_added_to_a_quantized_model(bits):
    with pytest.raises(TypeError, match="'config'"):
        adapted(RIGHT["OFT"], bits)
    with patches.applied("peft-merge-oft"):
        assert relative_error(adapted(RIGHT["OFT"], bits)(X), adapted(RIGHT["OFT"], 16)(X)) < 0.2


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_without_the_patch_the_adapter_is_lost(name):
    model = adapted(REFUSED[name], 8)
    before = model(X)
    with model.disable_adapter():
        plain = model(X)
    model.merge_adapter()
    assert relative_error(model(X) - plain, before - plain) > 0.9


@torch.no_grad()
@pytest.mark.parametrize("unload", [False, True], ids=["merge", "unload"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_a_merge_into_packed_weights_is_an_error_that_changes_nothing(name, bits, unload):
    with patches.applied(*IDS):
        model = adapted(REFUSED[name], bits)
        before = model(X)
        with pytest.raises(NotImplementedError if bits == 8 else RuntimeError) as raised:
            model.merge_and_unload() if unload else model.merge_adapter()
        if bits == 8:
            assert "holds packed INT8 weights" in str(raised.value) and "dequantize()" in str(raised.value)
        assert torch.equal(model(X), before)


@torch.no_grad()
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_unquantized_layers_are_merged_into_bit_for_bit_as_before(name):
    make = (RIGHT | REFUSED)[name]
    before = adapted(make, 16)
    before.merge_adapter()
    with patches.applied(*IDS):
        after = adapted(make, 16)
        after.merge_adapter()
        assert torch.equal(after(X), before(X))


NO_MERGE = {
    "ia3": lambda: peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["0"], total_step=10),
}


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NO_MERGE)
def test_tuners_without_a_merge_say_so_by_name(name, bits):
    model = adapted(NO_MERGE[name], bits)
    with pytest.raises(NotImplementedError) as bare:
        model.merge_adapter()
    assert not str(bare.value)
    with patches.applied("peft-merge-into-packed-weights"):
        before = model(X)
        for call in (model.merge_adapter, model.base_model.model[0].unmerge):
            with pytest.raises(
                NotImplementedError, match=rf"'.*0.base_layer' holds .*the tuner '{name}'.*dequantize\(\)"
            ):
                call()
        assert torch.equal(model(X), before)


@torch.no_grad()
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("safe", [False, *([True] if satisfied("peft>=0.15") else [])])
def test_lora_of_a_model_that_does_not_say_it_is_quantized_is_refused(safe, dora):
    """peft gives it the layer for unquantized weights, whose safe merge loses the adapter silently."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(layer(8, 48)).to("cpu")
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, use_dora=dora)
    with patches.applied("peft-merge-into-packed-weights", *(["peft-dora-replaces-weight"] if dora else [])):
        model = peft.get_peft_model(base, config).eval()
        before = model(X)
        with pytest.raises(
            NotImplementedError, match=r"0.base_layer' holds packed INT8 weights, .*'lora'.*is_loaded_in_8bit"
        ):
            model.merge_adapter(safe_merge=safe)
        assert torch.equal(model(X), before)
