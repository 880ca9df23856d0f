"""``wrap_method``: around a method of the class, or of its base, with every argument as it was given."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from patches.quantized.layer_methods import Load, wrap_method


def around(self: Any, inherited: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return self, inherited, args, kwargs


@pytest.mark.parametrize("own", [True, False], ids=["own", "of its base"])
def test_it_gets_the_method_that_was_there(own: bool) -> None:
    layer = bnb.nn.Linear4bit(4, 2)
    original = vars(torch.nn.Linear)["extra_repr"] if own else None
    edit = wrap_method("Linear4bit", "extra_repr", around)
    assert edit.target == "bitsandbytes.nn.modules:Linear4bit.extra_repr"
    method = edit.make(original)
    found, inherited, args, kwargs = method(layer, 1, two=2)
    assert (found, args, kwargs, method.__name__) == (layer, (1,), {"two": 2}, "extra_repr")
    assert inherited() == layer.extra_repr()


def test_a_load_passes_its_arguments_on() -> None:
    calls: list[tuple[Any, ...]] = []
    rest = ("layer.", {"assign_to_params_buffers": True}, True, ["a"], ["b"], ["c"])
    load = Load(lambda *args: calls.append(args), {"key": 1}, *rest)
    load.run()
    load.run({})
    assert calls == [({"key": 1}, *rest), ({}, *rest)]
    assert load.assign and not load._replace(local_metadata={}).assign
