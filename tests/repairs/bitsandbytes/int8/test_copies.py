"""A copy of an INT8 weight is an INT8 weight: class, codes, scales, and nothing shared that is written to."""

from __future__ import annotations

import copy
import io
import pickle

import bitsandbytes as bnb
import pytest
import torch

import patches
from patches.engine.gate import satisfied

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-int8-copies"
SINCE_47 = satisfied("bitsandbytes>=0.47")


def weight() -> bnb.nn.Int8Params:
    torch.manual_seed(0)
    return bnb.nn.Int8Params(torch.randn(16, 64), requires_grad=False).to("cpu")


def in_its_layer(thing):
    if not isinstance(thing, torch.nn.Parameter):
        return thing
    layer = bnb.nn.Linear8bitLt(64, 16, bias=False, has_fp16_weights=False)
    layer.weight = thing
    return layer


def saved(thing):
    """Through ``torch.save``; of a weight alone it keeps no class (tests/quantized/test_parameter_copies.py)."""
    file = io.BytesIO()
    torch.save(in_its_layer(thing), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return loaded.weight if isinstance(thing, torch.nn.Parameter) else loaded


def pickled(thing):
    """Through pickle, which keeps the class of a weight alone from 0.47 on."""
    loaded = pickle.loads(pickle.dumps(thing if SINCE_47 else in_its_layer(thing)))
    return loaded.weight if type(loaded) is bnb.nn.Linear8bitLt and isinstance(thing, torch.nn.Parameter) else loaded


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": saved,
    "pickle": pickled,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("extra", [True, False])
def test_copies_keep_class_codes_and_scales(way, extra):
    original = weight()
    if extra:
        original._is_hf_initialized = True
    with patches.applied(ID):
        made = WAYS[way](original)
    assert type(made) is bnb.nn.Int8Params and not made.requires_grad
    assert torch.equal(made.data, original.data) and torch.equal(made.SCB, original.SCB)
    assert torch.equal(made.CB, original.data) and made.has_fp16_weights is False
    if way != "deepcopy":
        assert made.CB.data_ptr() == made.data_ptr() or (way == "pickle" and not SINCE_47), "the codes are there twice"
        assert getattr(made, "_is_hf_initialized", False) is extra


def test_the_codes_are_written_once():
    def size() -> int:
        file = io.BytesIO()
        torch.save(weight(), file)
        return file.tell()

    before = size()
    with patches.applied(ID):
        assert size() <= before


def test_a_pickle_loads_without_this_package(forked, tmp_path):
    with patches.applied(ID):
        torch.save(weight(), tmp_path / "weight.pt")
        torch.save(torch.nn.Sequential(bnb.nn.Linear8bitLt(64, 16, has_fp16_weights=False)), tmp_path / "model.pt")
    out = forked(
        """
        import sys, torch

        class Gone:  # where the plugin is installed, its entry point imports it
            def find_spec(self, name, *_):
                if name.partition(".")[0] in ("patches", "bnb_patches", "bnb_patches_autoload"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Gone())
        import importlib.metadata as metadata
        entry_points = metadata.entry_points
        metadata.entry_points = lambda **k: [] if k.get("group") == "bitsandbytes.backends" else entry_points(**k)
        for name in ("weight.pt", "model.pt"):
            torch.load(f"{sys.argv[1]}/{name}", weights_only=False)
        print("patches" in sys.modules)
        """,
        str(tmp_path),
    )
    assert out.strip().endswith("False")


def test_quantizing_a_copy_leaves_the_original_alone():
    original = bnb.nn.Int8Params(torch.randn(16, 64), requires_grad=False)
    before = original.data.clone()
    with patches.applied(ID):
        copy.copy(original).to("cpu")
    assert torch.equal(original.data, before) and original.SCB is None


@pytest.mark.parametrize("warm", [True, False])
def test_a_saved_module_computes_the_same(warm):
    layer = bnb.nn.Linear8bitLt(64, 16, has_fp16_weights=False).to("cpu").eval()
    x = torch.randn(4, 64)
    expected = copy.deepcopy(layer)(x)
    if warm:
        layer(x)
    with patches.applied(ID):
        for way in WAYS.values():
            made = way(layer)
            assert torch.equal(made(x), expected) and type(made.weight) is bnb.nn.Int8Params


SPLITS = {
    "chunk": lambda p: p.chunk(3),
    "by name": lambda p: p.chunk(chunks=2, dim=0),
    "split": lambda p: torch.split(p, 6),
    "sizes": lambda p: p.split([4, 12]),
    "negative": lambda p: torch.split(p, 4, dim=-2),
}


@pytest.mark.parametrize("how", SPLITS)
def test_pieces_keep_the_scales_of_their_rows(how):
    whole = weight()
    dequantized = whole.data.float() * whole.SCB.view(-1, 1)
    assert not any(isinstance(piece, bnb.nn.Int8Params) for piece in SPLITS[how](whole))
    with patches.applied(ID):
        pieces = SPLITS[how](whole)
    assert all(type(piece) is bnb.nn.Int8Params for piece in pieces)
    found = [piece.data.float() * piece.SCB.view(-1, 1) for piece in pieces]
    assert torch.equal(torch.cat(found), dequantized)


def test_pieces_of_columns_are_plain_views_as_before():
    """A kernel that goes by the pointer would read them as rows."""
    whole = weight()
    with patches.applied(ID):
        one, two = torch.split(whole, [16, 48], dim=1)
        assert type(one) is type(two) is type(whole.chunk(2, -1)[0]) is torch.Tensor
    assert torch.equal(torch.cat([one, two], dim=1), whole.data)
    assert one.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_pieces_of_a_weight_that_trains_lead_back_to_it():
    whole = bnb.nn.Linear8bitLt(8, 8).weight
    with patches.applied(ID):
        one, two = whole.chunk(2)
        (one.sum() + 2 * two.sum()).backward()
        cast = weight().to(torch.float16)  # by hand: codes as numbers
        assert type(cast.chunk(2)[0]) is torch.Tensor
    assert torch.equal(whole.grad, torch.tensor([1.0, 2.0]).repeat_interleave(4)[:, None].expand(8, 8))


def test_pieces_of_a_subclass_with_a_constructor_of_its_own():
    class Tagged(bnb.nn.Int8Params):
        def __new__(cls, tag, data):
            self = bnb.nn.Int8Params.__new__(cls, data, requires_grad=False)
            self.tag = tag
            return self

    whole = Tagged("mine", torch.randn(16, 64)).to("cpu")
    with patches.applied(ID):
        piece = whole.chunk(2)[1]
    assert type(piece) is Tagged and piece.tag == "mine" and torch.equal(piece.SCB, whole.SCB[8:])


def test_pieces_run_in_layers_of_their_own():
    layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False).to("cpu").eval()
    x = torch.randn(4, 64)
    expected = copy.deepcopy(layer)(x)
    with patches.applied(ID):
        halves = [bnb.nn.Linear8bitLt(64, 16, bias=False, has_fp16_weights=False).eval() for _ in range(2)]
        for half, piece in zip(halves, layer.weight.chunk(2)):
            half.weight = piece
        assert torch.equal(torch.cat([half(x) for half in halves], dim=1), expected)


def test_other_operations_give_plain_tensors():
    with patches.applied(ID):
        p = weight()
        assert {type(p.t()), type(p[:2]), type(p.float()), type(p.detach()), type(p.data)} == {torch.Tensor}
        plain = bnb.nn.Int8Params(torch.randn(4, 4), requires_grad=False)
        assert type(plain.chunk(2)[0]) is torch.Tensor, "there is nothing to keep before quantization"


@pytest.mark.parametrize("training", [True, False])
def test_compiled_equals_eager_in_one_graph(training):
    layer = bnb.nn.Linear8bitLt(64, 16, bias=False, has_fp16_weights=False).to("cpu").train(training)
    x = torch.randn(4, 64, requires_grad=True)
    with patches.applied(ID):
        expected = layer(x)
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (y, expected)))


OPERATIONS = {
    "product": lambda w: w.float() * 2,
    "torch.chunk": lambda w: torch.chunk(w, 2)[1],
    "chunk": lambda w: w.chunk(2)[1] * 1,
    "torch.split": lambda w: torch.split(w, 4)[1] * 1,
    "split": lambda w: w.split(4)[1] * 1,
    "from the right": lambda w: 1 - w,
    "power": lambda w: w**2,
    "unflatten": lambda w: w.unflatten(0, (2, -1)) * 1,
}


@pytest.mark.parametrize("call", OPERATIONS.values(), ids=OPERATIONS)
def test_a_compiled_operation_on_the_weight_is_in_the_graph(call):
    """What Dynamo traces on a parameter of any class, it still does."""
    one = weight()
    with patches.applied(ID):
        got = torch.compile(lambda: call(one), fullgraph=True, backend="eager")()
    assert type(got) is torch.Tensor and torch.equal(got, call(one.data))


def test_a_compiled_embedding_is_one_graph(device):
    torch.manual_seed(0)
    layer, ids = bnb.nn.Embedding8bit(16, 8).to(device), torch.arange(4, device=device)
    expected = layer(ids)
    with patches.applied(ID):
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(ids), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_its_layer_gets_back_takes_the_scales_that_the_state_is_given(way):
    """As without the plugin: the layer has run with these packed weights, so its state owns the scales."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(64, 16, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu")
    x = torch.randn(4, 64)
    with patches.applied(ID):
        expected = 2 * layer(x)
        layer.weight = WAYS[way](layer.weight)
        layer.state.SCB = layer.state.SCB * 2
        torch.testing.assert_close(layer(x), expected)
        assert torch.equal(layer.state_dict()["SCB"], layer.state.SCB)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_another_weight_brings_its_scales(way):
    if way is pickled and satisfied("bitsandbytes<0.48"):
        pytest.skip("before 0.48 a pickle of a weight whose layer has run has no scales, with the plugin or without")
    torch.manual_seed(0)
    layers = [bnb.nn.Linear8bitLt(64, 16, bias=False, has_fp16_weights=False).to("cpu") for _ in range(2)]
    x = torch.randn(4, 64)
    with patches.applied():
        expected = [layer(x) for layer in layers]
        layers[0].weight = way(layers[1].weight)
        torch.testing.assert_close(layers[0](x), expected[1])
