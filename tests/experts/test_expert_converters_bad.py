"""Checkpoints of quantized experts that are not whole, or of several minds: an error names the tensor, and nothing is read."""

from __future__ import annotations

import logging
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

from bitsandbytes.functional import quantize_4bit  # noqa: E402

import patches  # noqa: E402
from patches.engine.gate import satisfied  # noqa: E402
from tests.experts.models import saved  # noqa: E402
from tests.experts.test_expert_converters import EXPERT, ID, packed, read, rewrite  # noqa: E402

FP4 = pytest.mark.skipif(not satisfied("bitsandbytes>=0.47"), reason="before 0.47 a CPU quantizes to nf4 only")


@pytest.fixture(autouse=True)
def patched():
    with patches.applied(ID):
        yield


def experts_at(tensors, number):
    return [name for name in tensors if f".experts.{number}." in name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [t.pop(key) for key in list(t) if key.startswith(EXPERT)], r"3 of 4 experts.*missing: \[2\]"),
        (lambda t: [t.update({k.replace("s.2.", "s.4."): t.pop(k)}) for k in experts_at(t, 2)], r"missing: \[2\]"),
        (lambda t: t.pop(f"{EXPERT}.absmax"), "4 experts are packed, but 3 have absmax"),
        (lambda t: t.pop(EXPERT), "3 experts are packed, but 4 have absmax"),
        (
            lambda t: t.update({EXPERT.replace("up_proj", "down_proj") + ".nested_absmax": torch.ones(1)}),
            "quantized in different ways",
        ),
        (
            lambda t: t.update(
                {f"{EXPERT}.quant_state.bitsandbytes__fp4": t.pop(f"{EXPERT}.quant_state.bitsandbytes__nf4")}
            ),
            "quantized in different ways",
        ),
    ],
    ids=["expert", "another number", "statistics", "packed weights", "nested", "type"],
)
def test_a_checkpoint_that_is_not_whole(tmp_path, change, message, caplog, monkeypatch):
    packed(tmp_path)
    rewrite(tmp_path, change)
    refused(tmp_path, message, caplog, monkeypatch)


def experts_named(tensors, end):
    return [name for name in tensors if ".experts." in name and name.endswith(end)]


def shorter(end, length):
    return lambda tensors: tensors.update({name: tensors[name][:length] for name in experts_named(tensors, end)})


def one_too_many(tensors):
    tensors.update({n.replace(".2.", ".4."): t.clone() for n, t in tensors.items() if ".experts.2." in n})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorter(".absmax", 3), r"expert 0 has shape \(64, 64\), but absmax of 3 values: expected 64"),
        (shorter("_proj.weight", 100), "but packed weights of 100 bytes: expected 2048"),
        (shorter(".quant_map", 4), "but quant_map of 4 values: expected 16"),
        (shorter("nested_absmax", 0), "but nested_absmax of 0 values: expected 1"),
        (lambda t: t.update({f"{EXPERT}.quant_map": t[f"{EXPERT}.quant_map"] * 2}), "expert 2 has another quant_map"),
        (
            lambda t: t.update({f"{EXPERT}.nested_quant_map": t[f"{EXPERT}.nested_quant_map"] * 2}),
            "expert 2 has another nested_quant_map",
        ),
        (
            lambda t: t.update({EXPERT: t[EXPERT].view(torch.int8)}),
            "of expert 2 are torch.int8, those of expert 0 torch.u",
        ),
        (one_too_many, r"has 5 experts of \S+, the model 4"),
    ],
    ids=[
        "absmax",
        "packed weights",
        "quant_map",
        "nested_absmax",
        "another quant_map",
        "another nested_quant_map",
        "another dtype",
        "an expert too many",
    ],  # fmt: skip
)
def test_tensors_of_another_length(tmp_path, change, message, caplog, monkeypatch):
    """A kernel would read beyond them."""
    packed(tmp_path, double=True)
    rewrite(tmp_path, change)
    refused(tmp_path, message, caplog, monkeypatch)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({"quant_type": "fp4"}, "fp4 in blocks of 64", marks=FP4),
        ({"blocksize": 128}, "nf4 in blocks of 128"),
        ({"compress_statistics": True}, "nf4 in blocks of 64, double quantization in blocks of 256"),
    ],
    ids=["type", "blocks", "nested"],
)
def test_two_matrices_of_an_expert_in_different_ways(tmp_path, options, kind, caplog, monkeypatch):
    """All of ``up_proj``: each of the two lists of experts is whole, and one parameter has one table and one block size."""
    packed(tmp_path)
    rewrite(tmp_path, lambda tensors: packed_again(tensors, "up_proj.weight", **options))
    message = (
        rf"gate_proj.weight is nf4 in blocks of 64, \S+up_proj.weight is {kind}. Quantize the original model again"
    )
    refused(tmp_path, message, caplog, monkeypatch)


@FP4
def test_two_parameters_in_different_ways(tmp_path):
    values = packed(tmp_path)
    rewrite(
        tmp_path, lambda tensors: packed_again(tensors, "down_proj.weight", quant_type="fp4", compress_statistics=True)
    )
    experts = read(tmp_path).model.layers[0].mlp.experts
    assert (experts.gate_up_proj.packed.kind.quant_type, experts.down_proj.packed.kind.quant_type) == ("nf4", "fp4")
    up = values["model.layers.0.mlp.experts.3.up_proj.weight"]
    assert torch.equal(experts.gate_up_proj[3].dequantize()[64:], up)


def packed_again(tensors, end, **options):
    for name in experts_named(tensors, end):
        weight = torch.randn(64, 64)
        codes, state = quantize_4bit(weight, **{"quant_type": "nf4", **options})
        for key in [key for key in tensors if key.startswith(name)]:
            del tensors[key]
        tensors.update({name: codes, **{f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}})


def test_an_expert_of_another_shape(tmp_path, caplog, monkeypatch):
    saved(tmp_path, "qwen3_moe")
    rewrite(tmp_path, lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:32]}))
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with patches.quantize_experts():
        message = r"expert 2 of \S+up_proj.weight has shape \(32, 64\), expert 0 \(64, 64\)"
        refused(tmp_path, message, caplog, monkeypatch, quantization_config=config)


def refused(folder, message, caplog, monkeypatch, **options):
    logger = logging.getLogger("transformers")  # it has a stream of its own, and what other tests left of its level
    caplog.set_level(logging.WARNING, logger="transformers")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with pytest.raises(RuntimeError) as raised:
        read(folder, **options)
    text = str(raised.value) + caplog.text
    assert re.search(message, text), text[-3000:]
    assert "mlp.experts" in text
