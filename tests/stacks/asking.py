"""Flows of what ``from_pretrained`` is asked for: by keyword, by a list of skipped modules, with a dtype."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.stacks import jobs, models

KEYWORDS = {
    "4-bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "INT8": {"load_in_8bit": True},
}


def by_keyword(kind: str) -> jobs.Flow:
    """``load_in_4bit=True`` in place of a configuration, against the same model loaded with one."""

    def run(folder: str) -> float:
        import torch

        more = {"bnb_4bit_compute_dtype": torch.float32} if kind == "4-bit" else {}
        model = models.load(folder, None, **KEYWORDS[kind], **more)
        return models.distance([models.logits(model)], [models.logits(models.load(folder, kind))])

    return run


def skipped(kind: str) -> jobs.Flow:
    """How many layers are quantized of a part of the model that a list of skipped modules names."""

    def run(folder: str) -> float:
        model = models.load(folder, kind, skip=["mlp", "lm_head"])
        models.logits(model)
        return float(len([name for name in _quantized(model) if ".mlp." in name]))

    return run


def tied(kind: str) -> jobs.Flow:
    """A tied head with a list that does not name it: the outputs, against those with a list that does."""

    def run(folder: str) -> float:
        with tempfile.TemporaryDirectory() as there:
            models.save_base(there, tie_word_embeddings=True)
            model, right = (models.load(there, kind, skip=names) for names in (["q_proj"], ["q_proj", "lm_head"]))
            return models.distance([models.logits(model)], [models.logits(right)])

    return run


def in_dtype(kind: str) -> jobs.Flow:
    """How many floating point parameters of a quantized checkpoint are not in the dtype that was asked for."""

    def run(folder: str) -> float:
        import torch

        with tempfile.TemporaryDirectory() as again:
            models.load(folder, kind).save_pretrained(again)
            model = models.load(again, None, torch_dtype=torch.bfloat16)
            models.logits(model)
            floating = (each for each in model.parameters() if each.is_floating_point())
            return float(sum(each.dtype != torch.bfloat16 for each in floating))

    return run


def _quantized(model: Any) -> list[str]:
    import bitsandbytes as bnb

    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]
