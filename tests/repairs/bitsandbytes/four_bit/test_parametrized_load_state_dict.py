"""Modules with parametrized 4-bit parameters load what they save."""

from __future__ import annotations

import copy

import pytest
import torch

import patches
from patches.engine import gate

if not gate.satisfied("bitsandbytes>=0.48"):
    pytest.skip("this release has no parametrized 4-bit parameters", allow_module_level=True)

from bitsandbytes.nn.parametrize import replace_parameter_4bit

ID = "bitsandbytes-parametrized-load-state-dict"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))


@pytest.fixture(autouse=True)
def patched():
    with patches.applied(ID):
        yield


class Experts(torch.nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(experts, 64, 96))
        self.down = torch.nn.Parameter(torch.randn(experts, 96, 64))
        self.scale = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up @ self.down).sum(0) * self.scale


def make(seed: int, experts: int = 4, dtype: torch.dtype = torch.float32, **options) -> Experts:
    torch.manual_seed(seed)
    module = Experts(experts).to(dtype)
    for name in ("up", "down"):
        replace_parameter_4bit(module, name, **options)
    return module


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("strict", [False, True], ids=["lax", "strict"])
def test_what_one_saves_another_computes_with(nested, assign, strict):
    saved, live = (make(seed, compress_statistics=nested) for seed in (0, 1))
    state = saved.state_dict()
    given = dict(state)
    found = live.load_state_dict(state, strict=strict, assign=assign)
    assert not found.missing_keys and not found.unexpected_keys
    assert state.keys() == given.keys() and torch.equal(live(X), saved(X))
    again = live.state_dict()
    assert all(torch.equal(again[key], state[key]) for key in state) and again.keys() == state.keys()
    assert (again["up.absmax"].data_ptr() == state["up.absmax"].data_ptr()) == assign


def test_unpatched_it_is_refused_or_nothing_is_loaded():
    patches.revert(ID)
    saved, live = make(0), make(1)
    before = live.up.clone()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*parametrizations.up.original"):
        live.load_state_dict(saved.state_dict())
    live.load_state_dict(saved.state_dict(), strict=False)
    assert torch.equal(live.up, before)


@pytest.mark.parametrize("options", [{"quant_type": "fp4"}, {"blocksize": 128}, {"compress_statistics": True}], ids=str)
def test_quantized_otherwise(options):
    saved, live = make(0, **options), make(1)
    live.load_state_dict(saved.state_dict())
    assert torch.equal(live(X), saved(X))


def test_inside_of_a_model_through_a_file_and_after_a_copy(tmp_path):
    saved, live = (torch.nn.ModuleDict({"mlp": make(seed)}) for seed in (0, 1))
    torch.save(saved.state_dict(), tmp_path / "file")
    twin = copy.deepcopy(live)
    before = live["mlp"](X)
    twin.load_state_dict(torch.load(tmp_path / "file"))
    assert torch.equal(twin["mlp"](X), saved["mlp"](X)) and torch.equal(live["mlp"](X), before)


def test_loaded_statistics_are_copies():
    saved, live = make(0), make(1)
    state = saved.state_dict()
    live.load_state_dict(state)
    before = live(X)
    state["up.absmax"].zero_()
    assert torch.equal(live(X), before)


def test_the_module_keeps_its_dtype():
    saved, live = make(0), make(1, dtype=torch.bfloat16)
    live.load_state_dict(saved.state_dict())
    assert live.up.dtype == live.down.dtype == torch.bfloat16
    torch.testing.assert_close(live.up, saved.up.to(torch.bfloat16))


@pytest.mark.parametrize("lost", ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"])
def test_statistics_that_are_not_whole_are_refused_by_name(lost):
    saved, live = make(0), make(1)
    before = live.up.clone()
    state = {key: value for key, value in saved.state_dict().items() if key != f"up.{lost}"}
    with pytest.raises(RuntimeError, match=f"'up' was not loaded and not changed: the state dict lacks 'up.{lost}'"):
        live.load_state_dict(state, strict=False)
    assert torch.equal(live.up, before)


def test_codes_of_another_shape_or_dtype_are_refused():
    live = make(1)
    before = live.up.clone()
    cast = {key: value.half() if key == "up" else value for key, value in make(0).state_dict().items()}
    for state in (make(0, experts=2).state_dict(), cast):
        with pytest.raises(RuntimeError, match="'up' was not loaded and not changed: its packed weights are torch"):
            live.load_state_dict(state, strict=False)
        assert torch.equal(live.up, before)


def test_state_dicts_without_statistics_are_met_as_before():
    """The trained rest of the model, torch's own names, and a weight that is not quantized."""
    live = make(1)
    before = live(X) / live.scale
    live.load_state_dict({"scale": torch.ones(64)}, strict=False)
    assert torch.allclose(live(X), before)
    live.load_state_dict(dict(live.named_parameters()))
    found = live.load_state_dict({"up": torch.zeros(4, 64, 96)}, strict=False)
    assert "up" in found.unexpected_keys and torch.allclose(live(X), before)


def test_once_it_is_no_longer_parametrized_the_hook_is_idle():
    saved, live = make(0), make(1)
    for module in (saved, live):
        for name in ("up", "down"):
            torch.nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    live.load_state_dict(saved.state_dict())
    assert live.up.dtype == torch.uint8 and torch.equal(live.up, saved.up)
