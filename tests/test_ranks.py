"""``patches.check_ranks()``: alone, in ranks that are equal, and in ranks that are not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

import patches
from patches.ranks import compare_ranks
from tests.processor import ROOT

WORKER = Path(__file__).with_name("ranks_worker.py")


def another_release() -> tuple[str, Path]:
    """A release of bitsandbytes other than the installed one, and the folder that it can be imported from.

    ``nox`` keeps each release in ``.bnb/<release>``; the environment may hold one more.
    """
    installed = importlib.metadata.version("bitsandbytes")
    spec = importlib.util.find_spec("bitsandbytes")
    assert spec is not None and spec.origin is not None
    folders = [*Path(spec.origin).parents[2].iterdir(), *ROOT.glob(".bnb/*"), *map(Path, sys.path)]
    for folder in filter(Path.is_dir, folders):
        for info in importlib.metadata.distributions(name="bitsandbytes", path=[str(folder)]):
            if info.version != installed:
                return info.version, folder
    pytest.skip(f"only bitsandbytes {installed} can be found here: no rank can have another")


@pytest.mark.parametrize(
    "launch",
    ["two_ranks", pytest.param("torchrun", marks=pytest.mark.release("two_ranks, with the variables of torchrun"))],
)
def test_ranks_that_are_equal_pass_and_report_the_same(request, launch, tmp_path):
    one, two = request.getfixturevalue(launch)(WORKER, tmp_path)
    assert one == two and "error" not in one
    assert one["report"].keys() == patches.REGISTRY.patches.keys()
    assert "applied" in one["report"].values(), "the entry point had applied them in each rank"
    assert "one of 2 processes" in one["before init"] and "init_process_group()" in one["before init"]


def test_a_rank_with_another_bitsandbytes_is_named_on_every_rank(two_ranks, tmp_path):
    version, folder = another_release()
    one, two = two_ranks(WORKER, tmp_path, RANK1_FOLDER=str(folder))
    assert (one["bitsandbytes"], two["bitsandbytes"]) == (importlib.metadata.version("bitsandbytes"), version)
    assert one["error"] == two["error"] and "report" not in one
    assert f"bitsandbytes: {one['bitsandbytes']} on rank 0; {version} on rank 1" in one["error"]


def test_a_process_on_its_own_passes(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert patches.check_ranks() == patches.report()


def test_one_of_several_without_a_process_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"one of 4 processes .* init_process_group"):
        patches.check_ranks()


def test_what_falls_apart_in_the_same_way_is_one_line():
    good = {"torch": "2.13.0", "bitsandbytes": "0.50.2", "a": "applied", "b": "applied", "c": "applied"}
    ranks = [good] * 8
    assert compare_ranks(ranks) == []
    ranks[5] = good | {"bitsandbytes": "0.49.2", "a": "conflict", "b": "conflict"}
    ranks[7] = {key: value for key, value in good.items() if key != "c"}
    assert compare_ranks(ranks) == [
        "bitsandbytes: 0.50.2 on ranks 0-4, 6-7; 0.49.2 on rank 5",
        "a, b: applied on ranks 0-4, 6-7; conflict on rank 5",
        "c: applied on ranks 0-6; unknown on rank 7",
    ]
