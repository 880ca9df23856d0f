"""``patches.quantize_experts(model)`` computes what the model computes whose experts are rounded in floating point."""

from __future__ import annotations

import copy
import sys
import zipfile

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
transformers = pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

import patches  # noqa: E402
from patches.engine.gate import satisfied  # noqa: E402
from patches.experts import dense_operations  # noqa: E402
from patches.experts.experts_in_model import find_experts  # noqa: E402
from patches.experts.tensor import Experts4bit  # noqa: E402
from patches.repairs.reproducers.log_records import record_logs  # noqa: E402
from tests.experts.models import CONFIGS, IDS, SOME, gap, loaded, rounded, saved, step  # noqa: E402

pytestmark = pytest.mark.one_in(2)

REST = [
    pytest.param(kind, marks=pytest.mark.release("SOME of tests/experts/models.py"))
    for kind in sorted(set(CONFIGS) - set(SOME))
]


@pytest.fixture(autouse=True)
def counted():
    dense_operations.COUNTS.clear()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("qwen3"), "qwen3_moe")


@pytest.mark.parametrize("kind", [*SOME, *REST])
def test_equal_to_the_rounded_model_in_eager(tmp_path, kind):
    saved(tmp_path, kind)
    expected = step(rounded(loaded(tmp_path)))
    unrounded = step(loaded(tmp_path))
    model = patches.quantize_experts(loaded(tmp_path))
    experts = list(find_experts(model))
    assert len(expected) > 2 or kind == "jetmoe", "its router is a linear layer of 4 bits"
    assert experts and all(isinstance(one.parameter, Experts4bit) for one in experts)
    assert gap(expected, step(model)) == 0 < gap(expected, unrounded)
    assert not dense_operations.COUNTS


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_in_inference_mode(qwen3, implementation):
    model = patches.quantize_experts(loaded(qwen3, implementation)).eval()
    with torch.no_grad():
        expected = model(IDS).logits
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)
    assert not dense_operations.COUNTS


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_equal_but_for_rounding_in_the_other_implementations(qwen3, implementation):
    expected = step(rounded(loaded(qwen3, implementation)))
    assert gap(expected, step(patches.quantize_experts(loaded(qwen3, implementation)))) < 3e-6
    assert not dense_operations.COUNTS


@pytest.mark.parametrize(
    ("config", "quant_type", "double"),
    [
        ({"bnb_4bit_use_double_quant": True}, "nf4", True),
        ({"bnb_4bit_quant_type": "fp4"}, "fp4", False),
        ({"bnb_4bit_quant_storage": torch.bfloat16}, "nf4", False),
    ],
    ids=["double", "fp4", "storage"],
)
def test_as_the_configuration_says(qwen3, config, quant_type, double):
    if not double and satisfied("bitsandbytes<0.47"):
        pytest.skip("on a CPU bitsandbytes 0.46 has NF4 in uint8 storage only")
    expected = step(rounded(loaded(qwen3, **config), quant_type, double))
    assert gap(expected, step(patches.quantize_experts(loaded(qwen3, **config)))) == 0


def test_packed_weights_are_those_of_each_matrix(qwen3):
    from bitsandbytes.functional import quantize_4bit

    model = loaded(qwen3)
    weight = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    gate, up = patches.quantize_experts(model).model.layers[0].mlp.experts.gate_up_proj.packed.parts
    for part, matrix in ((gate, weight[2, :64]), (up, weight[2, 64:])):
        codes, state = quantize_4bit(matrix.contiguous(), quant_type="nf4")
        assert torch.equal(part.codes[2], codes.flatten())
        assert torch.equal(part.absmax[2], state.absmax)


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"autocast": True}], ids=["checkpointing", "autocast"])
def test_a_step_in_each_way(qwen3, options):
    expected = step(rounded(loaded(qwen3)), **options)
    assert gap(expected, step(patches.quantize_experts(loaded(qwen3)), **options)) == 0
    assert not dense_operations.COUNTS


def mlp(model):
    return model.model.layers[0].mlp


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_is_that_of_the_rounded_model(qwen3, dtype):
    x = torch.randn(1, 8, 64, dtype=dtype)
    with torch.no_grad():
        expected = mlp(rounded(loaded(qwen3))).to(dtype)(x)
        got = mlp(patches.quantize_experts(loaded(qwen3))).to(dtype)(x)
    assert torch.equal(expected, got) and got.dtype == dtype


def test_copies_and_state_dicts(qwen3, tmp_path):
    model, x = patches.quantize_experts(loaded(qwen3)), torch.randn(1, 8, 64)
    with torch.no_grad():
        expected = mlp(model)(x)
        copied = copy.deepcopy(model)
        mlp(copied).experts.gate_up_proj.packed.parts[0].codes.zero_()
        assert torch.equal(mlp(model)(x), expected) and not torch.equal(mlp(copied)(x), expected)
        torch.save(mlp(model).state_dict(), tmp_path / "state.pt")
        mlp(copied).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(mlp(copied)(x), expected)
        torch.save(model, tmp_path / "model.pt")
        assert torch.equal(mlp(torch.load(tmp_path / "model.pt", weights_only=False))(x), expected)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_of_1_1_names_a_module_that_lies_elsewhere_now(qwen3, tmp_path, monkeypatch, weights_only):
    from patches.experts.tensor import rebuild_from_pickle

    experts = mlp(patches.quantize_experts(loaded(qwen3))).experts.gate_up_proj
    with monkeypatch.context() as former:
        former.setattr(rebuild_from_pickle, "__module__", "bnb_patches.repairs.helpers.experts.tensor")
        former.setattr(rebuild_from_pickle, "__qualname__", "rebuilt")
        torch.save(experts, tmp_path / "experts.pt")
    assert b"repairs.helpers" in zipfile.ZipFile(tmp_path / "experts.pt").read("experts/data.pkl")
    assert torch.equal(
        torch.load(tmp_path / "experts.pt", weights_only=weights_only).dequantize(), experts.dequantize()
    )


def test_the_footprint_in_bytes(qwen3):
    model = loaded(qwen3, dtype=torch.bfloat16)
    before = sum(one.parameter.nbytes for one in find_experts(model))
    patches.quantize_experts(model)
    assert sum(one.parameter.nbytes for one in find_experts(model)) < 0.3 * before


def test_prepared_for_training(qwen3):
    """peft makes float32 of what is in half precision: of experts another view, which takes no memory."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    prepare = lambda model: peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # noqa: E731
    expected = step(prepare(rounded(loaded(qwen3, dtype=torch.bfloat16))))
    model = patches.quantize_experts(loaded(qwen3, dtype=torch.bfloat16))
    before = {one.full_name: one.parameter.nbytes for one in find_experts(model)}
    assert gap(expected, step(prepare(model))) == 0
    assert {one.full_name: one.parameter.nbytes for one in find_experts(model)} == before


def test_counted_and_shown(qwen3):
    model = loaded(qwen3)
    numbers = model.num_parameters()
    shown = patches.inspect(patches.quantize_experts(model))
    assert model.num_parameters() == numbers
    (layers,) = [each for each in shown.facts.layers if each.kind == "Qwen3MoeExperts"]
    assert layers.quantized == "nf4 experts" and layers.statistics == "present" and layers.count == 2
    assert layers.bytes == sum(one.parameter.nbytes for one in find_experts(model))
    assert not any("expert" in problem.what for problem in shown.problems)


def test_what_went_dense_is_shown(qwen3):
    model = patches.quantize_experts(loaded(qwen3))
    step(model)
    assert (
        not [p for p in patches.inspect(model).problems if "at once" in p.what] and not dense_operations.report_notes()
    )
    experts = model.model.layers[0].mlp.experts.down_proj
    for part in (experts, experts[:2]):
        part.sum()
    said = "aten.sum.default (2 times, up to 0.1 MB)"
    (problem,) = (p for p in patches.inspect(model).problems if "at once" in p.what)
    assert problem.what.endswith(f"dequantized all experts of a parameter at once: {said}")
    assert "model.layers.0.mlp.experts" in problem.where and problem.patch == "torch-quantized-experts"
    assert any(note.endswith(said) for note in patches.report().notes) and "aten.sum" in str(patches.report())
    assert not any("at once" in p.what for p in patches.inspect(loaded(qwen3)).problems), "it has no quantized experts"


def test_on_the_cpu_between_calls(qwen3):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, x = patches.quantize_experts(loaded(qwen3)), torch.randn(1, 8, 64)
    with torch.no_grad():
        expected = mlp(model)(x)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        experts = mlp(model).experts.down_proj
        assert isinstance(experts, Experts4bit) and experts.is_meta
        assert torch.equal(mlp(model)(x), expected)
    assert not dense_operations.COUNTS


def test_the_disk_is_refused(qwen3, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with pytest.raises(NotImplementedError, match="disk_offload and dispatch_model cannot write them to the disk"):
        accelerate.disk_offload(patches.quantize_experts(loaded(qwen3)), tmp_path, torch.device("cpu"))


def test_skipped_modules_stay(qwen3):
    model = patches.quantize_experts(loaded(qwen3, llm_int8_skip_modules=["lm_head", "model.layers.1"]))
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert isinstance(first.down_proj, Experts4bit) and not isinstance(second.down_proj, Experts4bit)


def test_twice_is_once(qwen3):
    model = patches.quantize_experts(loaded(qwen3))
    before = model.model.layers[0].mlp.experts.down_proj
    assert patches.quantize_experts(model).model.layers[0].mlp.experts.down_proj is before


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_quantized(qwen3):
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM is not quantized: load it with"):
        patches.quantize_experts(model)


def test_a_part_of_a_model_and_what_wraps_it(qwen3):
    model = loaded(qwen3)
    for given in (model.model, model.model.layers[0], torch.nn.DataParallel(model)):
        message = (
            f"this {type(given).__name__} is a part of a quantized model, or wraps one: give quantize_experts the model"
        )
        with pytest.raises(ValueError, match=message):
            patches.quantize_experts(given)
    assert not any(isinstance(parameter, Experts4bit) for parameter in model.parameters())


def test_int8_that_keeps_floating_point(qwen3):
    config = dict(load_in_4bit=False, load_in_8bit=True, llm_int8_has_fp16_weight=True)
    with pytest.raises(ValueError, match="llm_int8_has_fp16_weight=True keeps weights in floating point"):
        patches.quantize_experts(loaded(qwen3, **config))


@pytest.mark.parametrize("break_it", [lambda p: p.to("meta"), lambda p: p.double()], ids=["meta", "float64"])
def test_all_or_none(qwen3, break_it):
    model = loaded(qwen3)
    last = model.model.layers[1].mlp.experts
    last.down_proj = torch.nn.Parameter(break_it(last.down_proj.data), requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj is "):
        patches.quantize_experts(model)
    assert not any(isinstance(parameter, Experts4bit) for parameter in model.parameters())


def test_transformers_4(qwen3, monkeypatch):
    model = loaded(qwen3)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")  # a lazy module replaces itself
    with pytest.raises(RuntimeError, match="needs transformers>=5, installed is 4.57.6"):
        patches.quantize_experts(model)


@pytest.mark.parametrize("name", ["experts", "layers.0.mlp", "experts.down_proj", "layers.1"])
def test_a_name_skips_the_experts_whose_path_contains_it(qwen3, name):
    with patches.applied("transformers-skip-list-ignored"), record_logs() as said:
        model = loaded(qwen3, llm_int8_skip_modules=[name])
    assert not any("no module of that name" in record.getMessage() for record in said)
    parameters = [one.full_name for one in find_experts(model)]
    expected = {path for path in parameters if f".{name}." not in f".{path}."}
    if expected:
        patches.quantize_experts(model)
    else:
        with pytest.raises(ValueError, match="llm_int8_skip_modules names all of them"):
            patches.quantize_experts(model)
    assert {one.full_name for one in find_experts(model) if isinstance(one.parameter, Experts4bit)} == expected
