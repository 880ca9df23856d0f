"""A cast after ``unwrap_tensor_subclass``: measured against the model that was never unwrapped."""

from __future__ import annotations

import copy
import io

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")

from torch.nn.utils import parametrize
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup

import patches

pytestmark = pytest.mark.one_in(2)

ID = "torchao-unwrap-frozen-dtype"

CONFIGS = {
    "4-bit": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "8-bit": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    "8da4w": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
}
SHORT = {"float()": torch.float32, "half()": torch.float16}
CASTS = {
    "to(float32)": lambda model, device: model.to(torch.float32),
    "to(float16)": lambda model, device: model.to(torch.float16),
    "float()": lambda model, device: model.float(),
    "half()": lambda model, device: model.half(),
    "to(device, float32)": lambda model, device: model.to(device=device, dtype=torch.float32),
    "chained": lambda model, device: model.to(torch.float16).to(device).to(torch.float32),
    "there and back": lambda model, device: model.to(torch.float32).to(torch.bfloat16),
}
IDS = torch.tensor([[0, 3, 5, 7]])


class Model(torch.nn.Module):
    """An embedding, a linear layer and a norm: quantized weights among others that are cast as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 64)
        self.linear = torch.nn.Linear(64, 32)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, ids):
        return self.norm(self.linear(self.embedding(ids)))


def quantized(config: str) -> torch.nn.Module:
    """A bfloat16 model with quantized weights; its embedding is always weight-only."""
    torch.manual_seed(0)
    model = Model().bfloat16().eval()
    weight_only = CONFIGS["8-bit" if config == "8-bit" else "4-bit"]
    quantize_(model, weight_only, lambda module, name: isinstance(module, torch.nn.Embedding))
    quantize_(model, CONFIGS[config])
    return model


def unwrapped(config: str) -> torch.nn.Module:
    return utils.unwrap_tensor_subclass(quantized(config))


def dequantized_to(program) -> set:
    """What dtypes the exported program dequantizes to."""
    nodes = [node for node in program.graph.nodes if "dequantize_affine" in str(node.target)]
    assert nodes, "the program dequantizes nothing"
    return {node.meta["val"].dtype for node in nodes}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("config", CONFIGS)
def test_output_is_that_of_the_model_never_unwrapped(config, cast, device):
    native = quantized(config).to(device)
    # .float() and .half() of a native weight have a defect of their own: the reference is .to().
    native = native.to(SHORT[cast]) if cast in SHORT else CASTS[cast](native, device)
    with patches.applied(ID):
        model = CASTS[cast](unwrapped(config).to(device), device)
        expected, out = native(IDS.to(device)), model(IDS.to(device))
    assert out.dtype == model.norm.weight.dtype == model.linear.weight.dtype == model.embedding.weight.dtype
    assert torch.equal(out, expected)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("config", CONFIGS)
def test_export_dequantizes_to_the_new_dtype(config, strict):
    frozen = torch.export.export(unwrapped(config).float(), (IDS,), strict=strict)
    assert dequantized_to(frozen) == {torch.bfloat16}  # and not a word
    with patches.applied(ID):
        model = unwrapped(config).float()
        program = torch.export.export(model, (IDS,), strict=strict)
    assert dequantized_to(program) == dequantized_to(program.run_decompositions({})) == {torch.float32}
    assert torch.equal(program.module()(IDS), model(IDS))


def test_compiled_is_eager():
    with patches.applied(ID):
        model = unwrapped("4-bit").float()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(IDS), model(IDS))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_that_is_not_cast_is_untouched(config):
    before, state = unwrapped(config)(IDS), unwrapped(config).state_dict()
    with patches.applied(ID):
        model = unwrapped(config)
        assert torch.equal(model(IDS), before)
        assert torch.equal(model.to("cpu").to(torch.bfloat16)(IDS), before)
        assert list(model.state_dict()) == list(state)
        for key, value in model.state_dict().items():
            assert value.dtype == state[key].dtype and torch.equal(value, state[key]), key


def test_state_dict_goes_through_a_file_after_a_cast():
    dtypes = {key: value.dtype for key, value in unwrapped("4-bit").float().state_dict().items()}
    with patches.applied(ID):
        model, file = unwrapped("4-bit").float(), io.BytesIO()
        torch.save(model.state_dict(), file)
        assert {key: value.dtype for key, value in model.state_dict().items()} == dtypes
        file.seek(0)
        other = unwrapped("4-bit").float()
        for tensor in other.state_dict().values():
            tensor.fill_(1)
        assert not torch.equal(other(IDS), model(IDS))
        other.load_state_dict(torch.load(file))
        assert torch.equal(other(IDS), model(IDS))


def test_a_copy_is_cast_alone():
    with patches.applied(ID):
        model = unwrapped("4-bit")
        before = model(IDS)
        assert copy.deepcopy(model).float()(IDS).dtype == torch.float32
        assert torch.equal(model(IDS), before)


def test_metadata_shared_by_a_shallow_copy_is_not_written():
    with patches.applied(ID):
        model = unwrapped("4-bit")
        rebuild = model.linear.parametrizations.weight[0]
        shallow = copy.copy(rebuild)
        model.float()
        assert rebuild.rebuild_stack[0][1]["dtype"] == torch.float32
        assert shallow.rebuild_stack[0][1]["dtype"] == torch.bfloat16


def test_meta_and_to_empty_keep_the_cast():
    with patches.applied(ID):
        model = unwrapped("4-bit").float()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        expected = model(IDS)
        model.to("meta").to_empty(device="cpu").load_state_dict(state)
        assert model.linear.weight.dtype == torch.float32
        assert torch.equal(model(IDS), expected)
        materialized = unwrapped("4-bit").to("meta", torch.float32).to_empty(device="cpu")
        materialized.load_state_dict(state)
        assert torch.equal(materialized(IDS), expected)


def test_remove_parametrizations_gives_the_cast_weight():
    with patches.applied(ID):
        model = unwrapped("4-bit").float()
        expected = model(IDS)
        for module in (model.linear, model.embedding):
            parametrize.remove_parametrizations(module, "weight")
            assert isinstance(module.weight, utils.TorchAOBaseTensor) and module.weight.dtype == torch.float32
        assert torch.equal(model(IDS), expected)


def test_what_has_unwrapped_nothing_is_cast_as_before():
    with patches.applied(ID):
        assert not hasattr(utils.UnwrapTensorSubclass().float(), "rebuild_stack")


def test_a_model_cast_before_the_patch_is_set_right_by_its_next_cast():
    model = unwrapped("4-bit").float()
    assert model.linear.weight.dtype == torch.bfloat16
    with patches.applied(ID):
        assert torch.equal(model.float()(IDS), quantized("4-bit").to(torch.float32)(IDS))


def test_a_model_cast_under_the_patch_stays_right_after_revert():
    with patches.applied(ID):
        model = unwrapped("4-bit").float()
    assert torch.equal(model(IDS), quantized("4-bit").to(torch.float32)(IDS))


def test_a_weight_inside_a_weight():
    """8da8w: one tensor inside another, of which the inner keeps its dtype in a list (torchao < 0.18)."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    torch.manual_seed(0)
    native, x = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16(), torch.randn(2, 64)
    quantize_(native, Int8DynamicActivationInt8WeightConfig())
    model = utils.unwrap_tensor_subclass(copy.deepcopy(native))
    with patches.applied(ID):
        model.to(torch.float32)
        assert model[0].weight.dtype == torch.float32
        assert torch.equal(model(x), native.to(torch.float32)(x))
