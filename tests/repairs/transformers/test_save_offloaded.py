"""An offloaded model saved and loaded again: the tensors of the whole model, and the model is offloaded still."""

from __future__ import annotations

import pytest
import torch

import patches
from tests.repairs.peft.offloading import KINDS, logits, offloaded, save_base, ways, whole

pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_in(2)


@pytest.mark.parametrize("ran", [False, True], ids=["cold", "ran"])
@pytest.mark.parametrize("kind, way", [(kind, way) for kind in KINDS for way in ways(kind)])
def test_saved_and_loaded(kind, way, ran, tmp_path, device):
    from safetensors.torch import load_file

    base = save_base(tmp_path / "base")
    with patches.applied():
        model, expected = offloaded(base, kind, way, device), whole(base, kind, device)
        away = {name for name, p in model.named_parameters() if p.is_meta}
        if ran:
            logits(model)
        for name, saved in (("off", model), ("whole", expected)):
            saved.save_pretrained(tmp_path / name)
        got, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("off", "whole"))
        assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert away == {name for name, p in model.named_parameters() if p.is_meta}
        assert torch.equal(logits(model), logits(expected))
