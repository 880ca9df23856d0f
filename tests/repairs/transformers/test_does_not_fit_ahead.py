"""Layers on the disk: while one computes, the system is asked to read the files of those that come next."""

from __future__ import annotations

import os

import pytest
import torch

from patches.offload import prefetch
from tests.repairs.patched_once import unpatched  # noqa: F401
from tests.repairs.transformers.on_disk import IDS, load, logits, make

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to read ahead")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    make().save_pretrained(folder / "plain")
    load(folder / "plain", {"": "cpu"}).save_pretrained(folder / "quantized")
    return folder / "plain"


@pytest.fixture
def events(monkeypatch):
    """What is asked for and what is read, in order."""
    from accelerate.utils import offload

    found = []
    ask, read = prefetch._ask, offload.OffloadedWeightsLoader.__getitem__
    monkeypatch.setattr(prefetch, "_ask", lambda *region: (found.append(("ask", *region)), ask(*region)))
    monkeypatch.setattr(
        offload.OffloadedWeightsLoader,
        "__getitem__",
        lambda self, key: (found.append(("read", key)), read(self, key))[1],
    )
    return found


def asked(events):
    return [os.path.basename(event[1]).removesuffix(".safetensors") for event in events if event[0] == "ask"]


def reads(events):
    return [event[1] for event in events if event[0] == "read"]


def test_all_but_the_first_is_asked_for_before_it_is_read(plain, events, tmp_path):
    model = load(plain, offload_folder=tmp_path)
    first = logits(model)
    assert asked(events) == [], "the first forward shows the order"
    order = reads(events)
    assert len(order) == 18  # 2 layers of 7 linear layers and 2 norms
    events.clear()
    assert torch.equal(logits(model), first)
    ahead = asked(events)
    assert ahead[:17] == [name if "norm" not in name else "model" for name in order[1:]]
    for name in order[1:-1]:
        if "norm" not in name:
            asking = next(
                i for i, event in enumerate(events) if event[0] == "ask" and f"{name}.safetensors" in event[1]
            )
            assert asking < events.index(("read", name))


def test_a_backward_has_an_order_of_its_own(plain, events, monkeypatch, tmp_path):
    monkeypatch.setattr(prefetch, "prefetch_window", lambda: 6000)  # two linear layers
    model = load(plain, offload_folder=tmp_path)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train().enable_input_require_grads()
    for _ in range(2):
        events.clear()
        model(input_ids=IDS, labels=IDS).loss.backward()
    recomputed = reads(events)[18:]
    assert recomputed.index("model.layers.1.mlp.up_proj.weight") < recomputed.index("model.layers.0.mlp.up_proj.weight")
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        asks = [i for i, event in enumerate(events) if event[0] == "ask" and f"{name}.safetensors" in event[1]]
        uses = [i for i, event in enumerate(events) if event == ("read", name)]
        assert len(asks) == len(uses) == 2 and asks[0] < uses[0] < asks[1] < uses[1], name


def test_of_a_checkpoint_only_the_bytes_of_the_tensor(plain, events):
    from safetensors.torch import load_file

    file = str(plain.parent / "quantized" / "model.safetensors")
    model = load(plain.parent / "quantized")
    for _ in range(2):
        logits(model)
    whole, tensors = open(file, "rb").read(), load_file(file)
    regions = {event[1:] for event in events if event[0] == "ask"}
    assert len(regions) == 18
    bytes_of = {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    for path, first, count in regions:
        assert path == file and whole[first : first + count] in bytes_of.values()


@pytest.mark.parametrize("held", [4096, 2048 + 100])
def test_no_more_than_the_window(held, plain, events, monkeypatch, tmp_path):
    monkeypatch.setattr(prefetch, "prefetch_window", lambda: held)
    model = load(plain, offload_folder=tmp_path)
    for _ in range(2):
        logits(model)
    waiting: list[int] = []  # what is asked for is read in this order
    most = 0
    for event in events:
        if event[0] == "ask":
            waiting.append(event[3])
            most = max(most, sum(waiting))
        elif waiting:
            waiting.pop(0)
    assert 0 < most <= held


def test_what_is_cached_is_not_asked_for_again(plain, monkeypatch):
    """Asking looks up each page, which costs more than a look at one of them."""
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: calls.append(call))
    file = str(plain / "model.safetensors")
    whole = len(open(file, "rb").read())
    monkeypatch.setattr(prefetch, "_PIECE", 4096)
    prefetch._ask(file, 0, whole)
    assert calls == []
    monkeypatch.setattr(prefetch, "_is_cached", lambda *where: False)
    prefetch._ask(file, 5, whole - 5)
    assert [call[1] for call in calls] == list(range(5, whole, 4096)) and sum(call[2] for call in calls) == whole - 5
    prefetch._ask(f"{file}.gone", 0, whole)  # the read itself says so


def test_it_can_be_turned_off(plain, events, monkeypatch, tmp_path):
    monkeypatch.setenv("PATCHES_PREFETCH", "0")
    model = load(plain, offload_folder=tmp_path)
    for _ in range(2):
        logits(model)
    assert reads(events) and not asked(events)


@pytest.mark.parametrize("variable", ["PATCHES_PREFETCH", "PATCHES_READ_AHEAD"])
def test_a_value_that_is_no_number(plain, monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, "64MB")
    with pytest.raises(ValueError, match=f"{variable}='64MB' is not valid; expected a number of MiB"):
        load(plain, offload_folder=tmp_path / "off")
    assert not (tmp_path / "off").exists()
