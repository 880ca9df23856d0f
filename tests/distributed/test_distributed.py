"""A slice of the products: launches that run many cells each, on one and two ranks, with the plugin.

``python -m tests.distributed`` runs the whole, also without the plugin. Here every cell is right, but for the named ones,
which are the same error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from patches.engine.gate import satisfied
from tests.distributed import cells
from tests.distributed.launching import launch, together

pytestmark = pytest.mark.skipif(
    not satisfied("bitsandbytes>=0.50"),
    reason="before 0.50 no optimizer of bitsandbytes steps on a CPU; python -m tests.distributed runs the rest",
)
Said = dict[str, list[tuple[str, str]]]
FOREIGN = "from the same base weights"
ERRORS = {
    "train/fsdp1/nf4-u8/lora/step": "Cannot flatten integer dtype tensors",  # torch's: take a floating quant_storage
    "train/fsdp1/int8/lora/step": "Cannot flatten integer dtype tensors",
    "train/fsdp2/nf4-u8/unilora/step": "Invariant encountered",  # torch: a parameter that two modules share
    "train/fsdp2/int8/unilora/step": "Invariant encountered",
    **{name: "is sharded by FSDP2" for name in cells.slice_of_adapters() if name.endswith("merge")},
    **{f"load/nf4-u8/torch/2-/{way}/other": FOREIGN for way in cells.WAYS},
}
"""What each rank says; the other base weights of a checkpoint without quantization states are not to be known."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def start(folder: Path, repaired: dict[str, str]) -> Callable[..., Said]:
    def run(world: int, names: list[str], plugin: bool | list[bool] = True, **environ: str) -> Said:
        return launch(folder, names, {**repaired, **environ}, world, plugin, timeout=300)

    return run


@pytest.fixture(scope="module")
def written(start: Callable[..., Said]) -> None:
    for world in (0, 1, 2):
        assert {together(said) for said in start(world, list(cells.SLICE_SAVED)).values()} == {"right"}
    plain = ["save/nf4-u8/torch", "save/nested/torch"]
    for world in (0, 2):
        assert {together(said) for said in start(world, plain, plugin=False).values()} == {"right"}


def judge(found: Said) -> list[str]:
    """The cells that are not as they should be, with what the ranks said."""
    wrongs = []
    for name, said in found.items():
        expected = "error" if name in ERRORS else "right"
        if together(said) != expected or not all(ERRORS.get(name, "") in words for _, words in said):
            wrongs.append(f"{name}: {said}")
    return wrongs


PART = pytest.mark.parametrize("one_in", [6, pytest.param(1, marks=pytest.mark.release("one cell in six"))])


@PART
def test_training_equals_one_process(start: Callable[..., Said], one_in: int) -> None:
    found = start(2, cells.slice_of_training()[::one_in])
    assert len(found) > 70 // one_in and not judge(found)


@PART
def test_checkpoints_of_other_numbers_of_ranks(start: Callable[..., Said], written: None, one_in: int) -> None:
    found = start(2, cells.slice_of_loading(2)[::one_in])
    assert len(found) > 60 // one_in and not judge(found)


FIXES = {
    "load/nested/AdamW8bit/1+/dcp/same": ("wrong", "torch-checkpoint-other-forms"),
    "load/nf4-u8/torch/2-/dcp/same": ("error", "torch-checkpoint-other-forms"),
    "load/nested/torch/0+/dcp/other": ("error", "torch-checkpoint-other-forms"),
    "load/nf4-u8/torch/2-/broadcast/other": ("wrong", "torch-broadcast-unknown-keys"),
    "train/fsdp2/int8/dora/step": ("wrong", "peft-packed-weights-as-values"),
    "train/fsdp2/nf4-u8/shira/step": ("error", "peft-packed-weights-as-values"),
    "embedding/fsdp2/nf4-u8/whole": ("error", "bitsandbytes-embeddings-sharded"),
    "embedding/fsdp2/int8/whole": ("error", "bitsandbytes-embeddings-sharded"),
}
"""What becomes of a cell without the patch that repairs it: the cells can fail."""


def test_the_cells_see_a_repair_that_is_left_out(start: Callable[..., Said], written: None) -> None:
    without = ",".join({patch for _, patch in FIXES.values()})
    found = start(2, list(FIXES), PATCHES_DISABLE=without)
    assert {name: together(said) for name, said in found.items()} == {name: kind for name, (kind, _) in FIXES.items()}


def test_one_process_reads_what_ranks_wrote(start: Callable[..., Said], written: None) -> None:
    names = [f"load/{what}/2+/{way}/other" for what in ("nested/torch", "nested/AdamW8bit") for way in ("dcp", "full")]
    assert not judge(start(0, names))


def test_a_reader_without_the_plugin_reads_what_ranks_with_it_wrote(start: Callable[..., Said], written: None) -> None:
    names = [f"load/{kind}/torch/2{plugin}/dcp/same" for kind in ("nf4-u8", "nested") for plugin in "+-"]
    full = {
        way: [f"load/nf4-u8/torch/{writer}/{way}/same" for writer in ("2+", "0-")]
        for way in ("broadcast-lenient", "full", "broadcast-offload")
    }
    found = start(2, names + sum(full.values(), []), plugin=False)
    assert not judge({name: found[name] for name in names + full["broadcast-lenient"]})
    # A full state dict is that of one process, of which torch refuses the quantization states: docs/limits.md.
    for refused in full["full"], full["broadcast-offload"]:
        by_ranks, alone = (found[name] for name in refused)
        assert by_ranks == alone and all("weight.absmax" in words for kind, words in by_ranks if kind == "error")
        assert together(by_ranks) == "error"


def test_embeddings_train_as_in_one_process(start: Callable[..., Said]) -> None:
    found = start(2, cells.slice_of_embeddings())
    assert len(found) == 10 and not judge(found)


def test_adapters_of_sharded_models_are_saved_and_not_merged(start: Callable[..., Said]) -> None:
    found = start(2, cells.slice_of_adapters())
    assert len(found) == 8 and not judge(found)


@pytest.mark.parametrize("first", [
    pytest.param(True, id="rank 0"), pytest.param(False, id="rank 1", marks=pytest.mark.release("rank 0")),
])  # fmt: skip
def test_the_plugin_on_one_rank_only_is_said(first: bool, start: Callable[..., Said]) -> None:
    names = [f"misfit/{what}{kind}" for kind in ("", "-int8") for what in ("save", "load")] + ["misfit/broadcast-other"]
    found = start(2, names, plugin=[first, not first])
    kinds = {name: together(said) for name, said in found.items()}
    patched = {name: said[0 if first else 1][1] for name, said in found.items()}
    assert "check_ranks()" in patched["misfit/broadcast-other"]
    lacking = f"rank {int(first)} would not"
    for kind in "", "-int8":
        assert f"{lacking} save" in patched["misfit/save" + kind]
        assert kinds["misfit/load" + kind] == "error" and f"{lacking} load" in patched["misfit/load" + kind]


@pytest.mark.parametrize("world, name", [(2, "misfit/broadcast-other-killed"), (3, "misfit/broadcast-alone-killed")])
def test_no_rank_waits_for_one_that_is_gone(world: int, name: str, start: Callable[..., Said]) -> None:
    """The survivors see the closed connection at once, as without the plugin."""
    survivors = start(world, [name])[name]
    assert len(survivors) == world - 1
    for kind, words in survivors:
        assert kind == "error" and ("by peer" in words or "raised an error" in words), words
        assert int(words.partition("after ")[2].partition(" s:")[0]) < 30, words
