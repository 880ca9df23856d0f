"""State dicts of 4-bit layers under FSDP2, on one rank; two ranks are in tests/distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bitsandbytes.nn import Linear4bit
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import patches
from patches.engine import gate

ID = "bitsandbytes-linear4bit-sharded-state-dict"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(seed: int, nested: bool = True, storage: torch.dtype = torch.uint8) -> torch.nn.Sequential:
    """A 4-bit layer without and one with a bias (128 features), quantized."""
    if storage is not torch.uint8 and not gate.satisfied("bitsandbytes>=0.47"):
        pytest.skip("before 0.47 a CPU dequantizes from uint8 storage only")
    torch.manual_seed(seed)
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": nested}
    options["quant_storage"] = storage
    return torch.nn.Sequential(Linear4bit(64, 128, bias=False, **options), Linear4bit(128, 64, **options)).to("cpu")


def sharded(*args, **options) -> torch.nn.Sequential:
    return fully_shard(layers(*args, **options), mesh=init_device_mesh("cpu", (1,)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: a storage dtype of bfloat16 makes NaN of some codes."""
    return getattr(tensor, "_local_tensor", tensor).detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_what_one_saves_another_computes_with(nested, storage):
    trained, fresh = sharded(0, nested, storage), sharded(1, nested, storage)
    before = trained(X)
    with patches.applied(ID):
        saved = get_model_state_dict(trained)
        assert saved.keys() == layers(0, nested, storage).state_dict().keys()
        set_model_state_dict(fresh, saved)
        assert torch.equal(fresh(X), before) and torch.equal(trained(X), before)
        again = get_model_state_dict(fresh)
    assert all(torch.equal(bits(again[key]), bits(saved[key])) for key in saved)


def test_the_packed_entry_is_that_of_one_process():
    model = sharded(0)
    before = layers(0).state_dict()
    with patches.applied(ID):
        packed = {k: v for k, v in model.state_dict().items() if "bitsandbytes__" in k}
    assert len(packed) > 0 and all(torch.equal(packed[k], before[k]) for k in packed)


def test_loaded_statistics_are_copies():
    trained, fresh = sharded(0), sharded(1)
    with patches.applied(ID):
        saved = get_model_state_dict(trained)
        set_model_state_dict(fresh, saved)
    before = fresh(X)
    saved["0.weight.absmax"].zero_()
    assert torch.equal(fresh(X), before)


def test_full_state_dict_fits_a_model_that_is_not_sharded():
    trained, plain = sharded(0), layers(1)
    with patches.applied(ID, "bitsandbytes-linear4bit-load-state-dict"):
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in trained.state_dict().items()}
        plain.load_state_dict(full)
    assert torch.equal(plain(X), trained(X))


def without_statistics(state_dict: dict) -> dict:
    return {k: v for k, v in state_dict.items() if "weight." not in k}


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_codes_without_statistics_are_refused_unless_they_are_those_of_the_layer(storage):
    trained, same, other = (sharded(seed, storage=storage) for seed in (0, 0, 1))
    with patches.applied(ID):  # 0.49.0 alone saves no such model
        old = without_statistics(get_model_state_dict(trained))
        set_model_state_dict(same, old)
        with pytest.raises(
            RuntimeError,
            match=r"'0.weight' was not loaded and not changed: .* packed weights without their quantization state",
        ):
            set_model_state_dict(other, old)
    assert torch.equal(same(X), trained(X))
    assert torch.equal(other(X), sharded(1, storage=storage)(X))


def test_loading_between_forward_and_backward():
    """FSDP2 leaves the weights of the root whole after its forward."""
    trained, fresh = sharded(0), sharded(1)
    with patches.applied():
        saved = get_model_state_dict(trained)
        fresh(X)
        assert type(fresh[0].weight).__name__ == "Params4bit"
        fresh.load_state_dict(saved)
        assert torch.equal(fresh(X), trained(X))


@pytest.mark.parametrize("lost", ["absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"])
def test_statistics_that_are_not_whole_are_refused_by_name(lost):
    trained, fresh = sharded(0), sharded(1)
    before = fresh(X)
    with patches.applied(ID):
        first = {k: v for k, v in get_model_state_dict(trained).items() if k[0] == "0" and k != f"0.weight.{lost}"}
        with pytest.raises(RuntimeError, match=f"lacks 'weight.{lost[:20]}"):
            fresh.load_state_dict(first, strict=False)
    assert torch.equal(fresh(X), before)


def test_state_dict_without_the_weight_is_loaded_as_before():
    fresh, other = sharded(1), sharded(1)
    bias = {"1.bias": distribute_tensor(torch.ones(64), init_device_mesh("cpu", (1,)))}
    other.load_state_dict(bias, strict=False)
    with patches.applied(ID):
        fresh.load_state_dict(bias, strict=False)
    assert torch.equal(fresh(X), other(X)) and not torch.equal(fresh(X), sharded(1)(X))


def test_layers_that_are_not_sharded_save_and_load_as_before():
    model = layers(0)
    before = model.state_dict()
    with patches.applied(ID):
        after = model.state_dict()
        model.load_state_dict(without_statistics(after), strict=False)
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_limit_checkpoints_of_models_that_are_not_sharded_load_by_luck(tmp_path):
    """Their packed entry has the digits of ``nested_offset`` and no padding: files stay as bitsandbytes writes them."""
    key = "0.weight.quant_state.bitsandbytes__nf4"
    with patches.applied(ID, "bitsandbytes-params4bit-attributes", strict=False):
        states = [get_model_state_dict(layers(seed)) for seed in range(12)]
        other = next(state for state in states if len(state[key]) != len(states[0][key]))
        dcp.save(states[0], checkpoint_id=tmp_path)
        with pytest.raises(dcp.CheckpointException, match=r"Size mismatch between saved .*bitsandbytes__nf4"):
            dcp.load(other, checkpoint_id=tmp_path)
