"""HRA, PEANuT, DEFT, HiRA, Bone and MiSS on quantized layers, against the same adapter on the weights that these stand for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from torch.nn.utils import prune

import patches
from patches.engine.gate import satisfied
from tests.repairs.peft import stood_for
from tests.repairs.peft.stood_for import X, gradients, models, relative_error

pytestmark = pytest.mark.one_in(2)

ID = "peft-packed-weights-as-values"

ON = {"target_modules": ["0", "2"]}
TUNERS = {"HRA": lambda: peft.HRAConfig(r=4, **ON)}
if satisfied("peft<0.19"):
    TUNERS["Bone"] = lambda: peft.BoneConfig(r=4, init_weights="bat", **ON)
if satisfied("peft>=0.17,<0.20"):
    TUNERS["MiSS"] = lambda: peft.MissConfig(r=4, init_weights="bat", **ON)
if satisfied("peft>=0.19"):
    TUNERS["PEANuT"] = lambda: peft.PeanutConfig(**ON)
if satisfied("peft>=0.20"):
    TUNERS["DEFT"] = lambda: peft.DeftConfig(**ON)
    TUNERS["HiRA"] = lambda: peft.HiraConfig(r=4, **ON)
READ_IN_FORWARD = [name for name in TUNERS if name != "DEFT"]


def with_adapter(model: torch.nn.Module, name: str, trained: bool = True) -> torch.nn.Module:
    return stood_for.with_adapter(model, TUNERS[name](), trained)


@pytest.mark.skipif(satisfied("peft<0.16"), reason="before peft 0.16 HRA and Bone raise an error on INT8")
@pytest.mark.parametrize("name", TUNERS)
def test_without_the_patch_packed_weights_are_taken_for_values(name):
    model, plain = models(8)
    assert relative_error(with_adapter(model, name)(X), with_adapter(plain, name)(X)) > 0.3


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_it_equals_the_same_adapter_on_the_weights_that_are_stood_for(name, bits, bias):
    model, plain = models(bits, bias)
    with patches.applied():
        stood_for.assert_equal_to_dense(with_adapter(model, name), with_adapter(plain, name), at_least=3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_one_that_begins_as_the_identity_is_the_identity(name, bits):
    model, plain = models(bits)
    with patches.applied():
        assert relative_error(with_adapter(model, name, trained=False)(X), plain(X)) < 0.02


@pytest.mark.parametrize("name", TUNERS)
def test_unquantized_layers_are_bit_identical(name):
    stood_for.assert_unquantized_layers_are_as_before(ID, lambda model: with_adapter(model, name))


@pytest.mark.parametrize("name", TUNERS)
def test_a_base_that_trains_too_gets_the_gradient_that_it_had(name):
    def trained() -> list[torch.Tensor | None]:
        model = with_adapter(models(8)[1], name)
        model.requires_grad_(True)
        model(X).sum().backward()
        return [p.grad for p in model.parameters()]

    before = trained()
    with patches.applied(ID):
        for grad, expected in zip(trained(), before, strict=True):
            assert (grad is None and expected is None) or torch.equal(grad, expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_a_merge_into_packed_weights_is_an_error_that_changes_nothing(name, bits):
    model, _ = models(bits)
    with patches.applied():
        model = with_adapter(model, name)
        before = model(X)
        with pytest.raises(NotImplementedError if bits == 8 else RuntimeError) as raised:
            model.merge_adapter()
        if bits == 8:
            assert "holds packed INT8 weights" in str(raised.value) and "dequantize()" in str(raised.value)
        assert torch.equal(model(X), before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TUNERS)
def test_a_saved_adapter_gives_the_same_outputs(name, bits, tmp_path):
    with patches.applied():
        model = with_adapter(models(bits)[0], name).eval()
        expected = model(X)
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(models(bits)[0], tmp_path).eval()
        assert torch.equal(again(X), expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", READ_IN_FORWARD)
def test_compiled_it_is_the_same(name, bits):
    with patches.applied():
        model = with_adapter(models(bits)[0], name)
        eager = gradients(model)
        model.zero_grad()
        for grad, expected in zip(gradients(torch.compile(model, backend="aot_eager")), eager, strict=True):
            assert relative_error(grad, expected) < 1e-5


@pytest.mark.skipif("HiRA" not in TUNERS, reason="peft has HiRA from 0.20 on")
@pytest.mark.parametrize("bits", [8, 4])
def test_hira_in_another_dtype_than_a_weight_is_dequantized_to(bits):
    model, plain = models(bits)
    with patches.applied():
        model, plain = (with_adapter(m, "HiRA").to(torch.bfloat16) for m in (model, plain))
        assert relative_error(model(X.bfloat16()), plain(X.bfloat16())) < 0.05


@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
def test_dora_reads_the_weight_that_a_pruned_layer_stands_for(ran):
    """Its weight is a plain tensor, made again in each forward. Without the plugin the layer does not run at all."""
    with patches.applied():
        model, plain = models(8)
        if ran:
            model(X)
        for layer in model[::2]:
            prune.identity(layer, "weight")
        adapted = []
        for made in (model, plain):
            torch.manual_seed(1)
            config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False, use_dora=True)
            adapted.append(peft.get_peft_model(made, config).train())
        for grad, expected in zip(*(gradients(each) for each in adapted), strict=True):
            assert relative_error(grad, expected) < 0.05
