"""Into how many pieces torch.compile cuts a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...engine import Finding

if TYPE_CHECKING:
    import torch


def count_graphs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Compile ``function``, call it, and count the graphs; 1 more if a part is in none of them.

    So 1 is one graph of the whole call. The backend counts the graphs, because Dynamo's own counter of breaks stays 0 if a
    whole frame falls back to eager. ``fullgraph=True`` tells whether there is such a frame. That alone would not do: it
    also makes Dynamo capture shapes that depend on data, which a user's ``torch.compile(model)`` does not. No code is
    generated: the graphs run as they are.
    """
    import torch

    found: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    def calls(fullgraph: bool) -> bool:
        torch.compiler.reset()
        try:
            torch.compile(function, backend=backend, fullgraph=fullgraph)(*args, **kwargs)
        except torch._dynamo.exc.Unsupported:
            return False
        finally:
            torch.compiler.reset()
        return True

    whole = calls(fullgraph=True)  # first: what fails leaves the model as cold as it was
    found.clear()
    calls(fullgraph=False)
    return len(found) + (not whole)


def show_graphs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Finding:
    """Return the finding of :func:`count_graphs`: present unless the call is one graph."""
    count = count_graphs(function, *args, **kwargs)
    return Finding(count != 1, "torch.compile makes one graph" if count == 1 else f"torch.compile makes {count} parts")


def show_refused_graph(function: Callable[..., Any], *args: Any) -> Finding:
    """Return a finding that is present if ``fullgraph=True`` refuses, for a call of which no part can run in eager here."""
    import torch

    torch.compiler.reset()
    try:
        torch.compile(function, fullgraph=True, backend="eager")(*args)
    except torch._dynamo.exc.Unsupported as error:
        return Finding(True, f"no full graph: {str(error).splitlines()[0]}")
    finally:
        torch.compiler.reset()
    return Finding(False, "1 graph")


def show_dequantize_graphs(dequantize: Callable[..., torch.Tensor]) -> Finding:
    """Return whether a product with a weight (64 x 64, bfloat16) that ``dequantize`` unpacks is one graph."""
    import torch
    from bitsandbytes.functional import quantize_4bit

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(64, 64, dtype=torch.bfloat16, device=device)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        return x @ dequantize(packed, state).t()

    x = torch.randn(2, 64, dtype=torch.bfloat16, device=device)
    # Without a GPU its C functions are not there.
    return show_graphs(call, x) if device == "cuda" else show_refused_graph(call, x)
