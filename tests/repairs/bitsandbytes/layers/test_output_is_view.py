"""In-place operations on what a quantized layer returns: the same as out of place, eager and compiled."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch

import patches
from patches.engine.gate import satisfied

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-output-is-view"
KINDS = {
    "nf4": lambda **o: bnb.nn.LinearNF4(64, 64, compute_dtype=torch.float32, **o),
    "int8": lambda **o: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, **o),
    "int8-threshold": lambda **o: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0, **o),
}
SHAPES = [(6, 64), (2, 3, 64)]


def make(kind: str, device: str = "cpu", training: bool = True, **options):
    torch.manual_seed(0)
    layer = KINDS[kind](**options).requires_grad_(False).to(device).train(training)
    layer(torch.ones(2, 64, device=device))  # settles the state of an INT8 layer
    return layer


def gradients(program, *shape: int, device: str = "cpu") -> list[torch.Tensor]:
    """Output and gradient of a step of ``program``; one column of the input is an outlier."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[..., 3] *= 20
    x = x.to(device).requires_grad_(True)
    y = program(x)
    y.square().sum().backward()
    return [y.detach(), x.grad]


def in_place(layer):
    def program(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y += x
        y[..., 0] = 0
        return torch.nn.functional.relu(y, inplace=True)

    return program


def out_of_place(layer):
    def program(x: torch.Tensor) -> torch.Tensor:
        y = layer(x) + x
        return torch.nn.functional.relu(torch.cat([torch.zeros_like(y[..., :1]), y[..., 1:]], dim=-1))

    return program


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_in_place_gives_what_out_of_place_does(kind, shape, training, device):
    layer = make(kind, device, training)
    expected = gradients(out_of_place(layer), *shape, device=device)
    if len(shape) == 3 and not (kind == "nf4" and device != "cpu"):  # whose kernel for a GPU makes no view
        with pytest.raises(RuntimeError, match="This view was created inside a custom Function"):
            gradients(in_place(layer), *shape, device=device)
    with patches.applied(ID):
        assert all(map(torch.equal, gradients(in_place(layer), *shape, device=device), expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager_in_one_graph(kind, shape, backend):
    with patches.applied(ID, "bitsandbytes-int8-outlier-columns", "bitsandbytes-matmul4bit-aot-cache"):
        program = in_place(make(kind))
        expected = gradients(program, *shape)
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        assert all(map(torch.equal, gradients(compiled, *shape), expected))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_sound_programs_stay_bit_identical(kind, training, bias, device):
    def outputs() -> list[torch.Tensor]:
        layer, found = make(kind, device, training, bias=bias), []
        for shape in SHAPES:
            found += gradients(layer, *shape, device=device)
            with torch.no_grad():
                y = layer(torch.ones(shape, device=device))
            found += [y, torch.tensor(y.stride())]
        return found

    before = outputs()
    with patches.applied(ID):
        assert all(map(torch.equal, outputs(), before))


@pytest.mark.skipif(not satisfied("bitsandbytes>=0.50"), reason="before 0.50 a given output is ignored")
def test_an_output_that_was_given_comes_back_itself():
    weight = make("nf4").weight
    x, out = torch.randn(2, 3, 64, requires_grad=True), torch.empty(2, 3, 64)
    expected = bnb.matmul_4bit(x, weight, weight.quant_state)
    with patches.applied(ID):
        y = bnb.matmul_4bit(x, weight, weight.quant_state, out=out)
    assert y.data_ptr() == out.data_ptr() and torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_c3a_of_peft_trains(kind):
    peft = pytest.importorskip("peft")
    if not hasattr(peft, "C3AConfig"):
        pytest.skip("this release of peft has no C3A")

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = peft.C3AConfig(block_size=32, target_modules=["0", "1"], init_weights="gaussian")
        # Two, for peft looks at the first input: the second gets one that requires grad.
        model = peft.get_peft_model(torch.nn.Sequential(make(kind), make(kind)), config)
        model(torch.ones(2, 3, 64)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    with pytest.raises(RuntimeError, match="This view was created inside a custom Function"):
        step()
    with patches.applied(ID):
        assert all(grad is not None and grad.abs().max() > 0 for grad in step())
