"""FSDP2 and distributed checkpoints over real 4-bit and INT8 LoRA models: two ranks, gloo, CPU.

The worker trains, saves and loads; see fsdp2.py. What FSDP2 cannot do with bitsandbytes is pinned at
the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.engine import gate
from tests.programs.models import save_llama

WORKER = Path(__file__).with_name("fsdp2.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Two Llamas of one shape and other weights: the name of the second ends in "-other"."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_llama(folder, seed=0)
    save_llama(folder.with_name("llama-other"), seed=1)
    return folder


@pytest.fixture(scope="module")
def ranks(models, two_ranks, tmp_path_factory) -> list[dict]:
    """What both ranks wrote, of a 4-bit model and of an INT8 model after it."""
    return two_ranks(WORKER, tmp_path_factory.mktemp("ranks"), str(models))


@pytest.fixture(scope="module")
def bare(models, two_ranks, tmp_path_factory) -> list[dict]:
    """The same without the patches."""
    return two_ranks(WORKER, tmp_path_factory.mktemp("bare"), str(models), PATCHES_AUTOLOAD="0")


@pytest.fixture(params=["4", "8"], ids=["4bit", "int8"])
def bits(request) -> str:
    return request.param


@pytest.fixture
def run(ranks, bits) -> list[dict]:
    return [rank[bits] for rank in ranks]


def test_autoload_repairs_every_rank_alike(run):
    one, two = (rank["states"] for rank in run)
    assert one == two and "applied" in one.values()
    assert not {"conflict", "failed", "shadowed"} & set(one.values())


def test_weights_are_sharded_and_training_equals_one_process(run):
    for rank in run:
        assert rank["sharded types"] == ["DTensor"]
        whole, sharded = rank["losses"]
        assert sharded == pytest.approx(whole, abs=2e-5) and whole[1] < whole[0]
        assert rank["logits after training"] < 1e-5
    assert run[0]["trained"] < 1e-5, "the adapters"


def test_full_state_dict_on_rank_0_is_that_of_one_process(run):
    assert run[0]["full state dict"] == "ok" and run[0]["keys"] == [[], []]
    assert run[0]["codes and statistics equal"]
    assert run[0]["full into one process"] == "ok" and run[0]["logits in one process"] < 1e-6


def test_sharded_checkpoint_goes_on_in_a_fresh_model(run):
    for rank in run:
        assert rank["save"] == "ok" and rank["load"] == "ok"
        assert rank["logits of another model"] > 0.5, "else the load shows nothing"
        assert rank["logits after load"] == 0
        uninterrupted, resumed = rank["next losses"]
        assert resumed == uninterrupted


def test_full_state_dict_given_to_every_rank(run):
    assert all(rank["full into sharded"] == "ok" and rank["logits from full"] == 0 for rank in run)


def test_mixed_precision_leaves_the_codes_alone(run):
    assert all(rank["mixed precision"] == "ok" and rank["cast"] < 0.06 for rank in run), "bfloat16 against float32"


def test_broadcast_from_rank_0_gives_every_rank_the_model(run):
    assert all(rank["broadcast"] == "ok" and rank["logits from broadcast"] == 0 for rank in run)


@pytest.mark.release("tests/distributed, where what the cells show without a patch is right with it")
def test_without_the_patches(request, bits):
    if not gate.satisfied("bitsandbytes>=0.50"):
        pytest.skip("shown on the newest series only: each run takes two processes half a minute")
    for rank in (rank[bits] for rank in request.getfixturevalue("bare")):
        assert "applied" not in rank["states"].values()
        if bits == "8":
            assert "object has no attribute 'CB'" in rank["train"]
        else:
            assert rank["load"] == "ok" and rank["logits after load"] > 0.1, "silently wrong"
