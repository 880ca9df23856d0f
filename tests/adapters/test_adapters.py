"""Each day a slice of the product: each option of each adapter once, on a layer and in a dtype that its name draws."""

from __future__ import annotations

import itertools
from zlib import crc32

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import patches
from patches.engine.gate import satisfied
from tests.adapters import judge, options, subject, trials
from tests.adapters.options import Option
from tests.adapters.subject import Asked

pytestmark = pytest.mark.skipif(
    not satisfied("peft>=0.19"),
    reason="older peft is tried by `python -m tests.adapters`, on the stack that goes with it",
)
CELLS = [
    (Asked(kind, dtype, flagged), autocast)
    for kind, dtype, flagged, autocast in itertools.product(subject.KINDS, subject.DTYPES, (True, False), (True, False))
    if kind != "nf4-stored" or satisfied("bitsandbytes>=0.47")  # before, a CPU dequantizes from uint8 storage only
]
CONFIGURATIONS = [cls.__name__ for cls in options.configurations()] if satisfied("peft>=0.19") else []

NEEDS = {
    "AdamssConfig": "it needs scikit-learn",
    "AdaptionPromptConfig": "it needs a model of transformers",
    "PolyConfig": "it needs ids of tasks",
    "ShadowConfig": "it needs a model of transformers",
}


def drawn(option: Option) -> tuple[Asked, bool]:
    return CELLS[crc32(str(option).encode()) % len(CELLS)]


def differences(option: Option, asked: Asked, autocast: bool) -> list[str] | None:
    """None if ``nn.Linear`` does not take the option."""
    reference = trials.run(option, asked, autocast=autocast, plain=True)
    found = trials.run(option, asked, autocast=autocast, plain=False, adapter=reference.adapter)
    said = judge.unknown(trials.name(option, asked, autocast), judge.differences(asked, found, reference))
    return None if "made" in reference.errors and not said else said


@pytest.mark.one_in(2)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_quantized_layer_gets_what_nn_linear_gets(configuration):
    own = [option for option in options.options() if option.config == configuration]
    with patches.applied():
        found = {trials.name(option, *drawn(option)): differences(option, *drawn(option)) for option in own}
    if all(said is None for said in found.values()) and configuration in NEEDS:
        pytest.skip(f"peft does not take one layer alone: {NEEDS[configuration]}")
    assert any(said is not None for said in found.values()), "no option of this class is tried"
    assert {name: said for name, said in found.items() if said} == {}


SEEN = {
    "an option that is ignored": (
        Option("LoraConfig", "init_lora_weights", "orthogonal"),
        "nf4-stored",
        torch.float32,
        True,
    ),
    "an adapter in another dtype": (Option("LoraConfig", "", None), "int8", torch.bfloat16, False),
    "packed weights as values": (Option("HRAConfig", "", None), "int8", torch.float32, True),
    "a merge that loses the adapter": (Option("RandLoraConfig", "", None), "int8", torch.float32, True),
}


@pytest.mark.parametrize("what", SEEN)
def test_the_judge_sees(what):
    option, kind, dtype, autocast = SEEN[what]
    if kind == "nf4-stored" and not satisfied("bitsandbytes>=0.47"):
        pytest.skip("before bitsandbytes 0.47 a CPU dequantizes from uint8 storage only")
    asked = Asked(kind, dtype, flagged=False)
    assert differences(option, asked, autocast)
    with patches.applied():
        assert differences(option, asked, autocast) == []


def test_every_option_of_lora_is_found():
    found = {option.field for option in options.options() if option.config == "LoraConfig"}
    assert found >= {
        "use_dora",
        "init_lora_weights",
        "use_rslora",
        "lora_bias",
        "rank_pattern",
        "alora_invocation_tokens",
    }
    methods = {
        option.value
        for option in options.options()
        if (option.config, option.field) == ("LoraConfig", "init_lora_weights")
    }
    assert methods >= {
        False,
        "gaussian",
        "eva",
        "olora",
        "pissa",
        "pissa_niter_4",
        "corda",
        "loftq",
        "orthogonal",
        "lora_ga",
    }
