"""Views, slices, chunk, split, cat and stack of a quantized weight."""

from __future__ import annotations

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

from ..catalogue import program
from ..checks import close, same
from ..layers import COLUMNS, INT8, NF4, ROWS, Quantized, absmax
from .casts import plain

FOUR_BIT_ERRORS = "size|shape|numel|expected|whole|piece|part|split|chunk"


@program()
def codes_cut_in_two(q: Quantized):
    """Shards of the codes by every spelling, put together again."""
    for pieces in (
        q.layer.weight.chunk(2),
        torch.chunk(q.layer.weight, 2),
        q.layer.weight.split(len(q.codes) // 2),
        torch.split(q.layer.weight, len(q.codes) // 2),
        q.layer.weight.tensor_split(2),
        (q.layer.weight[: len(q.codes) // 2], q.layer.weight[len(q.codes) // 2 :]),
    ):
        yield same(torch.cat([plain(piece) for piece in pieces]), q.codes)


@program(kinds=NF4, may_raise=FOUR_BIT_ERRORS)
def half_of_a_weight_dequantized(q: Quantized):
    """The rows of one of two fused projections, dequantized."""
    half = q.layer.weight.chunk(2)[0]
    yield close(dequantize_4bit(half, half.quant_state), q.weight[: ROWS // 2], 1e-6)


@program(kinds=NF4, may_raise=FOUR_BIT_ERRORS)
def half_of_a_weight_by_function_dequantized(q: Quantized):
    """The same by ``torch.split``, which keeps the class upstream too."""
    half = torch.split(q.layer.weight, len(q.codes) // 2)[1]
    yield close(dequantize_4bit(half, half.quant_state), q.weight[ROWS // 2 :], 1e-6)


@program(kinds=NF4, may_raise=FOUR_BIT_ERRORS)
def a_layer_of_half_a_weight(q: Quantized):
    """One of two fused projections becomes a layer of its own."""
    layer = Linear4bit(COLUMNS, ROWS // 2, bias=False, compute_dtype=torch.float32, quant_type="nf4").to(q.device)
    piece = q.layer.weight.chunk(2)[0]
    layer.weight = piece if isinstance(piece, torch.nn.Parameter) else torch.nn.Parameter(piece, requires_grad=False)
    yield close(layer(q.x), q.expected()[:, : ROWS // 2], q.tolerance)


@program(kinds=NF4, may_raise=FOUR_BIT_ERRORS)
def half_of_a_weight_saved(q: Quantized):
    """What the state dict of a layer of half a weight holds must be half of everything, or the codes alone."""
    layer = Linear4bit(COLUMNS, ROWS // 2, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    piece = q.layer.weight.chunk(2)[0]
    layer.weight = piece if isinstance(piece, torch.nn.Parameter) else torch.nn.Parameter(piece, requires_grad=False)
    saved = layer.state_dict()
    blocks = len(saved.get("weight.absmax", saved["weight"])) / len(saved["weight"])
    yield same(blocks in (1.0, q.scales.numel() / len(q.codes)), True)


@program(kinds=("nf4",))
def gradients_of_pieces_of_a_float_weight(q: Quantized):
    """A weight that is not quantized yet is trained in two halves."""
    weight = Params4bit(q.unquantized().weight.data, requires_grad=True, quant_type="nf4")
    one, two = weight.chunk(2)
    (one.sum() + 2 * two.sum()).backward()
    yield same(weight.grad is not None, True)
    yield close(weight.grad, torch.cat([torch.ones(ROWS // 2, COLUMNS), torch.full((ROWS // 2, COLUMNS), 2.0)]), 0)


@program(kinds=("int8-fp16",))
def gradients_of_pieces_of_an_int8_layer_that_trains(q: Quantized):
    """The same with ``has_fp16_weights=True``, whose parameter is floating point."""
    weight = Linear8bitLt(COLUMNS, ROWS, bias=False).weight
    for one, two in (weight.split(ROWS // 2), torch.chunk(weight, 2)):
        weight.grad = None
        (one.sum() + 2 * two.sum()).backward()
        yield close(weight.grad.sum(), torch.tensor(3.0 * ROWS * COLUMNS / 2), 0)


@program(kinds=INT8)
def three_projections_out_of_one(q: Quantized):
    """A fused INT8 weight is cut by rows, with its scales, and becomes three layers."""
    sizes = (16, 16, 32)
    weight, scales = q.layer.weight, q.layer.weight.SCB
    outputs = []
    for rows, scale in zip(weight.data.split(sizes), scales.split(sizes)):
        layer = Linear8bitLt(COLUMNS, len(rows), bias=False, has_fp16_weights=False)
        layer.weight = Int8Params(rows, requires_grad=False, CB=rows, SCB=scale)
        outputs.append(layer(q.x))
    yield q.right(torch.cat(outputs, dim=1))


@program(kinds=INT8, may_raise="without its row scales")
def a_piece_of_an_int8_weight_as_a_layer(q: Quantized):
    """A piece by ``torch.chunk`` is the weight of a layer as it comes: codes whose scales were left behind."""
    layer = Linear8bitLt(COLUMNS, ROWS // 2, bias=False, has_fp16_weights=False)
    piece = torch.chunk(q.layer.weight, 2)[1]
    layer.weight = piece if isinstance(piece, torch.nn.Parameter) else Int8Params(piece, requires_grad=False)
    yield close(layer(q.x), q.expected()[:, ROWS // 2 :], q.tolerance)


@program(kinds=INT8)
def columns_of_an_int8_weight(q: Quantized):
    """Half of the input features: all scales stay."""
    left = q.layer.weight.split(COLUMNS // 2, dim=1)[0]
    yield same(plain(left), q.codes[:, : COLUMNS // 2])
    yield close(plain(left).float() * q.scales[:, None] / 127, q.weight[:, : COLUMNS // 2], 1e-6)


@program(kinds=("nf4",))
def two_weights_fused(q: Quantized):
    """Codes and scales of two projections in a row make one layer twice as wide."""
    one, two = q.layer.weight, q.other().layer.weight
    state = QuantState(
        torch.cat([one.quant_state.absmax, two.quant_state.absmax]), shape=torch.Size((2 * ROWS, COLUMNS)),
        code=one.quant_state.code, blocksize=64, quant_type="nf4", dtype=torch.float32,
    )  # fmt: skip
    layer = Linear4bit(COLUMNS, 2 * ROWS, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    codes = torch.cat([one.data, two.data])
    layer.weight = Params4bit(codes, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True)
    yield close(layer(q.x), torch.cat([q.expected(), q.other().expected()], dim=1), q.tolerance)


@program()
def stacked_codes(q: Quantized):
    """Codes of several layers in one tensor, as expert weights are kept."""
    weights = [q.layer.weight, q.other().layer.weight]
    stacked = torch.stack([w.data for w in weights])
    yield same(stacked, torch.stack([q.codes, q.other().codes]))
    yield same(plain(torch.stack(weights))[1], q.other().codes)


@program()
def views_of_the_codes(q: Quantized):
    """``view``, ``reshape``, ``t``, ``unbind``, ``narrow`` and iteration."""
    weight = q.layer.weight
    yield same(plain(weight.view(-1)), q.codes.view(-1))
    yield same(plain(weight.reshape(ROWS, -1)), q.codes.reshape(ROWS, -1))
    yield same(plain(weight.t()), q.codes.t())
    yield same(plain(weight.narrow(0, 3, 5)), q.codes[3:8])
    yield same(torch.stack([plain(row) for row in list(weight)[:3]]), q.codes[:3])


@program(kinds=("nf4", "nf4-float-storage"))
def codes_as_bytes(q: Quantized):
    """A view of the storage as bytes, one row a line, as the exporters of other formats take it."""
    rows = q.layer.weight.view(torch.uint8).reshape(ROWS, COLUMNS // 2)
    yield same(plain(rows), q.codes.view(torch.uint8).reshape(ROWS, COLUMNS // 2))


@program(kinds=("nf4",))
def one_piece_is_the_whole(q: Quantized):
    """A weight cut for one rank, which is all of it."""
    (whole,) = torch.chunk(q.layer.weight, 1)
    yield same(plain(whole), q.codes)
    yield close(dequantize_4bit(plain(whole), q.layer.weight.quant_state), q.weight, 1e-6)


@program(kinds=NF4)
def blocks_of_rows_dequantized_by_hand(q: Quantized):
    """A weight too large to be dequantized at once: some rows, with the scales that belong to them."""
    rows, blocks = ROWS // 4, ROWS // 4 * COLUMNS // 64
    state = q.layer.weight.quant_state
    scales = absmax(state)[:blocks].contiguous()
    part = QuantState(scales, shape=torch.Size((rows, COLUMNS)), code=state.code, blocksize=64, quant_type="nf4",
                      dtype=torch.float32)  # fmt: skip
    yield close(dequantize_4bit(q.layer.weight.data[: rows * COLUMNS // 2], part), q.weight[:rows], 1e-6)
