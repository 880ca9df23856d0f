"""What ``dcp.load`` reads in another form than it was saved in, in one process; tests/distributed has the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed.checkpoint as dcp
from bitsandbytes.nn import Linear4bit
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import patches
from patches.engine.gate import satisfied
from patches.optimizers import state_bits
from patches.distributed.checkpoint_plans import ranks_lacking_state

ID = "torch-checkpoint-other-forms"
STEPS = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.50"), reason="before 0.50 no optimizer of bitsandbytes steps on a CPU"
)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    bnb.optim.GlobalOptimManager.get_instance().initialize()  # overrides by place hold for the process
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def trained(name: str, **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 61, bias=False)  # 6,100 values: the last block is not whole
    optimizer = getattr(bnb.optim, name)(model.parameters(), **options)
    for seed in range(3):
        step(model, optimizer, seed)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    model(torch.randn(8, 100, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(optimizer: Any) -> dict[str, torch.Tensor]:
    """The states as numbers."""
    (state,) = optimizer.state.values()
    found = {}
    for number in "12":
        value = state.get(f"state{number}")
        if value is not None and value.dtype == torch.uint8:
            table, scales = state[f"qmap{number}"], state[f"absmax{number}"]
            value = state_bits.to_float(value, table, scales, (0,) * value.dim(), tuple(value.shape))
        if value is not None:
            found[number] = value.clone()
    return found


@STEPS
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "AdEMAMix"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "as given"])
def test_an_8_bit_state_goes_on_in_32_bits(kind, flat, tmp_path):
    model, old = trained(f"{kind}8bit")
    same, new = trained(kind, optim_bits=32)
    step(same, new, 9)
    dcp.save({"optimizer": get_optimizer_state_dict(model, old)}, checkpoint_id=tmp_path, no_dist=True)
    before = states(new)
    with patches.applied(ID):
        into = {"optimizer": get_optimizer_state_dict(same, new)}
        planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=flat)
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True, planner=planner)
        set_optimizer_state_dict(same, new, into["optimizer"])
    expected = states(old)
    assert {v.dtype for k, v in new.state[same.weight].items() if k.startswith("state")} == {torch.float32}
    assert all(torch.equal(states(new)[k], expected[k]) and not torch.equal(before[k], expected[k]) for k in expected)


@STEPS
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "AdEMAMix"])
def test_a_32_bit_state_goes_on_in_8_bits(kind, tmp_path):
    model, old = trained(kind, optim_bits=32)
    same, new = trained(f"{kind}8bit")
    dcp.save({"optimizer": get_optimizer_state_dict(model, old)}, checkpoint_id=tmp_path, no_dist=True)
    for state in new.state.values():
        state["absmax1"].zero_()
    with patches.applied(ID):
        into = {"optimizer": get_optimizer_state_dict(same, new)}
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
        set_optimizer_state_dict(same, new, into["optimizer"])
    assert new.state[same.weight]["state1"].dtype == torch.uint8
    found, expected = states(new), states(old)
    assert all(float((found[k] - expected[k]).norm() / expected[k].norm()) < 0.02 for k in expected)


@STEPS
def test_without_it_codes_become_moments(tmp_path):
    model, old = trained("AdamW8bit")
    same, new = trained("AdamW")
    dcp.save({"optimizer": get_optimizer_state_dict(model, old)}, checkpoint_id=tmp_path, no_dist=True)
    into = {"optimizer": get_optimizer_state_dict(same, new)}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(same, new, into["optimizer"])
    assert float(states(new)["1"].max()) > 100, "codes"


@STEPS
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW"])
def test_a_state_in_the_same_bits_is_loaded_as_before(name, tmp_path):
    model, old = trained(name)
    dcp.save({"optimizer": get_optimizer_state_dict(model, old)}, checkpoint_id=tmp_path, no_dist=True)
    found = []
    for applied in ([], [ID]):
        same, new = trained(name)
        step(same, new, 9)
        with patches.applied(*applied) if applied else warnings.catch_warnings():
            into = {"optimizer": get_optimizer_state_dict(same, new)}
            dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
            set_optimizer_state_dict(same, new, into["optimizer"])
        found.append(new.state[same.weight])
    bare, repaired = found
    assert bare.keys() == repaired.keys()
    assert all(torch.equal(bare[k], repaired[k]) if torch.is_tensor(bare[k]) else bare[k] == repaired[k] for k in bare)


def layer(seed: int = 0, storage: torch.dtype = torch.uint8, nested: bool = True) -> Linear4bit:
    torch.manual_seed(seed)
    made = Linear4bit(64, 64, bias=False, quant_type="nf4", quant_storage=storage, compress_statistics=nested)
    made.weight.data.mul_(1.37**seed)
    return made.to("cpu")


def packed(state_dict: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(value for key, value in state_dict.items() if "bitsandbytes__" in key)


def test_a_packed_entry_of_any_length_is_read(tmp_path):
    saved, other = (
        layer().state_dict(),
        next(
            found
            for seed in range(1, 40)
            if len(packed(found := layer(seed).state_dict())) != len(packed(layer().state_dict()))
        ),
    )
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load(dict(other), checkpoint_id=tmp_path, no_dist=True)
    with patches.applied(ID):
        dcp.load(other, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(other[key], saved[key]) for key in saved)


@pytest.mark.parametrize("partial", [False, True])
def test_packed_weights_without_quantization_state_are_the_models_own_or_refused(partial, tmp_path):
    saved = layer().state_dict()
    dcp.save({"weight": saved["weight"]}, checkpoint_id=tmp_path, no_dist=True)
    same, other = layer(), layer(1)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    options = {
        "checkpoint_id": tmp_path,
        "no_dist": True,
        "planner": dcp.DefaultLoadPlanner(allow_partial_load=partial),
    }
    with patches.applied(ID):
        dcp.load(into := same.state_dict(), **options)
        assert all(torch.equal(into[key], saved[key]) for key in saved)
        with pytest.raises(dcp.CheckpointException, match="'weight' differs from the weight of this model"):
            dcp.load(other.state_dict(), **options)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_a_part_of_a_quantization_state_is_missing_as_before(tmp_path):
    saved = layer().state_dict()
    dcp.save({key: saved[key] for key in ("weight", "weight.absmax")}, checkpoint_id=tmp_path, no_dist=True)
    with patches.applied(ID), pytest.raises(dcp.CheckpointException, match="Missing key"):
        dcp.load(layer(1).state_dict(), checkpoint_id=tmp_path, no_dist=True)


def test_packed_bits_are_not_cast_into_another_storage(tmp_path):
    dcp.save(layer(0, torch.bfloat16).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    into = layer(1, torch.float16).state_dict()
    with patches.applied(ID):
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(
        into["weight"].view(torch.uint8), layer(0, torch.bfloat16).state_dict()["weight"].view(torch.uint8)
    )


def test_which_ranks_lack_the_plugin():
    whole = {"0.weight", "0.weight.absmax", "0.weight.quant_state.bitsandbytes__nf4", "0.bias"}
    assert ranks_lacking_state([whole, whole]) == []
    assert ranks_lacking_state([whole, {"0.weight", "0.bias"}, whole]) == [1]
    assert ranks_lacking_state([whole, {"1.weight"}]) == [], "a rank that has nothing of the layer, as with pipelines"
    assert ranks_lacking_state([{"0.weight"}, {"0.weight"}]) == []


def test_the_first_rank_looks_at_all_plans(tmp_path):
    """With the second of two ranks lacking the plugin; tests/distributed has the ranks themselves."""
    whole = layer().state_dict()
    dicts = (whole, {"weight": whole["weight"]})
    dcp.save(whole, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    saves = [create_default_local_save_plan(part, True) for part in dicts]
    loads = [create_default_local_load_plan(part, metadata) for part in dicts]
    expected, planner = dedup_save_plans(saves), dcp.DefaultLoadPlanner()
    with patches.applied(ID):
        with pytest.warns(UserWarning, match="rank 1 would not save the quantization state"):
            assert dedup_save_plans(saves) == expected
        with pytest.raises(RuntimeError, match="rank 1 would not load the quantization state"):
            planner.create_global_plan(loads)
        assert planner.create_global_plan([loads[0]] * 2) == [loads[0]] * 2


def test_a_load_without_any_of_this_reads_into_what_it_was_given(tmp_path: Path):
    dcp.save({"a": torch.arange(4.0)}, checkpoint_id=tmp_path, no_dist=True)
    planner = dcp.DefaultLoadPlanner()
    into = {"a": torch.zeros(4)}
    given = into["a"]
    with patches.applied(ID):
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True, planner=planner)
    assert into["a"] is given and torch.equal(given, torch.arange(4.0)) and planner.state_dict["a"] is given
