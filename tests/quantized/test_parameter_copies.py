"""Files of quantized parameters: whoever could read them before can read them, with the patches on either side."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Embedding8bit, EmbeddingNF4, Int8Params, Linear4bit, Linear8bitLt, Params4bit

import patches
from patches.engine.gate import satisfied
from tests.repairs.tagged import Tagged8

FOUR, EIGHT = "bitsandbytes-params4bit-copies", "bitsandbytes-int8-copies"
INT8_BY_CLASS = satisfied("bitsandbytes>=0.47")
"""Before, whoever loads such a pickle without the plugin and moves the weight spoils it."""


def four_bit(quantized: bool = True) -> Linear4bit:
    torch.manual_seed(0)
    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
    return layer.to("cpu") if quantized else layer


def int8(quantized: bool = True, fp16: bool = False) -> Linear8bitLt:
    torch.manual_seed(0)
    layer = Linear8bitLt(64, 64, has_fp16_weights=fp16)
    return layer.to("cpu") if quantized else layer


def things() -> dict[str, Any]:
    """What people save: parameters in dicts and lists, alone, with what hangs on them, and whole modules."""
    made: dict[str, Any] = {}
    for name, layer in (("four", four_bit()), ("int8", int8()), ("fp16", int8(fp16=True)), ("raw8", int8(False))):
        made[f"{name} parameters"] = dict(layer.named_parameters())
        made[f"{name} list"] = list(layer.parameters())
        made[f"{name} weight"] = layer.weight
        made[f"{name} state dict"] = layer.state_dict()
        made[f"{name} kept vars"] = layer.state_dict(keep_vars=True)
        made[f"{name} layer"] = torch.nn.Sequential(layer)
    made["raw4 weight"] = Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    made["raw4 in a layer"] = four_bit(quantized=False)
    made["four embedding"] = EmbeddingNF4(32, 64).to("cpu")
    made["int8 embedding"] = Embedding8bit(32, 64).to("cpu")
    return made


READ = """
import json, sys, torch, bitsandbytes, patches
from pathlib import Path
if sys.argv[1] == "patched":
    patches.apply()

def weight(thing):
    if isinstance(thing, torch.nn.Sequential):
        thing = thing[0]
    if isinstance(thing, torch.nn.Module):
        return thing.weight
    return thing["weight"] if isinstance(thing, dict) else thing[0] if isinstance(thing, list) else thing

def read(path, **how):
    try:
        w = weight(torch.load(path, **how))
    except Exception as error:
        return type(error).__name__
    statistics = getattr(w, "quant_state", None) is not None or getattr(w, "SCB", None) is not None
    return [type(w).__name__, statistics, w.requires_grad]

folders = map(Path, sys.argv[2:])
print(json.dumps([{p.stem: [read(p), read(p, weights_only=False)] for p in sorted(f.glob("*.pt"))} for f in folders]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, forked: Callable[..., str]) -> dict[tuple[str, str], dict]:
    """By how it was written and how it was read: of each file, what it gave by default and with weights_only=False."""
    folders: dict[str, Path] = {writer: tmp_path_factory.mktemp(writer) for writer in ("unpatched", "patched")}
    for writer, folder in folders.items():
        if writer == "patched":
            patches.apply()
        for name, thing in things().items():
            torch.save(thing, folder / f"{name}.pt")
        patches.revert()
    found = {}
    for reader in folders:
        read = json.loads(forked(READ, reader, *map(str, folders.values())).splitlines()[-1])
        found |= {(writer, reader): outcome for writer, outcome in zip(folders, read, strict=True)}
    return found


WAYS = pytest.mark.parametrize(
    "way",
    [("unpatched", "patched"), ("patched", "unpatched"), ("patched", "patched")],
    ids="written {0[0]}, read {0[1]}".format,
)


@WAYS
def test_what_is_read_by_default_is_what_it_was(outcomes, way):
    before, now = outcomes["unpatched", "unpatched"], outcomes[way]
    assert before.keys() == now.keys() == things().keys()
    assert {name: by_default for name, (by_default, _) in now.items()} == {n: d for n, (d, _) in before.items()}
    readable = {name for name, (by_default, _) in before.items() if isinstance(by_default, list)}
    assert {"int8 parameters", "int8 list", "int8 kept vars", "fp16 weight", "raw8 weight", "raw4 weight"} <= readable


def expected_class(name: str, writer: str, reader: str) -> str:
    """A 4-bit weight brings its layer along in any file, and is given its class by whoever knows it."""
    if name.endswith("state dict"):
        return "Tensor"
    if name.startswith(("four", "raw4")):
        return "Params4bit" if "patched" in (writer, reader) and name != "raw4 weight" else "Parameter"
    return "Int8Params" if reader == "patched" and name.endswith(("layer", "embedding")) else "Parameter"


@WAYS
def test_the_class_comes_back_where_the_file_may_name_it_or_holds_the_layer(outcomes, way):
    before, now = outcomes["unpatched", "unpatched"], outcomes[way]
    for name, (_, (cls, statistics, requires_grad)) in now.items():
        assert cls == expected_class(name, *way), name
        assert before[name][1][0] == expected_class(name, "unpatched", "unpatched"), name
        assert [statistics, requires_grad] == before[name][1][1:], name


@pytest.mark.parametrize("make", [four_bit, int8])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(make, protocol):
    """A protocol that ``torch.load`` refuses by default may name the class of a bare parameter; not on 0.46.1."""
    layer = make()
    with patches.applied(FOUR, EIGHT):
        weight = pickle.loads(pickle.dumps(layer.weight, protocol))
        whole = pickle.loads(pickle.dumps(layer, protocol))
    assert type(whole.weight) is type(layer.weight)
    assert type(weight) is (
        type(layer.weight) if make is four_bit or (protocol >= 4 and INT8_BY_CLASS) else torch.nn.Parameter
    )
    assert torch.equal(weight.data, layer.weight.data) and torch.equal(whole.weight.data, layer.weight.data)
    x = torch.randn(3, 64)
    assert torch.equal(whole(x), layer(x))


def test_a_layer_shares_its_weight_with_whoever_shared_it():
    """The optimizer's, a tied layer's: the object is given its class where it is."""
    one, two = int8(fp16=True), int8(fp16=True)
    two.weight = one.weight
    saved = {"model": torch.nn.Sequential(one, two), "optimizer": torch.optim.SGD(one.parameters(), lr=0.1)}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    with patches.applied(EIGHT):
        loaded = torch.load(file, weights_only=False)
    weight = loaded["model"][0].weight
    assert type(weight) is Int8Params and weight.is_leaf and weight.requires_grad
    assert loaded["model"][1].weight is weight and loaded["optimizer"].param_groups[0]["params"][0] is weight


def reduce_of_0_1_0(weight: Any) -> tuple[Any, ...]:
    """How version 0.1.0 of this package pickled them."""
    if isinstance(weight, Params4bit):
        state = weight.__getstate__()
        return type(weight), (state["data"], weight.requires_grad), state
    arguments = weight.data, weight.requires_grad, weight.has_fp16_weights, weight.CB, weight.SCB
    return type(weight), arguments, {"mark": 1}, None, None, torch._utils._set_obj_state


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("make", [four_bit, int8])
def test_files_of_0_1_0(make, patched, monkeypatch):
    layer, x = make(), torch.randn(3, 64)
    with monkeypatch.context() as old:
        old.setattr(type(layer.weight), "__reduce_ex__", lambda self, protocol: reduce_of_0_1_0(self), raising=False)
        file = io.BytesIO()
        torch.save({"layer": layer, "weight": layer.weight}, file)
    file.seek(0)
    with patches.applied(*([FOUR, EIGHT] if patched else ["accelerate-int8-cpu-round-trip"])):
        loaded = torch.load(file, weights_only=False)
    assert type(loaded["weight"]) is type(layer.weight) and loaded["layer"].weight is loaded["weight"]
    assert torch.equal(loaded["layer"](x), layer(x))


class Tagged4(Params4bit):
    def __new__(cls, data=None, *, tag="none", **options):
        self = Params4bit.__new__(cls, data, **options)
        self.tag = tag
        return self


class Slots8(Int8Params):
    __slots__ = ("tag",)

    def __new__(cls, data=None, **options):
        self = Int8Params.__new__(cls, data, requires_grad=False)
        self.tag = "slot"
        return self


SUBCLASSES = {
    "Params4bit": lambda: Tagged4(torch.randn(64, 64), tag="mine", quant_type="nf4"),
    "quantized Params4bit": lambda: Tagged4(torch.randn(64, 64), tag="mine", quant_type="nf4").to("cpu"),
    "Int8Params": lambda: Tagged8("mine", torch.randn(8, 8)),
    "quantized Int8Params": lambda: Tagged8("mine", torch.randn(8, 8)).to("cpu"),
}


@pytest.mark.parametrize("make", SUBCLASSES.values(), ids=SUBCLASSES)
@pytest.mark.parametrize("how", [copy.copy, lambda p: pickle.loads(pickle.dumps(p))], ids=["copy", "pickle"])
def test_subclasses_with_a_constructor_of_their_own(make, how):
    weight = make()
    with patches.applied(FOUR, EIGHT):
        made = how(weight)
    kept = how is copy.copy or INT8_BY_CLASS or isinstance(weight, Params4bit)
    assert type(made) is (type(weight) if kept else torch.nn.Parameter) and torch.equal(made.data, weight.data)
    if not (how is copy.copy and isinstance(weight, Params4bit)):  # there bitsandbytes copies what it knows of
        assert made.tag == "mine"
    for name in ("SCB", "CB"):
        assert getattr(weight, name, None) is None or torch.equal(getattr(made, name), getattr(weight, name))
    assert (getattr(made, "quant_state", None) is None) == (getattr(weight, "quant_state", None) is None)


def test_a_subclass_that_is_laid_out_otherwise_is_pickled_as_before():
    weight = Slots8(torch.randn(8, 8))
    expected = pickle.loads(pickle.dumps(weight))
    with patches.applied(EIGHT):
        made = pickle.loads(pickle.dumps(weight))
    assert type(made) is type(expected) is torch.nn.Parameter and made.tag == expected.tag == "slot"
