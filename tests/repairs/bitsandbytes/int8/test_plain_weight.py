"""INT8 layers with tied, sharded and functional weights: exact, and the layer left as it was."""

from __future__ import annotations

import pickle

import bitsandbytes as bnb
import pytest
import torch
from torch.func import functional_call

import patches

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-int8-plain-weight"


def linear(bias: bool = True, device: str = "cpu", **options) -> bnb.nn.Linear8bitLt:
    torch.manual_seed(0)
    options = {"has_fp16_weights": False, **options}
    return bnb.nn.Linear8bitLt(64, 32, bias=bias, **options).to(device)


def test_a_tied_head_computes_as_nn_linear_and_leaves_the_embedding_alone():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(32, 64)
    head = linear()
    head.weight = embedding.weight
    before = embedding.weight.detach().clone()
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(AttributeError, match="CB"):
        head(x)
    with patches.applied(ID):
        y = head(x)
        y.sum().backward()
    assert torch.equal(y, torch.nn.functional.linear(x, embedding.weight, head.bias))
    assert torch.equal(embedding.weight, before) and embedding.weight.grad is not None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("warm", [True, False])
def test_plain_codes_use_the_scales_of_the_layer(training, warm):
    x = torch.randn(4, 64)
    expected = linear().train(training)(x)
    with patches.applied(ID):
        layer = linear().train(training)
        if warm:
            layer(x)
        layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("warm", [True, False])
def test_functional_call_runs_on_what_it_is_given_and_leaves_no_trace(training, warm):
    x = torch.randn(4, 64)
    expected = linear(bias=False).train(training)(x)
    with patches.applied(ID):
        layer = linear(bias=False).train(training)
        if warm:
            layer(x)
        given = {name: p.detach().clone() for name, p in layer.named_parameters()}
        assert torch.equal(functional_call(layer, given, (x,)), expected)
        assert torch.equal(layer(x), expected), "the layer kept the weight of the call"


def test_a_float_weight_of_a_layer_that_trains_it_is_quantized_for_the_call():
    x = torch.randn(4, 64)
    expected = linear(has_fp16_weights=True).requires_grad_(False)(x)
    layer = linear(has_fp16_weights=True)
    layer.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
    with patches.applied(ID):
        assert torch.equal(layer(x), expected)


def test_codes_that_never_had_scales_are_an_error_that_names_the_layer():
    model = torch.nn.ModuleDict({"head": linear()})
    model["head"].weight = torch.nn.Parameter(model["head"].weight.data, requires_grad=False)
    with (
        patches.applied(ID),
        pytest.raises(RuntimeError, match="'head' has a packed INT8 weight without its row scales"),
    ):
        model["head"](torch.randn(4, 64))


def test_sound_layers_stay_bit_identical(device):
    def outputs() -> list[torch.Tensor]:
        layer, x = linear(device=device), torch.ones(4, 64, device=device)
        return [layer(x).detach(), layer.eval()(x).detach(), *layer.state_dict().values()]

    before = outputs()
    with patches.applied(ID):
        assert all(map(torch.equal, outputs(), before))


@pytest.mark.parametrize("kind", ["float", "int8", "quantized"])
def test_compiled_equals_eager_in_one_graph(kind):
    with patches.applied(ID):
        layer = linear().eval()
        x = torch.randn(4, 64)
        layer(x)
        if kind != "quantized":
            weight = layer.weight.data if kind == "int8" else torch.randn(32, 64)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        expected = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("how", ["functional", "as floats", "parameter"])
def test_codes_of_another_layer_stay_an_error_that_names_the_layer(how, warm):
    """They are int8 tensors like any other: only their contents tell that the scales of this layer are not theirs."""
    other = linear(bias=False).weight.data.flip(0)
    x = torch.randn(4, 64)
    with patches.applied(ID):
        model = torch.nn.Sequential(linear(bias=False))
        layer = model[0]
        expected = linear(bias=False)(x)
        if warm:
            layer(x)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(
            RuntimeError,
            match="weight of Linear8bitLt .0. was replaced by .* packed|Linear8bitLt .0. has a packed INT8 weight without its row scales",
        ):
            if how == "parameter":
                layer.weight = torch.nn.Parameter(other, requires_grad=False)
                layer(x)
            else:
                functional_call(layer, {"weight": other.float() if how == "as floats" else other}, (x,))
        if how != "parameter":
            assert torch.equal(layer(x), expected)
            after = model.state_dict()
            assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)


def test_codes_that_were_written_over_are_an_error():
    """``.data`` counts no version."""
    x = torch.randn(4, 64)
    with patches.applied(ID):
        layer = linear(bias=False)
        layer(x)
        layer.weight = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)
        layer(x)
        layer.weight.data.copy_(layer.weight.data.flip(0))
        with pytest.raises(RuntimeError, match="differs from the packed weight of the layer"):
            layer(x)


def test_scales_that_were_replaced_before_the_first_forward_are_never_those_of_the_note():
    x = torch.randn(4, 64)
    with patches.applied(ID):
        layer = linear(bias=False)
        old = layer.weight.SCB
        layer.weight.SCB = old * 2
        given = {"weight": layer.weight.detach().clone()}
        with pytest.raises(RuntimeError, match="without its row scales"):
            functional_call(layer, given, (x,))
        assert torch.equal(layer(x), 2 * linear(bias=False)(x)) and old is not None


@pytest.mark.parametrize("how", ["replaced", "functional"])
def test_compiled_refuses_codes_of_another_layer(how):
    x = torch.randn(4, 64)
    with patches.applied(ID, "bitsandbytes-int8-cold-state"):
        layer = linear(bias=False).eval()
        expected = layer(x)
        own, given = layer.weight.data.clone(), -layer.weight.data

        def call(weight, x):
            if how == "functional":
                return functional_call(layer, {"weight": weight}, (x,))
            return layer(x)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        if how == "replaced":
            layer.weight = torch.nn.Parameter(own, requires_grad=False)
        assert torch.equal(compiled(own, x), expected)
        if how == "replaced":
            layer.weight.data.copy_(given)
        with pytest.raises(RuntimeError, match="differs from the packed weight of the layer"):
            compiled(given, x)


def test_transformers_with_a_tied_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **size)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    int8 = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["q_proj"])
    ids = torch.arange(8).view(1, 8)
    with patches.applied(ID, "bitsandbytes-int8-tied-state-dict"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=int8, device_map={"": "cpu"}
        )
        assert isinstance(model.lm_head, bnb.nn.Linear8bitLt)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        hidden = model.model(ids).last_hidden_state
        assert torch.equal(model(ids).logits, hidden @ model.lm_head.weight.to(hidden.dtype).t())
        assert "lm_head.weight" in model.state_dict()


def test_fsdp2_on_one_rank(forked):
    """FSDP2 throws the Int8Params away, before or after the first forward, and shards plain codes."""
    out = forked("""
        import copy, os
        import bitsandbytes as bnb, patches, torch
        import torch.distributed as dist
        patches.apply("bitsandbytes-int8-plain-weight", "bitsandbytes-int8-backward-live-state",
                      "bitsandbytes-int8-state-dict-names", "bitsandbytes-int8-tied-state-dict")
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))

        def step(model):
            x = torch.ones(4, 64, requires_grad=True)
            y = model(x)
            y.square().sum().backward()
            return y.detach(), x.grad

        for warm in (False, True):
            torch.manual_seed(0)
            layers = [bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False) for _ in range(2)]
            model = torch.nn.Sequential(*layers).to("cpu")
            expected = step(copy.deepcopy(model))
            if warm:
                step(model)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            assert not isinstance(model[0].weight, bnb.nn.Int8Params)
            for _ in range(2):
                assert all(map(torch.equal, step(model), expected))
            assert set(get_model_state_dict(model)) == set(model.state_dict()) and "0.SCB" in model.state_dict()
        dist.destroy_process_group()
        print("sharded")
    """)
    assert "sharded" in out


def test_cast_codes_in_a_buffer_of_a_layer_that_has_not_run_are_refused():
    with patches.applied(ID):
        layer = linear()
        codes = layer.weight.data.half()
        del layer.weight
        layer.register_buffer("weight", codes)
        with pytest.raises(RuntimeError, match="replaced by integers up to 127"):
            layer(torch.randn(4, 64))


def test_a_new_weight_after_plain_codes_owns_its_scales():
    """The state of a layer that has not run has none: who looks there first writes to the weight."""
    with patches.applied(ID):
        layer = linear(bias=False)
        layer.weight = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)
        values = torch.randn(32, 64)
        layer.weight = bnb.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)
        layer.to("cpu")
        owner = layer.weight if layer.state.SCB is None else layer.state
        layer.weight.data.copy_(layer.weight.data.flip(0))
        owner.SCB.copy_(owner.SCB.flip(0))
        x = torch.randn(4, 64)
        expected = x @ values.flip(0).t()
        assert torch.dist(layer(x), expected) < 0.03 * expected.norm()


def test_the_same_codes_after_plain_codes_keep_the_scales_of_the_layer():
    x = torch.randn(4, 64)
    expected = linear()(x)
    with patches.applied(ID):
        layer = linear()
        layer.weight = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)
        layer.weight = bnb.nn.Int8Params(layer.weight.data.clone(), requires_grad=False)
        assert torch.equal(layer(x), expected)


def test_a_pickled_weight_that_lost_its_class_is_saved_as_it_was_written_to():
    """Without the patch for pickles, it is a ``Parameter`` that keeps its scales."""
    with patches.applied(ID):
        layer = linear(bias=False)
        layer.weight = pickle.loads(pickle.dumps(layer.weight))
        assert not isinstance(layer.weight, bnb.nn.Int8Params)
        layer.weight.data.neg_()
        saved = layer.state_dict()
    assert torch.equal(saved["weight"], -linear(bias=False).weight)
    assert torch.equal(saved["SCB"], layer.weight.SCB)
