"""``patches.inspect()`` says what was asked of bitsandbytes, and what the model is."""

from __future__ import annotations

from dataclasses import asdict

import torch

import patches

from .inspected import llama, load


def test_a_list_of_ones_own():
    model = load(4, llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.up_proj"])
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    floating = [p for p in model.parameters() if p.is_floating_point()]
    (dtype,) = {str(p.dtype).removeprefix("torch.") for p in floating}
    found = patches.inspect(model)
    assert asdict(found.facts.asked) == {
        "precision": "4bit",
        "default_list": False,
        "skip": ("lm_head", "model.layers.0.mlp.up_proj"),
        "skipped": 2,
        "of": len(linear),
        "dtypes": {dtype: len(floating)},
        "compute": "float32",
        "threshold": None,
    }
    shown = " ".join(str(found).split())
    assert "skip list (in place of the default): lm_head, model.layers.0.mlp.up_proj;" in shown
    assert f"2 of {len(linear)} linear layers are not quantized; compute dtype float32; the rest: " in shown


def test_the_default_list_of_an_int8_model():
    found = patches.inspect(load(8))
    asked = found.facts.asked
    assert (asked.precision, asked.default_list, asked.skip, asked.skipped) == ("8bit", True, (), 1)
    assert (asked.compute, asked.threshold) == ("", 6.0) and "default skip list" in str(found)


def test_nothing_was_asked_of_a_plain_model():
    assert patches.inspect(llama()).facts.asked is None
