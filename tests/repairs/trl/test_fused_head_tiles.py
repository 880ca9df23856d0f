"""TRL's fused head against itself in eager: the same bits, in one graph, and its buffer where nobody compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import patches
from patches.engine import gate

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("trl", reason="TRL is not installed, nor what it needs (datasets, with pyarrow and pandas)")
pytestmark = pytest.mark.skipif(not gate.satisfied("trl>=1.16"), reason="TRL before 1.16 has another head")

ID = "trl-fused-head-tiles"
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
VOCABULARY, WIDTH = 40, 8


class Head:
    """Arguments of one call, and what comes out: every output, and the gradients of hidden states and head."""

    def __init__(
        self, tokens: int = 6, tile: int = 16, dtype: torch.dtype = torch.float32, bias: bool = False,
        softcap: float | None = None, outputs: tuple[str, ...] = ALL,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH).to(dtype).requires_grad_()
        self.weight = torch.randn(VOCABULARY, WIDTH).to(dtype).requires_grad_()
        self.bias = torch.randn(VOCABULARY).to(dtype).requires_grad_() if bias else None
        self.targets = torch.randint(0, VOCABULARY, (tokens,))
        self.rest = (0.7, tile, softcap, 1.5, outputs)

    def function(self) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        return lambda *inputs: ChunkedLogProbFunction.apply(*inputs, self.targets, *self.rest)

    def __call__(self, call: Callable[..., tuple[torch.Tensor | None, ...]]) -> list[torch.Tensor]:
        inputs = [x for x in (self.hidden, self.weight, self.bias) if x is not None]
        outputs = [x for x in call(self.hidden, self.weight, self.bias) if x is not None]
        loss = sum(x.sum() for x in outputs if x.requires_grad)
        return [*outputs, *torch.autograd.grad(loss, inputs)]


def whole(function: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("head", [
    pytest.param({}, id="tiles of 16, 16 and 8"),
    pytest.param({"tile": 32768}, id="one tile in a wider buffer"),
    pytest.param({"tile": VOCABULARY}, id="one tile of the buffer's width"),
    pytest.param({"tokens": 1}, id="one token"),
    pytest.param({"tokens": 4099}, id="two tiles of tokens"),
    pytest.param({"bias": True, "softcap": 3.0}, id="bias and soft cap"),
    pytest.param({"dtype": torch.bfloat16, "bias": True}, id="bfloat16"),
    pytest.param({"outputs": ()}, id="log-probabilities alone"),
    pytest.param({"outputs": ("entropy", "is_top1")}, id="what SFTTrainer asks for"),
])  # fmt: skip
def test_one_graph_of_the_same_bits(head):
    head = Head(**head)
    expected = head(head.function())
    with patches.applied(ID):
        found = head(whole(head.function()))
        eager = head(head.function())
    assert len(found) == len(eager) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(eager, expected))
    assert all(torch.equal(*pair) for pair in zip(found, expected))


def test_refused_without_the_patch():
    head = Head()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="non-contiguous `out=`"):
        head(whole(head.function()))


def test_inductor_computes_the_same():
    head = Head(bias=True)
    expected = head(head.function())
    with patches.applied(ID):
        torch.compiler.reset()
        found = head(torch.compile(head.function(), fullgraph=True))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


def test_an_eager_step_allocates_what_it_did():
    """One buffer for all tiles."""

    class Allocated(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.empty.memory_format or function is torch.ops.aten.new_empty.default:
                self.bytes += result.nbytes
            return result

    def allocated() -> int:
        with Allocated() as mode:
            head(head.function())
        return mode.bytes

    head = Head()
    before = allocated()
    with patches.applied(ID):
        assert allocated() == before > 0
