"""Empty, single, odd and huge inputs, and layers of odd sizes."""

from __future__ import annotations

import torch
from bitsandbytes.functional import dequantize_4bit

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, COLUMNS, INT8, NF4, ROWS, Quantized

ODD = "(?i)divisible|even|shape|size|blocksize|multiple"


@program(kinds=(*BOTH, "int8-threshold"), bias=True)
def no_rows(q: Quantized):
    """An empty batch, forward and backward."""
    x = torch.empty(0, COLUMNS, device=q.device, requires_grad=True)
    y = q.layer(x)
    yield same((tuple(y.shape), y.dtype), ((0, ROWS), torch.float32))
    y.sum().backward()
    yield same(tuple(x.grad.shape), (0, COLUMNS))


@program(kinds=(*BOTH, "int8-threshold"), bias=True, packs="too", crashes=True)
def no_rows_in_eval(q: Quantized):
    """The same in eval."""
    with torch.no_grad():
        y = q.layer.eval()(torch.empty(0, COLUMNS, device=q.device))
        yield same(tuple(y.shape), (0, ROWS))
        y = q.layer(torch.empty(2, 0, COLUMNS, device=q.device))
        yield same(tuple(y.shape), (2, 0, ROWS))


@program(kinds=(*BOTH, "nf4-bf16"), bias=True, packs="too")
def one_row(q: Quantized):
    """A single row, as at each step of generation, in two and three dimensions."""
    for x in (q.inputs(1), q.inputs(1, 1)):
        for train in (True, False):
            with torch.no_grad():
                yield q.right(q.layer.train(train)(x), x)


@program(kinds=BOTH, packs="too")
def many_rows(q: Quantized):
    """A prompt, then single tokens, then another prompt."""
    q.layer.eval()
    with torch.no_grad():
        for rows in (130, 1, 1, 33):
            x = q.inputs(rows)
            yield q.right(q.layer(x), x)


@program(kinds=("nf4", "nf4-double"), packs="too")
def one_vector(q: Quantized):
    """A vector without a batch dimension."""
    x = q.inputs()[0]
    for train in (True, False):
        with torch.no_grad():
            yield q.right(q.layer.train(train)(x), x)


@program(kinds=NF4, bias=True, packs="too")
def four_dimensions(q: Quantized):
    """``(batch, heads, sequence, features)``."""
    x = q.inputs(2, 3, 4)
    for train in (True, False):
        with torch.no_grad():
            yield q.right(q.layer.train(train)(x), x)


@program(kinds=INT8, bias=True, may_raise="(?i)shape|dim|size|expand")
def four_dimensions_in_int8(q: Quantized):
    """The same for INT8."""
    x = q.inputs(2, 3, 4)
    for train in (True, False):
        yield q.right(q.layer.train(train)(x), x)


@program(kinds=("nf4", "nf4-bf16", "int8"), packs="too")
def every_dtype(q: Quantized):
    """float16, bfloat16 and float64 inputs: the output has their dtype."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for train in (True, False):
            with torch.no_grad():
                y = q.layer.train(train)(q.x.to(dtype))
            yield same(y.dtype, dtype)
            yield close(y.float(), q.expected(), 2e-2, q.rounding)


@program(kinds=BOTH, packs="too")
def one_dtype_after_another(q: Quantized):
    """A bfloat16 warm-up, then float32: the second is as exact as without the first."""
    with torch.no_grad():
        q.layer.eval()(q.x.bfloat16())
        yield q.right(q.layer(q.x))


@program(kinds=("nf4-double",), compute_dtype=None, packs="too")
def one_dtype_after_another_without_a_compute_dtype(q: Quantized):
    """The same for a layer that was not told in which dtype to compute."""
    q.layer(q.x.bfloat16())
    yield close(q.layer(q.x), q.expected(), 1e-5)


@program(kinds=("nf4", "int8"))
def huge_and_tiny_weights(q: Quantized):
    """Rows of very different scale, one of zeros, and one block of zeros."""
    layer = q.unquantized()
    layer.weight.data[0] *= 1e4
    layer.weight.data[1] *= 1e-4
    layer.weight.data[2] = 0
    layer.weight.data[3, :64] = 0
    expected = layer.weight.data.clone().to(q.device)
    y = layer.requires_grad_(False).to(q.device)(q.x)
    for row in (0, 3, 5):
        yield close(y[:, row], q.x @ expected[row], 0.25)
    yield same(bool(torch.isfinite(y).all()), True)


@program(kinds=BOTH, packs="too")
def huge_inputs(q: Quantized):
    """Inputs of the size of activations that went wild, and tiny ones."""
    for factor in (1e3, 1e-3):
        with torch.no_grad():
            yield q.right(q.layer.eval()(q.x * factor), q.x * factor)


@program(kinds=NF4, packs="too")
def inputs_that_are_not_numbers(q: Quantized):
    """One NaN in a row makes that row NaN and leaves the others alone."""
    x = q.x.clone()
    x[1, 5] = torch.nan
    with torch.no_grad():
        y = q.layer.eval()(x)
    yield same(y.isnan().all(1).tolist(), [False, True, False, False])
    yield q.right(y[[0, 2, 3]], x[[0, 2, 3]])


@program(kinds=("nf4", "nf4-double", "fp4"), rows=48, packs="too", bias=True)
def rows_that_fill_no_tile(q: Quantized):
    """48 output features: no multiple of 32."""
    with torch.no_grad():
        for train in (True, False):
            yield q.right(q.layer.train(train)(q.x))


@program(kinds=NF4, columns=96, packs="too", may_raise=ODD)
def columns_that_fill_no_block(q: Quantized):
    """96 input features: a block of 64 ends in the middle of a row. A gradient for them."""
    x = q.inputs(grad=True)
    y = q.layer(x)
    yield q.right(y, x)
    y.sum().backward()
    yield q.gradient(x)


@program(kinds=NF4, columns=96, packs="too", may_raise=ODD)
def columns_that_fill_no_block_in_eval(q: Quantized):
    """The same in eval, where a processor with AVX512-BF16 refuses them."""
    with torch.no_grad():
        yield q.right(q.layer.eval()(q.x))


@program(kinds=NF4, columns=80, packs="too", may_raise=ODD)
def columns_of_a_vision_model(q: Quantized):
    """80 input features, dequantized for a merge."""
    yield close(dequantize_4bit(q.layer.weight.data, q.layer.weight.quant_state), q.weight, 1e-6)


@program(kinds=("nf4",), columns=63, rows=64, packs="too", may_raise=ODD)
def an_odd_number_of_columns(q: Quantized):
    """63 input features: a byte of codes belongs to two rows."""
    x = q.inputs()
    for train in (True, False):
        with torch.no_grad():
            yield close(q.layer.train(train)(x), q.expected(x), q.tolerance, q.rounding)


@program(kinds=INT8, columns=63, rows=33)
def odd_sizes_in_int8(q: Quantized):
    """63 to 33 features."""
    x = q.inputs(grad=True)
    y = q.layer(x)
    yield q.right(y, x)
    y.sum().backward()
    yield q.gradient(x)
    yield q.right(q.layer.eval()(x), x)


@program(kinds=BOTH, packs="too")
def inputs_stay_as_they_are(q: Quantized):
    """The layer does not write to its input, nor to its bias."""
    kept = q.x.clone()
    for dtype in (torch.float32, torch.float16):
        x = q.x.to(dtype)
        with torch.no_grad():
            q.layer.eval()(x)
        yield same(x, kept.to(dtype))


@program(kinds=BOTH, may_raise="(?i)shape|size|mat1|mismatch|match|numel|dim")
def inputs_of_another_width(q: Quantized):
    """A mistake of the user: one feature too many must be refused."""
    x = torch.ones(4, COLUMNS + 1, device=q.device)
    y = q.layer(x)
    yield close(y, torch.full((0,), 0.0, device=q.device), 0)


@program(kinds=BOTH, bias=True)
def the_bias_keeps_its_bits(q: Quantized):
    """A forward in a narrow dtype leaves a float32 bias as it was."""
    q.layer(q.x.bfloat16())
    yield same(q.layer.bias.detach(), q.bias)
    yield q.right(q.layer(q.x), rounding="unpatched, the bias is rounded by now")
