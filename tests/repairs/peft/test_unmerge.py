"""Quantized layers after adapters were merged into them and taken out: bit for bit what they were, in every way."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch

import patches

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

from patches.engine.gate import satisfied  # noqa: E402
from tests.repairs.peft.merging import (  # noqa: E402
    ADAPTERS,
    KINDS,
    adapted,
    base_of,
    bits,
    config,
    layers,
    same,
    store_as_1_1,
    train_a_little,
)

if satisfied("peft<0.15") and not torch.cuda.is_available():
    pytest.skip("peft 0.14 dequantizes on CUDA only, to merge", allow_module_level=True)
pytestmark = [
    pytest.mark.one_in(2),
    pytest.mark.filterwarnings("ignore:Merge|Unmerge|Already following|Adapter cannot be set:UserWarning"),
]
X = torch.linspace(-1, 1, 3 * 64).reshape(3, 64)


IDS = ["peft-unmerge"]
BESIDE = (
    "peft-dora-replaces-weight",  # without it DoRA dies on INT8 layers
    "bitsandbytes-params4bit-meta",  # without it RandLoRA and PVeRA leave a 4-bit layer unquantized
    "bitsandbytes-params4bit-copies",
    "bitsandbytes-int8-copies",
    "bitsandbytes-linear4bit-load-state-dict",
    "bitsandbytes-int8-load-state-dict",
)


@pytest.fixture(autouse=True)
def applied():
    patches.apply(*BESIDE, *IDS)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def kept(model) -> int:
    """Bytes that are kept for the unmerge."""
    records = [vars(layer).get("_patches_merge_snapshot") for layer in layers(model)]
    return sum(record["packed_weight"].untyped_storage().nbytes() for record in records if record)


@torch.no_grad()
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_over_many_cycles(kind, adapter, device):
    if adapter in ("pvera", "randlora") and not satisfied("bitsandbytes>=0.48"):
        pytest.skip("before 0.48 a move quantizes packed INT8 weights again: it is wrong before these two adapters are")
    model, x = adapted(kind, adapter, device), X.to(device)
    own = bits(model)
    with model.disable_adapter():
        answer = model(x)
    for _ in range(4):
        model.merge_adapter()
        assert not same(bits(model), own), "nothing is merged"
        model(x)
        train_a_little(model)
        model.unmerge_adapter()
        assert same(bits(model), own)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(model(x), answer)
    assert same(bits(model), own)
    assert not any(layer.merged for layer in layers(model)) and kept(model) == 0


@torch.no_grad()
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_merge_is_what_it_was(kind, adapter, device):
    """The merged weight is the one of an unpatched peft, its layer too, and ``merge_and_unload`` leaves nothing."""
    merged = []
    for change in (patches.revert, patches.apply):
        change(*IDS)
        model = adapted(kind, adapter, device)
        model.merge_adapter()
        merged.append(model.state_dict())
        model = adapted(kind, adapter, device).merge_and_unload()
        merged.append(model.state_dict())
        assert all("_patches_merge_snapshot" not in vars(module) for module in model.modules())
    assert same(merged[0], merged[2]) and same(merged[1], merged[3])


@torch.no_grad()
def test_one_packed_copy_in_memory_until_the_unmerge(kind, device):
    model = adapted(kind, "lora", device)
    packed = sum(layer.base_layer.weight.untyped_storage().nbytes() for layer in layers(model))
    model.merge_adapter()
    assert kept(model) == packed
    records = [vars(layer)["_patches_merge_snapshot"] for layer in layers(model)]
    assert all(record["packed_weight"].device.type == "cpu" for record in records)
    storages = [weakref.ref(record["packed_weight"]) for record in records]
    del records
    model.merge_adapter()  # nothing more to merge
    assert kept(model) == packed and not any(name.startswith("_patches") for name in model.state_dict())
    model.unmerge_adapter()
    assert kept(model) == 0 and not any(storage() is not None for storage in storages)


@torch.no_grad()
def test_nothing_of_the_layer_outlives_merge_and_unload(kind, device):
    model = adapted(kind, "lora", device)
    gone = [weakref.ref(layer) for layer in layers(model)]
    model = model.merge_and_unload()
    assert not any(layer() is not None for layer in gone)


@torch.no_grad()
def test_more_than_one_adapter(kind, device):
    """Merged one after the other or together, with ``set_adapter`` taking them out."""
    model = adapted(kind, "lora", device)
    model.add_adapter("other", config("lora", r=2))
    own = bits(model)
    for first, then in ((["default"], ["other"]), (["other", "default"], [])):
        model.merge_adapter(first)
        model.merge_adapter(then)
        model.unmerge_adapter()
        assert same(bits(model), own)
        model.merge_adapter(first)
        model.merge_adapter(then)
        model.set_adapter("other")
        assert same(bits(model), own)
        model.set_adapter("default")


@torch.no_grad()
@pytest.mark.parametrize("way", ["copy", "file", "file of 1.1"])
def test_copied_or_saved_and_loaded_between(kind, way, device):
    model = adapted(kind, "lora", device)
    own = bits(model)
    model.merge_adapter()
    merged = bits(model)
    if way == "copy":
        other = copy.deepcopy(model)
    else:
        if way == "file of 1.1":
            store_as_1_1(model)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"bnb_patches" not in file.getvalue(), "it cannot be loaded without the plugin"
        file.seek(0)
        other = torch.load(file, weights_only=False)
    other.unmerge_adapter()
    assert same(bits(other), own)
    assert same(bits(model), merged)
    model.unmerge_adapter()
    assert same(bits(model), own)


@torch.no_grad()
def test_adapter_saved_and_loaded_between(kind, tmp_path, device):
    model = adapted(kind, "lora", device)
    own = bits(model)
    model.merge_adapter()
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "again")
    model.unmerge_adapter()
    model.merge_adapter(["again"])
    model.unmerge_adapter()
    assert same(bits(model), own)


BETWEEN = {
    "its own state dict loaded": lambda model, device: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "moved": lambda model, device: model.to("cpu").to(device),
}


@torch.no_grad()
@pytest.mark.parametrize("happens", BETWEEN.values(), ids=BETWEEN)
def test_between_merge_and_unmerge(kind, happens, device):
    model = adapted(kind, "lora", device)
    own = bits(model)
    model.merge_adapter()
    happens(model, device)
    model.unmerge_adapter()
    assert same(bits(model), own)


@torch.no_grad()
def test_what_was_loaded_since_is_not_lost(kind, device):
    """Other weights that come into a merged layer: the adapter is subtracted from them, as peft does."""
    found = []
    for change in (patches.revert, patches.apply):
        change(*IDS)
        model = adapted(kind, "lora", device)
        torch.manual_seed(7)
        others = [torch.nn.Linear(64, 64).weight.data for _ in range(2)]
        model.merge_adapter()
        for layer, weight in zip(layers(model), others):
            own = layer.base_layer.weight
            options = {"quant_type": own.quant_type} if kind != "int8" else {"has_fp16_weights": False}
            layer.base_layer.weight = type(own)(weight, requires_grad=False, **options).to(device)
        model.unmerge_adapter()
        found.append(bits(model))
    assert same(*found)


@torch.no_grad()
def test_written_to_in_place_since(kind, device):
    model = adapted(kind, "lora", device)
    own = bits(model)
    model.merge_adapter()
    for layer in layers(model):
        layer.base_layer.weight.data.view(torch.uint8)[0] ^= 1
    model.unmerge_adapter()
    assert not same(bits(model), own) and kept(model) == 0


@torch.no_grad()
def test_what_its_owner_made_permanent_stays(kind, device):
    """Merge, then begin anew with the sum as the base, as ReLoRA does."""
    model = adapted(kind, "lora", device)
    model.merge_adapter()
    for layer in layers(model):
        layer.merged_adapters.clear()
    base = bits(model)
    model.merge_adapter()
    model.unmerge_adapter()
    assert same(bits(model), base)


@torch.no_grad()
def test_a_merge_that_is_refused(kind, device):
    """``safe_merge`` finds what is no number: the layer is as before, and merges again once that is repaired."""
    model = adapted(kind, "lora", device)
    own = bits(model)
    weight = layers(model)[0].lora_A["default"].weight
    good = weight.data.clone()
    weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        layers(model)[0].merge(safe_merge=True)
    assert same(bits(model), own) and kept(model) == 0
    weight.data = good
    for layer in layers(model):
        layer.merge(safe_merge=True)
    model.unmerge_adapter()
    assert same(bits(model), own)


@torch.no_grad()
def test_two_models_around_one_base(kind, device):
    """The last one in is exact if it is the first one out; else it is subtracted, and what the other added stays."""
    base = base_of(kind, device)
    own = base.state_dict()
    models = []
    for _ in range(2):
        other = torch.nn.Sequential(*base)
        other.is_loaded_in_8bit, other.is_loaded_in_4bit = base.is_loaded_in_8bit, base.is_loaded_in_4bit
        models.append(peft.get_peft_model(other, config("lora")))
    first, second = models
    first.merge_adapter()
    half = copy.deepcopy(base.state_dict())
    second.merge_adapter()
    second.unmerge_adapter()
    assert same(base.state_dict(), half)
    second.merge_adapter()
    first.unmerge_adapter()
    assert not same(base.state_dict(), own), "the adapter of the second is lost"
    second.unmerge_adapter()
    assert not same(base.state_dict(), half), "the adapter of the first is back"


@torch.no_grad()
def test_reverted_between(kind, device):
    """Without the patch peft subtracts; what was kept is not taken for an answer later."""
    model = adapted(kind, "lora", device)
    model.merge_adapter()
    patches.revert(*IDS)
    model.unmerge_adapter()
    base = bits(model)
    patches.apply(*IDS)
    model.merge_adapter()
    model.unmerge_adapter()
    assert same(bits(model), base)
