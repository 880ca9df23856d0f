"""One repair in two ways, in eager and under ``torch.compile(fullgraph=True)``: a wrapper of wrapt, a rewritten function."""

from __future__ import annotations

import torch
import wrapt

from patches.engine import Finding, Patch, Rewrite
from patches.engine.registry import Registry


def twice(x):
    return x * 3  # the defect


def twice_by_default(x, factor=3):
    return x * factor  # the same


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3  # and again

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def call(x):
    return twice(x)


def call_with_default(x):
    return twice_by_default(x)


def apply(x):
    return Twice.apply(x)


def repair(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) / 3 * 2


def results() -> str:
    """What calls with 1 return, in eager and compiled."""
    named = {"function": call, "with defaults": call_with_default, "autograd": apply}
    return "; ".join(f"{name} {result(function)}" for name, function in named.items())


def result(function) -> str:
    torch.compiler.reset()
    x = torch.ones((), requires_grad=True)
    eager = f"{function(x).item():.0f}"
    try:
        compiled = f"{torch.compile(function, fullgraph=True, backend='eager')(x).item():.0f}"
    except Exception as error:
        compiled = type(error).__name__
    return f"eager {eager}, compiled {compiled}"


def main() -> None:
    global twice, twice_by_default
    print("as it is:  ", results())

    originals = twice, twice_by_default, vars(Twice)["forward"]
    twice, twice_by_default, Twice.forward = (wrapt.FunctionWrapper(original, repair) for original in originals)
    print("wrapper:   ", results())
    twice, twice_by_default, Twice.forward = originals

    edits = (
        Rewrite("__main__:twice", "x * 3", "x * 2"),
        Rewrite("__main__:twice_by_default", "x * factor", "x * 2"),
        Rewrite("__main__:Twice.forward", "x * 3", "x * 2"),
    )
    patch = Patch("twice", "twice(x) is x * 3", (), ("torch",), "999", edits, lambda: Finding(True))
    with Registry([patch]).applied():
        print("rewritten: ", results())


if __name__ == "__main__":
    main()
