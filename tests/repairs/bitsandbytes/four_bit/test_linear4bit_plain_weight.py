"""4-bit layers that hold a weight that was never quantized compute as ``nn.Linear``; packed ones never do."""

from __future__ import annotations

import copy
import json
import pickle

import bitsandbytes as bnb
import pytest
import torch

import patches
from patches.engine.gate import satisfied

ID = "bitsandbytes-linear4bit-plain-weight"


def linear(bias: bool = True, **options) -> bnb.nn.Linear4bit:
    torch.manual_seed(0)
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", **options}
    return bnb.nn.Linear4bit(64, 32, bias=bias, **options)


def tied(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Embedding, bnb.nn.Linear4bit]:
    layer = linear().to("cpu")
    embedding = torch.nn.Embedding(32, 64, dtype=dtype)
    layer.weight = embedding.weight
    return embedding, layer


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tied_head_computes_as_nn_linear_and_leaves_the_embedding_alone(dtype, training):
    embedding, head = tied(dtype)
    head.train(training)
    before = embedding.weight.detach().clone()
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    with pytest.raises(AssertionError):
        head(x)
    with patches.applied(ID):
        y = head(x)
        y.sum().backward()
    assert y.dtype == dtype
    assert torch.equal(y, torch.nn.functional.linear(x, before, head.bias.to(dtype)))
    assert torch.equal(embedding.weight, before) and embedding.weight.grad is not None
    assert type(head.weight) is torch.nn.Parameter and head.weight is embedding.weight


def test_a_weight_of_another_dtype_is_taken_in_that_of_the_input():
    embedding, head = tied(torch.bfloat16)
    x = torch.randn(4, 64)
    with patches.applied(ID), torch.no_grad():
        assert torch.equal(head(x), torch.nn.functional.linear(x, embedding.weight.float(), head.bias))
    assert embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_packed_codes_are_never_taken_for_numbers(storage):
    """FSDP leaves a plain parameter of packed codes, which the layer knows how to read."""
    if storage.is_floating_point and not satisfied("bitsandbytes>=0.47"):
        pytest.skip("before 0.47, no CPU kernel reads codes in floating point storage")
    x = torch.randn(4, 64)
    expected = linear(quant_storage=storage).to("cpu")(x)
    layer = linear(quant_storage=storage).to("cpu")
    layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
    with patches.applied(ID):
        assert torch.equal(layer(x), expected)
        layer.quant_state = None
        layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
        with pytest.raises(Exception):  # noqa: B017  whatever the release says: there is nothing to read them by
            layer(x)


def two(device: str, **options) -> tuple[bnb.nn.Linear4bit, bnb.nn.Linear4bit]:
    """Two quantized layers of one shape that differ in all packed weights."""
    one, other = linear(**options), linear(**options)
    other.weight.data.neg_().add_(0.01)
    return one.to(device), other.to(device)


def plain(weight: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.data.detach().clone(), requires_grad=False)


STATES = "bitsandbytes-linear4bit-sharded-state-dict"


def test_packed_weights_of_another_layer_are_refused_by_the_name_of_the_layer(device):
    model, x = torch.nn.Sequential(*two(device)), torch.randn(4, 64, device=device)
    expected = model[0](x)
    with patches.applied(ID, STATES):
        model[0].weight = plain(model[1].weight)
        copied = copy.deepcopy(model)
        for use in (lambda: model[0](x), model.state_dict, lambda: copied[0](x)):
            with pytest.raises(RuntimeError, match="weight of Linear4bit '0' was replaced .* load_state_dict"):
                use()
        loaded = pickle.loads(pickle.dumps(model))
    assert not torch.equal(model[0](x), expected), "as is it computes, with the statistics of other weights"
    assert not any(
        type(each).__module__.startswith("patches") for each in loaded[0].__dict__["_patches_packed_replaced"]
    )


@pytest.mark.parametrize("nested", [False, True])
def test_its_own_packed_weights_compute_whatever_stood_in_between(nested, device):
    (one, other), x = two(device, compress_statistics=nested), torch.randn(4, 64, device=device)
    expected, of_other, own, whole = one(x), other(x), plain(one.weight), other.weight
    with patches.applied(ID, STATES):
        one.weight = own
        assert torch.equal(one(x), expected) and "weight" in one.state_dict()
        one.weight = plain(other.weight)
        one.weight = plain(own)  # from a weight that tells nothing: nothing is known, as before
    one, _ = two(device, compress_statistics=nested)
    with patches.applied(ID, STATES):
        one.weight = plain(other.weight)
        one.weight = plain(own)
        assert torch.equal(one(x), expected) and "weight" in one.state_dict()
        one.weight = plain(other.weight)
        with pytest.raises(RuntimeError, match="was replaced by a plain tensor"):
            one(x)
        one.weight = whole  # with its state, which the layer reads from now on
        bias = one.bias - other.bias
        assert torch.equal(one(x) - bias, of_other)


@pytest.mark.parametrize("first", ["weight", "state", "absmax alone"])
def test_with_the_statistics_of_the_other_layer_its_packed_weights_compute(first, device):
    """As programs do that quantize by hand: a plain weight, and the state beside it."""
    (one, other), x = two(device, compress_statistics=False), torch.randn(4, 64, device=device)
    expected = other(x) - other.bias + one.bias
    with patches.applied(ID, STATES):
        if first == "state":
            one.quant_state = other.quant_state
        one.weight = plain(other.weight)
        if first == "weight":
            one.quant_state = other.quant_state
        elif first == "absmax alone":
            one.quant_state.absmax = other.quant_state.absmax
        assert torch.allclose(one(x), expected, atol=1e-6) and "weight" in one.state_dict()


def test_a_subclass_may_assign_before_it_is_a_module():
    class Early(bnb.nn.Linear4bit):
        def __init__(self) -> None:
            self.weight = None
            super().__init__(64, 32)

    with patches.applied(ID):
        assert type(Early().weight) is bnb.nn.Params4bit


def test_after_revert_nothing_is_compared(device):
    (one, other), x = two(device), torch.randn(4, 64, device=device)
    with patches.applied(ID):
        one.weight = plain(other.weight)
        with pytest.raises(RuntimeError):
            one(x)
    one(x)
    one.weight = plain(one.weight)
    assert "__setattr__" not in vars(bnb.nn.Linear4bit)


@pytest.mark.parametrize(
    "weight",
    [torch.ones(32, 32), torch.ones(64, 32), torch.ones(32 * 64), torch.ones(32, 64).to(torch.float8_e4m3fn)],
    ids=["narrow", "transposed", "flat", "float8"],
)
def test_what_is_no_weight_of_the_layer_is_refused_as_before(weight):
    layer = linear().to("cpu")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with patches.applied(ID), pytest.raises((AssertionError, IndexError)):
        layer(torch.randn(4, 64))


def test_a_layer_that_nobody_quantized_is_refused_as_before():
    with patches.applied(ID), pytest.raises(AssertionError):
        linear()(torch.randn(4, 64))


def test_sound_layers_stay_bit_identical(device):
    def outputs() -> list[torch.Tensor]:
        layer = linear().requires_grad_(False).to(device)
        x = torch.ones(4, 64, device=device, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, layer.eval()(x).detach(), layer.weight.data]

    before = outputs()
    with patches.applied(ID):
        assert all(map(torch.equal, outputs(), before))


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_compiled_equals_eager_in_one_graph(kind):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(call, layer) -> list[torch.Tensor]:
        x = torch.ones(2, 3, 64, requires_grad=True)
        layer.zero_grad()
        y = call(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    with patches.applied(ID):
        layer = tied()[1] if kind == "plain" else linear().to("cpu")
        expected = step(layer, layer)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for _ in range(2):
            assert all(map(torch.equal, step(compiled, layer), expected))
        assert len(graphs) == 1
        layer.weight = torch.nn.Parameter(torch.randn(32, 64))  # the graph is not that of another weight
        x = torch.ones(2, 3, 64)
        assert torch.equal(compiled(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.fixture
def save(tmp_path):
    """Save a tiny Llama, and say how to load it."""
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)

    def save(tie: bool, skip: list[str]):
        config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=tie, **size)
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
        four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skip)
        return load(tmp_path / "plain", quantization_config=four)

    def load(folder, **options):
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.float32, **options).eval()

    save.load = load
    return save


IDS = torch.arange(8).view(1, 8)


def test_transformers_with_a_tied_head(save, tmp_path):
    model = save(True, ["q_proj"])
    assert isinstance(model.lm_head, bnb.nn.Linear4bit)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with patches.applied(ID), torch.no_grad():
        hidden = model.model(IDS).last_hidden_state
        logits = model(IDS).logits
        assert torch.equal(logits, hidden @ model.lm_head.weight.t())
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(save.load(tmp_path / "saved")(IDS).logits, logits)


def test_transformers_with_a_skip_list_of_other_names(save, tmp_path):
    model = save(False, ["lm_head", "model.layers.0.self_attn.q_proj"])
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["llm_int8_skip_modules"][1] = "language_model.model.layers.0.self_attn.q_proj"
    path.write_text(json.dumps(config))
    loaded = save.load(tmp_path / "saved")
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    with patches.applied(ID), torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected)
