"""Codes without statistics: a layer takes its own, in every form that it took them in before, and no others."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import patches
from patches.engine.gate import satisfied
from patches.quantized.own_packed_weights import is_own_packed_weight
from tests.repairs.tagged import Tagged4

pytestmark = pytest.mark.one_in(2)

FOUR = ("bitsandbytes-linear4bit-load-state-dict",)
EIGHT = tuple(f"bitsandbytes-int8-{name}" for name in ("codes-without-scales", "load-state-dict", "plain-weight"))
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))


def four_bit(seed: int = 0, storage: torch.dtype = torch.uint8, nested: bool = True) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", "quant_storage": storage}
    options["compress_statistics"] = nested
    return torch.nn.Sequential(*(Linear4bit(64, 64, **options) for _ in range(2))).to("cpu")


def int8(seed: int = 0, warm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(Linear8bitLt(64, 64, has_fp16_weights=False) for _ in range(2)))
    model = model.requires_grad_(False).to("cpu")
    if warm:
        model(X)
    return model


MODELS = {
    "4-bit": (four_bit, FOUR),
    "4-bit in float32": (lambda seed=0: four_bit(seed, torch.float32, False), FOUR),
    "INT8": (int8, EIGHT),
    "INT8 after a forward": (lambda seed=0: int8(seed, warm=True), EIGHT),
}
if not satisfied("bitsandbytes>=0.47"):
    del MODELS["4-bit in float32"]  # which 0.46.1 cannot compute with on a CPU
DICTS = {
    "the parameters": lambda m: dict(m.named_parameters()),
    "clones": lambda m: {n: p.detach().clone() for n, p in m.named_parameters()},
    "the memory": lambda m: {n: p.detach() for n, p in m.named_parameters()},
    "the state dict without statistics": lambda m: {n: m.state_dict()[n] for n, _ in m.named_parameters()},
    "the first layer": lambda m: {n: p for n, p in m.named_parameters() if n.startswith("0.")},
    "the weights": lambda m: {n: p for n, p in m.named_parameters() if n.endswith("weight")},
    "the biases": lambda m: {n: p for n, p in m.named_parameters() if n.endswith("bias")},
    "nothing": lambda m: {},
}
WHOLE = list(DICTS)[:4]
models = pytest.mark.parametrize("make, ids", MODELS.values(), ids=MODELS)
strictly = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])


@models
@strictly
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("form", DICTS)
def test_a_model_takes_its_own_parameters(form, assign, strict, make, ids):
    model = make()
    expected = copy.deepcopy(model)(X)
    given = DICTS[form](model)
    with patches.applied(*ids):
        if strict and form not in WHOLE:
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict(given)
        else:
            result = model.load_state_dict(given, strict=strict, assign=assign)
            assert not result.unexpected_keys and bool(result.missing_keys) == (form not in WHOLE)
        if ids == FOUR:
            assert type(model[0].weight) is Params4bit
        assert torch.equal(model(X), expected) and torch.equal(model(X), expected)


@models
def test_one_layer_alone(make, ids):
    layer = make()[0]
    expected = copy.deepcopy(layer)(X)
    with patches.applied(*ids):
        for strict in (True, False):
            layer.load_state_dict(dict(layer.named_parameters()), strict=strict)
            assert torch.equal(layer(X), expected)


@models
@strictly
@pytest.mark.parametrize("form", ["clones", "the memory", "the state dict without statistics"])
def test_a_model_takes_no_others(form, strict, make, ids):
    model, other = make(), make(1)
    expected = copy.deepcopy(model)(X)
    with patches.applied(*ids):
        if not strict:  # the rest may come from another file: without it the layer does not compute
            model.load_state_dict(DICTS[form](other), strict=False)
            with pytest.raises(
                RuntimeError, match=r"'0' (was loaded in parts|has a packed INT8 weight without its row)"
            ):
                model(X)
            return
        with pytest.raises(RuntimeError, match=r"weight '0.weight'"):
            model.load_state_dict(DICTS[form](other))
        for p, q in zip(model.parameters(), make().parameters()):
            if not p.is_floating_point() or p.ndim == 2:
                assert torch.equal(p.data.view(torch.uint8), q.data.view(torch.uint8)), "the codes were written"
        model.load_state_dict({n: p for n, p in make().named_parameters() if n.endswith("bias")}, strict=False)
        assert torch.equal(model(X), expected)


@strictly
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("onto_fresh", [False, True], ids=["onto quantized", "onto fresh"])
def test_4_bit_parameters_that_carry_their_statistics(onto_fresh, assign, strict):
    """Of another model: copied with what they carry; assigned, they are the weights."""
    other = four_bit(1, nested=False)
    model = four_bit(0)
    if onto_fresh:
        options = {"compute_dtype": torch.float32, "quant_type": "nf4"}
        model = torch.nn.Sequential(*(Linear4bit(64, 64, **options) for _ in range(2)))
    with patches.applied(*FOUR):
        model.load_state_dict(dict(other.named_parameters()), strict=strict, assign=assign)
        assert torch.equal(model(X), other(X))
        for mine, theirs in zip(model, other):
            assert mine.quant_state is mine.weight.quant_state
            assert (mine.weight is theirs.weight) is (assign and not onto_fresh)
            assert (mine.weight.data_ptr() == theirs.weight.data_ptr()) is assign
        saved = model.state_dict()
    assert all(torch.equal(saved[key], tensor) for key, tensor in other.state_dict().items())


def test_a_layer_that_alone_knows_its_statistics_keeps_them():
    """As one whose weight was remade by someone who knows codes only: bitsandbytes asks the layer then."""
    layer = four_bit()[0]
    expected = copy.deepcopy(layer)(X)
    layer.weight = weight = Params4bit(layer.weight.data, requires_grad=False, bnb_quantized=True)
    with patches.applied(*FOUR):
        layer.load_state_dict(dict(layer.named_parameters()))
        assert layer.weight is weight and torch.equal(layer(X), expected)


def test_a_subclass_with_a_constructor_of_its_own_is_loaded_on_meta():
    saved = four_bit()[0]
    layer = Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4", device="meta")
    layer.weight = Tagged4("mine", layer.weight.data)
    with patches.applied(*FOUR):
        layer.load_state_dict(saved.state_dict(), assign=True)
        assert type(layer.weight) is Tagged4 and layer.weight.tag == "mine" and torch.equal(layer(X), saved(X))


@strictly
def test_int8_parameters_that_carry_their_scales_can_be_assigned(strict):
    other = int8(1)
    expected = copy.deepcopy(other)(X)
    for ids in ((), EIGHT):
        model = int8(0)
        with patches.applied(*ids) if ids else torch.no_grad():
            model.load_state_dict(dict(copy.deepcopy(other).named_parameters()), strict=strict, assign=True)
            assert torch.equal(model(X), expected)


def test_an_offloaded_layer_is_given_what_is_on_meta():
    accelerate = pytest.importorskip("accelerate")
    offloads = ("bitsandbytes-params4bit-meta", "bitsandbytes-int8-scales-lost-on-offload")
    for make in (four_bit, int8):
        model = make()
        expected = copy.deepcopy(model)(X)
        with patches.applied(*FOUR, *EIGHT, *offloads):
            accelerate.cpu_offload(model, torch.device("cpu"))
            model.load_state_dict(dict(model.named_parameters()))
            assert torch.equal(model(X), expected)


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHARDED = pytest.mark.parametrize(
    "make, error",
    [(four_bit, "packed weights without their quantization state"), (int8, "no '0.SCB'")],
    ids=["4-bit", "INT8"],
)


def sharded(make, seed: int = 0) -> torch.nn.Module:
    return fully_shard(make(seed), mesh=init_device_mesh("cpu", (1,)))


@SHARDED
def test_a_sharded_model_takes_its_own_parameters(make, error, one_rank):
    with patches.applied():
        model = sharded(make)
        expected = model(X)
        for form in ("clones", "the parameters", "the first layer"):
            model.reshard()
            model.load_state_dict(DICTS[form](model), strict=form in WHOLE)
            assert torch.equal(model(X), expected)
        model.reshard()
        with pytest.raises(RuntimeError, match=error):
            model.load_state_dict({n: p.detach().clone() for n, p in sharded(make, 1).named_parameters()})
        assert torch.equal(model(X), expected)


@SHARDED
@pytest.mark.parametrize("broadcast", [True, False], ids=["from rank 0", "on every rank"])
def test_a_full_state_dict_of_a_part_leaves_the_rest(broadcast, make, error, one_rank):
    """As adapters are loaded: torch fills up what it lacks with the parameters that the model has."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    with patches.applied():
        whole, model = make(), sharded(make)
        whole[0].bias.data.fill_(1.5)
        set_model_state_dict(model, {"0.bias": torch.full((64,), 1.5)}, options=options)
        assert torch.equal(model(X), whole(X))


@SHARDED
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_a_broadcast_that_brings_no_statistics_is_refused_unless_it_brings_own_codes(strict, make, error, one_rank):
    """torch has written into the weights by the time that they are loaded: they get back what they had."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    with patches.applied():
        model, other = sharded(make), make(1)
        with pytest.raises(RuntimeError, match="'0': rank 0 sent packed weights without their quantization state"):
            set_model_state_dict(model, {n: p.detach() for n, p in other.named_parameters()}, options=options)
        weights = {n: p.detach() for n, p in make().named_parameters()}
        set_model_state_dict(model, weights, options=options)
        assert torch.equal(model(X), make()(X))


@pytest.mark.skipif(not satisfied("bitsandbytes>=0.47"), reason="0.46.1 computes with uint8 storage alone on a CPU")
def test_a_broadcast_in_another_storage_is_refused(one_rank):
    """torch would copy packed bits by their value."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with patches.applied():
        model = sharded(lambda seed=0: four_bit(seed, torch.float16))
        before = model[0].weight.to_local().clone()
        with pytest.raises(RuntimeError, match="'0' stores its packed weight as torch.float16, .* torch.bfloat16"):
            set_model_state_dict(model, four_bit(1, torch.bfloat16).state_dict(), options=options)
        assert torch.equal(model[0].weight.to_local().view(torch.uint8), before.view(torch.uint8))


def test_what_are_own_codes():
    weight = four_bit(storage=torch.float32)[0].weight  # bits that are NaN among them
    assert is_own_packed_weight(weight, weight) and is_own_packed_weight(weight.data.clone(), weight)
    other = weight.data.clone()
    other.view(torch.uint8)[7] ^= 1
    assert not is_own_packed_weight(other, weight) and not is_own_packed_weight(weight.data[:-1], weight)
    assert not is_own_packed_weight(weight.data.to("meta"), weight) and not is_own_packed_weight(
        weight, weight.data.to("meta")
    )
    assert not is_own_packed_weight(weight.data[:1].expand(weight.shape), weight), "the same memory, read otherwise"


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_a_part_of_what_the_layer_has_is_loaded_where_it_may_be_a_part(nested):
    live = four_bit(nested=nested)
    expected, quantized = live(X), "0.weight.quant_state.bitsandbytes__nf4"
    part = {key: value.clone() for key, value in live.state_dict().items() if key != quantized}
    part["1.bias"] += 1
    with patches.applied(*FOUR):
        assert live.load_state_dict(part, strict=False).missing_keys == [quantized]
        torch.testing.assert_close(live(X), expected + 1)
        with pytest.raises(RuntimeError, match=f'Missing key.*"{quantized}"'):
            live.load_state_dict(part)
        part["0.weight"][0] += 1
        live.load_state_dict(part, strict=False)
        with pytest.raises(RuntimeError, match="lacks 'weight.quant_state.bitsandbytes__nf4'"):
            live(X)
