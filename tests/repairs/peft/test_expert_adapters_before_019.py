"""Adapters of experts in the layout of peft 0.17 and 0.18, against a model that has what they add in its weights.

The files are written here as these releases write them: ``lora_A`` (experts * rank, rows), ``lora_B`` (columns,
rank * experts). Nine adapters that peft 0.18.1 itself had saved were read with a difference of 0 when this was written.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from safetensors.torch import load_file, save_file

import patches
from patches.engine.gate import satisfied
from patches.repairs.reproducers.log_records import record_logs

ID = "peft-expert-adapters-before-019"
EXPERTS, RANK = 4, 2
SQUARE, WIDE = (16, 16), (24, 16)

if satisfied("peft<0.19"):
    pytest.skip("this peft has the old layout itself", allow_module_level=True)


class Experts(torch.nn.Module):
    """Two parameters of experts in one module, as in transformers; each expert gets all of x."""

    def __init__(self, up: tuple[int, int], down: tuple[int, int]) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, *up))
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, *down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up.mT @ self.down.mT


class Mixture(torch.nn.Module):
    def __init__(self, up: tuple[int, int], down: tuple[int, int]) -> None:
        super().__init__()
        self.experts = Experts(up, down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


def saved(folder: Path, model: Mixture, version: str | None) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Writes an old adapter of ``model``; returns the model with what it adds, and the tensors of the file."""
    config = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=["experts.up", "experts.down"])
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    merged, tensors = copy.deepcopy(model), {}
    for parameter, inside in ((merged.experts.up, ".base_layer"), (merged.experts.down, "")):
        _, rows, columns = parameter.shape
        a, b = torch.randn(EXPERTS * RANK, rows), torch.randn(columns, RANK * EXPERTS)
        tensors |= {f"base_model.model.experts{inside}.lora_{k}.weight": t for k, t in (("A", a), ("B", b))}
        added = torch.einsum("ore,eri->eio", b.view(columns, RANK, EXPERTS), a.view(EXPERTS, RANK, rows))
        parameter.data += added * config.lora_alpha / RANK
    save_file(tensors, folder / "adapter_model.safetensors")
    said = json.loads((folder / "adapter_config.json").read_text())
    said.pop("peft_version", None)
    (folder / "adapter_config.json").write_text(json.dumps(said | ({"peft_version": version} if version else {})))
    return merged, tensors


def loaded(model: torch.nn.Module, folder: Path, **options: object) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder, **options).eval()


@pytest.mark.parametrize("version", ["0.18.1", None])
@pytest.mark.parametrize("down", [(16, 24), (24, 24)], ids=["shapes differ", "one is square"])
def test_they_are_read_by_their_shapes(tmp_path, down, version):
    torch.manual_seed(0)
    model, x = Mixture(WIDE, down), torch.randn(1, 5, 16)
    merged, _ = saved(tmp_path, model, version)
    with patches.applied(ID), record_logs() as said:
        for options in ({}, {"low_cpu_mem_usage": True}):
            assert torch.allclose(loaded(model, tmp_path, **options)(x), merged(x), rtol=1e-4, atol=1e-4)
    assert not said, "the shapes decide"


@pytest.mark.skipif(satisfied("transformers<5"), reason="transformers 4 keeps experts as linear layers")
@pytest.mark.parametrize("sides", [(WIDE, (16, 24)), (SQUARE, SQUARE)], ids=["shapes differ", "square"])
def test_they_are_read_into_quantized_experts(tmp_path, sides):
    from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts
    from patches.experts.tensor import as_parameter

    torch.manual_seed(0)
    model, x = Mixture(*sides), torch.randn(1, 5, 16)
    quantized = copy.deepcopy(model)
    for name in ("up", "down"):
        held = split_and_quantize_experts(
            getattr(model.experts, name).detach(), 1, QuantizationConfig("nf4", False, torch.uint8)
        )
        setattr(quantized.experts, name, as_parameter(held))
        getattr(model.experts, name).data = getattr(quantized.experts, name).dequantize()
    merged, _ = saved(tmp_path, model, "0.18.1")
    with patches.applied(ID, "torch-quantized-experts"):
        assert torch.allclose(loaded(quantized, tmp_path)(x), merged(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("version", ["0.18.1", None])
def test_square_ones_are_read_by_the_release_and_a_warning_says_so(tmp_path, version):
    torch.manual_seed(0)
    model, x = Mixture(SQUARE, SQUARE), torch.randn(1, 5, 16)
    merged, _ = saved(tmp_path, model, version)
    assert not torch.allclose(loaded(model, tmp_path)(x), merged(x), rtol=0.1), "it is something else, silently"
    with patches.applied(ID), record_logs() as said:
        assert torch.allclose(loaded(model, tmp_path)(x), merged(x), rtol=1e-4, atol=1e-3)
    assert "before 0.19" in said[0].getMessage()


def test_what_was_read_is_saved_in_the_new_layout(tmp_path):
    torch.manual_seed(0)
    model, x = Mixture(SQUARE, SQUARE), torch.randn(1, 5, 16)
    saved(tmp_path, model, "0.18.1")
    with patches.applied(ID):
        first = loaded(model, tmp_path)
        first.save_pretrained(tmp_path / "again")
        with record_logs() as said:
            assert torch.equal(loaded(model, tmp_path / "again")(x), first(x))
    assert not said
    assert torch.equal(loaded(model, tmp_path / "again")(x), first(x)), "without the patch too"


@pytest.mark.parametrize("sides", [(SQUARE, SQUARE), (WIDE, (16, 24))])
def test_new_ones_are_read_as_before(tmp_path, sides):
    torch.manual_seed(0)
    model = Mixture(*sides)
    config = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=["experts.up", "experts.down"])
    config.init_lora_weights = False
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    before = loaded(model, tmp_path).state_dict()
    with patches.applied(ID), record_logs() as said:
        after = loaded(model, tmp_path)
    assert not said and after.peft_config["default"].peft_version == peft.__version__
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.state_dict().items())


def test_both_layouts_in_one_file_are_an_error(tmp_path):
    torch.manual_seed(0)
    model = Mixture(WIDE, (16, 24))
    _, tensors = saved(tmp_path, model, "0.18.1")
    key = "base_model.model.experts.lora_{}.weight"
    a, b = tensors[key.format("A")], tensors[key.format("B")]
    save_file(load_file(tmp_path / "adapter_model.safetensors") | {
        key.format("A"): torch.zeros(len(a), len(b)), key.format("B"): torch.zeros(a.shape[1], b.shape[1]),
    }, tmp_path / "adapter_model.safetensors")  # fmt: skip
    with patches.applied(ID), pytest.raises(ValueError, match="joins two adapters"):
        loaded(model, tmp_path)
