"""A piece of a 4-bit weight is a weight of its own, exact, or a plain tensor of codes: never the whole in part."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit

import patches
from patches.engine.gate import satisfied

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-params4bit-chunk"
SEEN = satisfied("bitsandbytes>=0.47")  # there torch.chunk can be seen, by __torch_function__

SPELLINGS = {
    "weight.chunk": lambda w: w.chunk(2),
    "weight.chunk by name": lambda w: w.chunk(chunks=2, dim=-2),
    "torch.split": lambda w: torch.split(w, w.shape[0] // 2),
    "torch.split by name": lambda w: torch.split(tensor=w, split_size_or_sections=w.shape[0] // 2),
    "torch.split in sections": lambda w: torch.split(w, [w.shape[0] // 2] * 2),
    "weight.split": lambda w: w.split(w.shape[0] // 2),
    "weight.split in sections": lambda w: w.split([w.shape[0] // 2] * 2),
}
if SEEN:
    SPELLINGS["torch.chunk"] = lambda w: torch.chunk(w, 2)
    SPELLINGS["torch.chunk by name"] = lambda w: torch.chunk(input=w, chunks=2, dim=0)
STORAGES = [torch.uint8, torch.bfloat16, torch.float32] if SEEN else [torch.uint8]  # all that 0.46.1 computes with


def make(nested: bool = True, rows: int = 128, columns: int = 64, **options) -> Linear4bit:
    torch.manual_seed(0)
    options = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4", **options}
    return Linear4bit(columns, rows, compress_statistics=nested, **options)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8).flatten()


def dequantized(weight: Params4bit) -> torch.Tensor:
    return dequantize_4bit(weight.data, weight.quant_state)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_halves(spelling, nested, device):
    """Rows, codes, statistics and the rest, whichever way they are asked for."""
    weight = make(nested).to(device).weight
    with patches.applied(ID):
        parts = SPELLINGS[spelling](weight)
    assert len(parts) == 2
    for part, rows, codes in zip(parts, dequantized(weight).chunk(2), weight.data.chunk(2)):
        assert type(part) is Params4bit and torch.equal(part.data, codes) and part.module is None
        assert part.data.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr(), "a view, as of any tensor"
        assert torch.equal(dequantized(part), rows) and tuple(part.quant_state.shape) == (64, 64)
        assert part.bnb_quantized and part.compress_statistics is part.quant_state.nested
        for name in ("blocksize", "quant_type", "quant_storage", "requires_grad"):
            assert getattr(part, name) == getattr(weight, name)
    assert tuple(weight.quant_state.shape) == (128, 64) and weight.quant_state.nested is nested


RUNS = {
    "whole": [4096],
    "rows": [32, 1984, 2080],
    "half rows of 128": [32, 96, 3968],
    "no whole blocks": [31, 33, 4032],
    "whole blocks, then not": [64, 5, 4027],
    "blocks of statistics": [8192, 8192],
    "across blocks of statistics": [8192 + 32, 8192 - 32],
    "with an empty one": [0, 2048, 2048],
}


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_any_run_of_the_flat_weight(runs, nested, storage):
    """A piece of whole blocks is exact; any other is what it was, codes alone."""
    columns = 128 if runs == RUNS["half rows of 128"] else 64
    weight = make(nested, 2 * sum(runs) // columns, columns, quant_storage=storage).to("cpu").weight
    entries = [n // storage.itemsize for n in runs]
    entries[-1] = weight.shape[0] - sum(entries[:-1])
    flat, start = dequantized(weight).flatten(), 0
    with patches.applied(ID):
        parts = weight.split(entries)
    for part, n in zip(parts, entries):
        first, last = 2 * storage.itemsize * start, 2 * storage.itemsize * (start + n)
        start += n
        assert torch.equal(bits(part), bits(weight)[first // 2 : last // 2])
        if first % 64 or last % 64 or not n:
            assert type(part) is torch.Tensor and not hasattr(part, "quant_state")
            continue
        assert type(part) is Params4bit and torch.equal(dequantized(part).flatten(), flat[first:last])
        rows = not first % columns and not last % columns
        assert part.quant_state.shape == ((last - first) // columns, columns) if rows else (last - first,)
        assert part.quant_state.nested is (nested and first // 64 % 256 == 0)


@pytest.mark.skipif(not SEEN, reason="0.46.1 quantizes whole blocks alone on a CPU")
def test_a_last_block_that_is_not_full():
    weight = make(False, 5, 30).to("cpu").weight  # 150 values, 3 blocks
    with patches.applied(ID):
        parts = weight.split([32, 43])
    assert torch.equal(torch.cat([dequantized(p).flatten() for p in parts]), dequantized(weight).flatten())
    assert [p.quant_state.absmax.numel() for p in parts] == [1, 2]


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_a_piece_computes_saves_and_loads(nested, device):
    whole, x = make(nested).to(device), torch.randn(3, 64, device=device)
    expected = whole(x)
    with patches.applied():
        halves = [make(nested, 64) for _ in range(2)]
        for half, piece in zip(halves, whole.weight.chunk(2)):
            half.weight = piece
        together = torch.cat([half(x) for half in halves], dim=1)
        again = make(nested, 64).to(device)
        again.load_state_dict(halves[1].state_dict())
        assert torch.equal(dequantized(again.weight), dequantized(halves[1].weight))
        assert torch.equal(again(x), halves[1](x))
        saved = halves[1].state_dict()
    assert (together - expected).norm() <= 1e-6 * expected.norm()
    assert saved["weight"].numel() == 2048 and saved["weight.absmax"].numel() == 64


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_quantizing_a_part_leaves_the_layer(spelling, device):
    layer = make()
    with patches.applied(ID):
        part = SPELLINGS[spelling](layer.weight)[0].to(device)
    assert tuple(part.quant_state.shape) == (64, 64)
    assert layer.quant_state is None and not layer.weight.bnb_quantized


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_pieces_of_a_weight_that_requires_grad_lead_back_to_it(spelling):
    weight = Params4bit(torch.randn(8, 8), requires_grad=True)
    with patches.applied(ID):
        one, two = SPELLINGS[spelling](weight)
        (one.sum() + 2 * two.sum()).backward()
        with torch.no_grad():
            assert type(SPELLINGS[spelling](weight)[0]) is Params4bit, "as FSDP2 asks"
    assert torch.equal(weight.grad, torch.tensor([1.0, 2.0]).repeat_interleave(4)[:, None].expand(8, 8))


def test_statistics_that_are_not_those_of_the_codes_are_not_handed_on():
    weight = make().to("cpu").weight
    with patches.applied(ID, "bitsandbytes-params4bit-meta"):
        by_hand = weight.to(torch.int32)  # a number a byte
        assert {type(part) for part in by_hand.chunk(2)} == {torch.Tensor}
        assert {type(part) for part in weight.to("meta").chunk(2)} == {torch.Tensor}
        assert {type(part) for part in weight.chunk(2, dim=1)} == {Params4bit}, "one column: all of it"


class Tagged(Params4bit):
    def __new__(cls, data, tag, **options):
        self = Params4bit.__new__(cls, data, **options)
        self.tag = tag
        return self


@pytest.mark.parametrize("quantized", [True, False])
def test_a_subclass_with_a_constructor_of_its_own(quantized):
    weight = Tagged(torch.randn(128, 64), "mine", quant_type="nf4")
    weight = weight.to("cpu") if quantized else weight
    assert not SEEN or pytest.raises(TypeError, torch.chunk, weight, 2)
    with patches.applied(ID):
        part = torch.split(weight, len(weight) // 2)[1]
    assert type(part) is Tagged and part.tag == "mine"
    assert not quantized or torch.equal(dequantized(part), dequantized(weight)[64:])


def test_other_operations_are_what_they_were(device):
    weight = make().to(device).weight
    with patches.applied(ID):
        for result in (weight.t(), weight.narrow(0, 0, 2), weight.clone(), weight + 1, weight.detach(), weight[:2],
                       weight.unbind()[0], torch.tensor_split(weight, 2)[0], weight.view(-1)):  # fmt: skip
            assert type(result) is torch.Tensor


def test_compiles_in_one_graph(device):
    layer = make().to(device)
    x = torch.randn(2, 64, device=device, requires_grad=True)
    expected = layer(x)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    with patches.applied(ID):
        out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(out, expected) and torch.equal(gradient, expected_gradient)


IN_A_GRAPH = {name: lambda w, cut=cut: cut(w)[1] * 1 for name, cut in SPELLINGS.items() if "weight.split" not in name}
IN_A_GRAPH["torch.chunk"] = lambda w: torch.chunk(w, 2)[1] * 1
if not SEEN:  # with a __torch_function__, which they have had since, Dynamo refuses these
    IN_A_GRAPH["from the right"], IN_A_GRAPH["power"] = (lambda w: 1 - w), (lambda w: w**2)


@pytest.mark.parametrize("call", IN_A_GRAPH.values(), ids=IN_A_GRAPH)
def test_a_graph_sees_plain_tensors(call):
    """``weight.split`` is left out: from 0.47 on Dynamo cannot trace it, nor could it before."""
    weight = make().to("cpu").weight
    with patches.applied(ID):
        got = torch.compile(lambda: call(weight), fullgraph=True, backend="eager")()
    assert type(got) is torch.Tensor and torch.equal(got, call(weight.data))
