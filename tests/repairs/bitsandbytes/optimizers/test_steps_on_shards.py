"""Optimizers of bitsandbytes under FSDP2: two ranks, gloo, CPU; see shards_worker.py for what they run."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.optim
import pytest
import torch
from bitsandbytes.optim.optimizer import Optimizer8bit

import patches
from patches.engine.gate import satisfied
from tests.releases import selected

pytestmark = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.50"),
    reason="before 0.50 no optimizer of bitsandbytes steps on a CPU, sharded or not",
)
WORKER = Path(__file__).with_name("shards_worker.py")
LIMITED = ("LARS", "LAMB")
BROKEN = ("AdEMAMix32bit", "PagedAdEMAMix32bit")
"""Step nowhere, sharded or not, without bitsandbytes-ademamix, which the ranks have as well."""
NAMES = sorted(
    name for name, kind in vars(bitsandbytes.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer8bit) and not name.startswith(LIMITED)
)  # fmt: skip
AS = {
    "Paged": "the optimizer without pages, of which a CPU has none",
    "32bit": "the optimizer without a number: 32 bits",
}
EACH_DAY = {"AdamW", "AdamW8bit", "AdEMAMix8bit", "Lion8bit", "SGD8bit", BROKEN[0]}
EACH = [
    pytest.param(
        name, marks=[] if name in EACH_DAY else [pytest.mark.release(
            next((why for part, why in AS.items() if part in name), "AdamW and AdEMAMix, Lion and SGD step so, too")
        )]
    )
    for name in NAMES
]  # fmt: skip
FROM = ["resumed", "resumed in one process", "from full", "from rank 0", "its own state dict"]


@pytest.fixture(scope="module")
def ranks(request, two_ranks, tmp_path_factory):
    """What both ranks wrote, of the optimizers that this run selects."""
    chosen = sorted(selected(request, "name"))
    return two_ranks(WORKER, tmp_path_factory.mktemp("shards"), ",".join(chosen))


def test_there_are_all_the_others():
    assert len(NAMES) >= 29 and {"AdamW8bit", "Lion", "SGD8bit", "PagedAdEMAMix8bit", *BROKEN, *EACH_DAY} <= set(NAMES)


@pytest.mark.parametrize("name", EACH)
def test_steps_are_those_of_one_process(name, ranks):
    for rank in ranks:
        assert rank[name]["training"] == rank[name]["further"] == [] == rank[name]["states"]


@pytest.mark.parametrize("name", EACH)
def test_states_have_8_bits_and_are_sharded(name, ranks):
    small = "8bit" in name
    states = 2 if name.startswith(("AdEMAMix", "PagedAdEMAMix")) else 1
    for rank in ranks:
        assert rank[name]["state of even"] == ("torch.uint8" if small else "torch.float32")
        assert rank[name]["on this rank"] == 48 * 128 * states * (1 if small else 4)


@pytest.mark.parametrize("name", [each for each in EACH if "8bit" in str(each)])
def test_a_parameter_whose_shards_cut_blocks_is_named(name, ranks):
    for rank in ranks:
        assert [shape in said for shape, said in zip(("(1, 4100)", "(65, 96)"), rank[name]["warnings"])] == [True, True]
        assert len(rank[name]["warnings"]) == 2 and all("32-bit" in said for said in rank[name]["warnings"])


@pytest.mark.parametrize("way", FROM)
@pytest.mark.parametrize("name", EACH)
def test_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(name, way, ranks):
    assert [rank[name][way] for rank in ranks] == [[], []]


def test_other_placements(ranks):
    for rank in ranks:
        assert rank["other meshes"] == {"replicated and sharded": True, "replicated": True, "columns": True}


def test_what_cannot_be_stepped_says_why(ranks):
    for rank in ranks:
        assert rank["refusals"].keys() == {"LARS", "LAMB", "state of one process"}
        assert all("limit an update by its norm" in rank["refusals"][name] for name in LIMITED)
        assert "set_optimizer_state_dict with full_state_dict=True" in rank["refusals"]["state of one process"]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("Paged") and name not in BROKEN])
def test_whole_parameters_are_stepped_as_before(name):
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(100, 64)
        options = {"lr": 0.1, "momentum": 0.9} if name.startswith("SGD") else {}
        optimizer = getattr(bitsandbytes.optim, name)(layer.parameters(), **options)
        for _ in range(3):
            layer(torch.randn(4, 100)).square().sum().backward()
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [p.detach() for p in layer.parameters()] + [state for state in states if isinstance(state, torch.Tensor)]

    expected = train()
    with patches.applied("bitsandbytes-steps-on-shards"):
        found = train()
    assert len(found) == len(expected) > 3 and all(map(torch.equal, found, expected))
