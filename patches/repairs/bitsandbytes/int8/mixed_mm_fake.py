"""The shape function of ``int8_mixed_scaled_mm`` declares another shape and dtype than the kernel returns."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING

from ....engine import Finding, Patch, Rewrite

if TYPE_CHECKING:
    import torch


def outliers(A: torch.Tensor, columns: torch.Tensor | None, *of_the_layer: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor like ``A[:, columns]``, or like the empty vector that stands for no columns.

    Outside of a compiler the shape function is called if something of the layer is on meta: then there is no result.
    """
    if any(tensor.device.type == "meta" != A.device.type for tensor in of_the_layer):
        raise RuntimeError(
            "The packed weights or row scales (SCB) of an INT8 layer are on the meta device, so they have no values, and "
            f"the input is on {A.device}. Load them (load_state_dict(..., assign=True)), or load the model again with "
            "from_pretrained."
        )
    count = 0 if columns is None else columns.numel()
    if isinstance(count, int) and count == 0:
        return A.new_empty(0)
    return A.new_empty((A.shape[0], count, *A.shape[2:]))


def defect() -> Finding:
    """Compare the result that the shape function declares with the real one."""
    import bitsandbytes.functional as F
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    torch.manual_seed(0)
    x = torch.randn(4, 32, dtype=torch.float16)
    x[:, 3] = 20
    CA, SCA, columns = F.int8_vectorwise_quant(x, threshold=6.0)
    CB, SCB, _ = F.int8_vectorwise_quant(torch.randn(16, 32, dtype=torch.float16))
    operator, arguments = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default, (x, CA, CB, SCA, SCB, columns)
    real = operator(*arguments)[1]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = operator(*map(mode.from_tensor, arguments))[1]
    wrong = (fake.dtype, fake.dim()) != (real.dtype, real.dim())
    return Finding(wrong, f"declared: {fake.dim()}-D {fake.dtype}; computed: {real.dim()}-D {real.dtype}")


def shape_function() -> FunctionType:
    """Find the function that bitsandbytes gave to ``torch.library.register_fake``; it has no name of its own."""
    from torch._library.simple_registry import singleton

    wrapper = getattr(singleton.find("bitsandbytes::int8_mixed_scaled_mm").fake_impl.kernel, "func", None)
    inside = (cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ())
    for found in (wrapper, *inside):  # torch wraps it
        if isinstance(found, FunctionType) and found.__module__ == "bitsandbytes._ops":
            return found
    raise LookupError("torch has no shape function of bitsandbytes for it")


TARGET = "bitsandbytes._ops:int8_mixed_scaled_mm.fake"
DECORATOR = 'register_fake("bitsandbytes::int8_mixed_scaled_mm")'

PATCH = Patch(
    id="bitsandbytes-int8-mixed-mm-fake",
    summary="under torch.compile int8_mixed_scaled_mm declares the wrong shape and dtype for the outlier columns",
    groups=("compile",),
    silent=True,
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2044",),
    why="""
        The second result of the operator holds the outlier columns of the input: rows by columns, in the dtype of
        the input. Its shape function (the fake kernel that torch.compile calls) declares one dimension of unknown
        length, int64. So ``opcheck`` fails, and programs that compile or export the operator themselves get graphs
        with wrong types. All releases; #2044.
    """,
    repair="""
        The repair declares what the kernel returns. The number of columns is the length of ``outlier_cols``.
        Without outliers the kernel returns an empty vector. If the number is symbolic, the declared matrix is right
        for every number except 0.
    """,
    requires=("bitsandbytes>=0.46.1", "torch>=2.6"),
    tested_up_to="0.50.2",
    edits=(
        Rewrite(
            TARGET,
            find="outlier_cols = torch.library.get_ctx().new_dynamic_size()",
            reach=shape_function,
            decorator=DECORATOR,
        ),
        Rewrite(
            TARGET,
            find="A.new_empty(outlier_cols, dtype=torch.int64)",
            replace="_patches_outliers(A, outlier_cols, CB, SCB)",
            names={"_patches_outliers": outliers},
            reach=shape_function,
            decorator=DECORATOR,
        ),
    ),
    defect=defect,
)
