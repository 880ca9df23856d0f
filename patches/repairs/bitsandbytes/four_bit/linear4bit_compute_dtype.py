"""The first forward of a ``Linear4bit`` decides in which dtype all later ones compute."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from ....engine import Finding, Message, Patch, Rewrite

if TYPE_CHECKING:
    import torch
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

_FORWARD = "bitsandbytes.nn.modules:Linear4bit.forward"
_BFLOAT16 = "_patches_bfloat16_came_first"
_FLOAT32 = "_patches_float32_came_first"


def _settles(layer: Linear4bit, x: torch.Tensor) -> bool:
    """Tell whether ``x``, the first input of a layer on 0.46.1, leaves it with the ``compute_dtype`` that it was given.

    If that is float16, the layer may then warn of slow kernels, once.
    """
    import torch

    if _BFLOAT16 in vars(layer) or _FLOAT32 in vars(layer):
        return False
    if x.dtype is layer.compute_dtype or x.dtype not in (torch.float32, torch.bfloat16):
        return True
    if layer.compute_dtype is not None:
        setattr(layer, _FLOAT32 if x.dtype is torch.float32 else _BFLOAT16, True)
    return False


def _dtype_of_product(layer: Linear4bit, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which 0.46.1 computes ``x``, for a layer that has a ``compute_dtype``.

    Asks for no more than ``x`` needs: compiled before the first eager call, a layer that sees one dtype must not
    be compiled again after it because of a note that changes nothing.
    """
    import torch

    given: torch.dtype = layer.compute_dtype
    if x.dtype is torch.float32:
        return given if x.dtype is not given and layer.compute_type_is_set else torch.float32
    if hasattr(layer, _FLOAT32):
        return torch.float32
    if x.dtype is torch.bfloat16 and x.dtype is not given and not layer.compute_type_is_set:
        return torch.bfloat16
    return given


def _product_of_a_row(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor | None, state: QuantState) -> torch.Tensor:
    """Compute ``bitsandbytes.functional.gemv_4bit`` of float64 in float32."""
    from bitsandbytes.functional import gemv_4bit

    product: torch.Tensor = gemv_4bit(A.float(), B, state=state).to(A.dtype)
    return product if out is None else out.copy_(product)


def _dequantized(B: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Compute ``bitsandbytes.functional.dequantize_4bit`` of a weight of float64 in float32."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    in_float32 = copy.copy(state)
    in_float32.dtype = torch.float32
    weight: torch.Tensor = dequantize_4bit(B, in_float32)
    return weight


def defect() -> Finding:
    """Call a layer in bfloat16 once, then in float32."""
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    used, fresh = (Linear4bit(64, 64, bias=False, quant_type="nf4") for _ in range(2))
    used.load_state_dict(fresh.state_dict())
    used.to("cpu"), fresh.to("cpu")
    x = torch.randn(4, 64)
    used(x.bfloat16())
    error = ((used(x) - fresh(x)).norm() / fresh(x).norm()).item()
    return Finding(error > 0, f"relative error of a float32 output after one bfloat16 call {error:.1e}")


PATCH = Patch(
    id="bitsandbytes-linear4bit-compute-dtype",
    summary="the dtype of a 4-bit layer's first input lowers the precision of later calls; fullgraph fails on the first call",
    groups=("layers", "compile"),
    silent=True,
    messages=(Message("HOP: Non-nullified side effect", "torch/_dynamo/side_effects.py"),),
    words=("recompile",),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L623",),
    why="""
        A layer without ``compute_dtype`` stores the dtype of its first input if that is float32 or bfloat16, and
        casts every later input to it. One bfloat16 call (for example a warm-up under autocast) makes all later
        float32 calls less exact: a relative error of 5.2e-3 instead of none, silently (0.46.1 to 0.50.2). 0.46.1
        does this even if the user gave a ``compute_dtype``. Because forward writes attributes of the layer,
        ``torch.compile(fullgraph=True)`` over a checkpointed layer fails if it is the first call (``HOP:
        Non-nullified side effect``).
    """,
    repair="""
        With the repair each forward decides for itself and writes nothing: without ``compute_dtype`` the product is
        computed in the dtype of the input. From 0.47.0 on, a dtype that the user set is kept. A layer that only
        ever sees one dtype gives the same results, bit for bit.

        0.46.1 obeys a ``compute_dtype`` only if the first input has that dtype, or is neither float32 nor bfloat16.
        Then all later inputs are computed in it, also with the repair. If the first input was float32, all inputs
        are computed in float32, also with the repair, because that loses nothing. If it was bfloat16, the repair
        computes float32 inputs in float32, bfloat16 inputs in bfloat16, and others in the ``compute_dtype``. The
        first eager forward stores the dtype of its input on the layer for this.

        No release has a kernel for float64. With a float64 input, 0.50 silently computes garbage. Releases before 0.50
        raise an error if the input is one row and needs no gradient, and 0.49 does on a CPU for every input. Unpatched,
        a float64 input that follows a float32 one is computed in float32, because the layer has stored that dtype. So
        the repair gives the kernel float32 instead of float64. On 0.50 it casts the input of a layer without
        ``compute_dtype``, before 0.50 an input of one row. On 0.49 it also dequantizes the weight in float32.

        A layer that stored a dtype before ``apply()`` keeps it, because nothing shows whether the user set it.
    """,
    requires=("bitsandbytes>=0.46",),
    tested_up_to="0.50.2",
    edits=(
        # set_compute_type writes for float32 and bfloat16 alone; for float16 it warns of slow kernels, once
        Rewrite(
            _FORWARD,
            find="not self.compute_type_is_set",
            replace="x.dtype == torch.float16 and not torch.compiler.is_compiling() and not self.compute_type_is_set",
            when="bitsandbytes>=0.47",
        ),
        Rewrite(
            _FORWARD,
            find="not self.compute_type_is_set",
            replace="not torch.compiler.is_compiling() and not self.compute_type_is_set and _patches_settles(self, x)",
            names={"_patches_settles": _settles},
            when="bitsandbytes<0.47",
        ),
        Rewrite(
            _FORWARD,
            find="x.to(self.compute_dtype)",
            replace="x.to(_patches_dtype_of_product(self, x))",
            names={"_patches_dtype_of_product": _dtype_of_product},
            when="bitsandbytes<0.47",
        ),
        Rewrite(
            _FORWARD,
            find="bias = self.bias",
            replace="""
                bias = self.bias
                if x.dtype == torch.float64 and self.compute_dtype is None:
                    x = x.float()
            """,
            when="bitsandbytes>=0.50",
        ),
        *(
            Rewrite(
                "bitsandbytes.autograd._functions:matmul_4bit",
                find=f"F.gemv_4bit(A, {weight}, out, state=quant_state)",
                replace=f"(F.gemv_4bit if A.dtype != torch.float64 else _patches_product_of_a_row)(A, {weight}, out, state=quant_state)",
                names={"_patches_product_of_a_row": _product_of_a_row},
                when=when,
            )
            for weight, when in (("B.t()", "bitsandbytes<0.50"), ("B", "bitsandbytes>=0.49,<0.50"))
        ),
        *(
            Rewrite(
                f"bitsandbytes.autograd._functions:MatMul4Bit.{way}",
                find="F.dequantize_4bit",
                replace=f"(F.dequantize_4bit if {state}.dtype != torch.float64 else _patches_dequantized)",
                names={"_patches_dequantized": _dequantized},
                when="bitsandbytes>=0.49,<0.50",
            )
            for way, state in (("forward", "quant_state"), ("backward", "ctx.state"))
        ),
        # the bias follows the input, not the attribute that it was cast to
        Rewrite(
            _FORWARD,
            find="bnb.matmul_4bit(x, self.weight.t(), bias=bias, quant_state=self.weight.quant_state)",
            replace="""bnb.matmul_4bit(
                x,
                self.weight.t(),
                bias=None if self.bias is None else self.bias.to(x.dtype),
                quant_state=self.weight.quant_state,
            )""",
            when="bitsandbytes<0.47",
        ),
    ),
    defect=defect,
)
