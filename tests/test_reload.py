"""Modules that a program reloads: ``importlib.reload`` makes new classes, and old ones live on in other modules."""

from __future__ import annotations

import pytest

RELOADS = """
    import importlib, io, sys
    import torch
    import bitsandbytes as bnb
    import patches

    def trained(layer):
        layer = layer.to("cpu")
        x = torch.ones(2, 64, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.isfinite().all()
        layer.state_dict()
        if type(layer) is not getattr(bnb.nn.modules, type(layer).__name__):
            return layer  # pickle finds only the class of that name
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def made(space):
        four = space.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)
        return four, space.Linear8bitLt(64, 64, has_fp16_weights=False)

    def loaded(layer):
        try:
            layer.load_state_dict(layer.state_dict())
        except RuntimeError:
            return False
        return True

    if "before" in sys.argv:
        patches.apply()
    importlib.reload(bnb.nn.modules)
    patches.apply()
    for space in (bnb.nn, bnb.nn.modules):
        for layer in made(space):
            trained(layer)
    importlib.reload(bnb.nn)
    print([loaded(trained(layer)) for layer in made(bnb.nn)])
    patches.revert()
    print([loaded(trained(layer)) for layer in made(bnb.nn)])
"""


@pytest.mark.parametrize("when", [(), ("before",)], ids=["applied after", "applied before and after"])
def test_layers_of_reloaded_modules_work_and_are_repaired(when, forked):
    """Old classes too; once ``bitsandbytes.nn`` is reloaded as well, a layer loads what it saved, until ``revert``."""
    assert forked(RELOADS, *when).splitlines() == ["[True, True]", "[False, False]"]
