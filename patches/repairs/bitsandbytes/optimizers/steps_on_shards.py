"""No optimizer of bitsandbytes steps under FSDP2."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ....distributed.dtensors import is_sharded
from ....engine import CannotShow, Finding, Message, Patch, Rewrite
from ....optimizers.state_bits import BLOCKSIZE, MATCH_STATE_BIT_WIDTH
from ...reproducers.process_group import one_rank
from ...reproducers.training import take_steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement


def _sharded_dims(parameter: DTensor) -> list[tuple[Placement, int]]:
    """Return the placement and the number of ranks for each dimension of the mesh that shards ``parameter``."""
    sizes = parameter.device_mesh.shape
    return [
        (placement, n) for placement, n in zip(parameter.placements, sizes) if not placement.is_replicate() and n > 1
    ]


def needs_32_bit_state(parameter: Tensor) -> bool:
    """Tell whether a block of ``parameter`` would lie on two ranks, or one rank would have more blocks than another; warn then."""
    if not is_sharded(parameter) or not (sharded := _sharded_dims(parameter)):
        return False
    if len(sharded) == 1:
        placement, ranks = sharded[0]
        same_rows = parameter.shape[0] % ranks == 0
        whole_blocks = parameter.numel() % (ranks * BLOCKSIZE) == 0
        if placement.is_shard(0) and same_rows and whole_blocks:
            return False
    warnings.warn(
        f"Parameter of shape {tuple(parameter.shape)}: its shard size is not a multiple of {BLOCKSIZE}; using 32-bit "
        "optimizer state.",
        stacklevel=2,
    )
    return True


def must_not_page(parameter: Tensor) -> bool:
    """Tell whether the optimizer state of ``parameter`` must not be paged, because it is sharded; warn then."""
    if not is_sharded(parameter):
        return False
    warnings.warn("Parameters are sharded: using optimizer states that are not paged.", stacklevel=2)
    return True


def zero_scales(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of ``shape``, whose last dimension counts the blocks of ``parameter``, sharded like ``parameter``."""
    import torch

    if not is_sharded(parameter):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    from torch.distributed.tensor import Replicate, Shard, zeros

    last = Shard(len(shape) - 1)
    placements = [Replicate() if each.is_replicate() else last for each in parameter.placements]
    return zeros(*shape, dtype=torch.float32, device_mesh=parameter.device_mesh, placements=placements)


def zero_double_state(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros for two states of ``parameter``, one behind the other, sharded like ``parameter``."""
    import torch

    if not is_sharded(parameter):
        return torch.zeros((2, *parameter.size()), dtype=dtype, device=parameter.device)
    return torch.stack([torch.zeros_like(parameter, dtype=dtype)] * 2)


def local_shards(p: Tensor, g: Tensor, *states: Tensor | None, max_unorm: float = 0.0) -> tuple[Any, ...]:
    """Return the shards that this rank has of a parameter, of its gradient and of its states."""
    if not is_sharded(p):
        return p, g, *states
    if max_unorm > 0.0 and _sharded_dims(p):
        raise NotImplementedError(
            "Under FSDP2, LARS and LAMB cannot step on parameters with 32-bit optimizer state: they limit an update by its "
            "norm (max_unorm), and no rank has the whole update. Use another optimizer."
        )
    if is_sharded(g) and g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    if not all(state is None or is_sharded(state) for state in states):
        raise ValueError(
            f"An optimizer state of a sharded parameter of shape {tuple(p.shape)} is not sharded. To load the state dict "
            "of a single process, use torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
            "full_state_dict=True."
        )
    own = p.to_local()
    if not own.is_contiguous():
        raise NotImplementedError(f"The shard of a parameter of shape {tuple(p.shape)} is not contiguous in memory.")
    gradient: Any
    gradient, *shards = (tensor.to_local() if is_sharded(tensor) else tensor for tensor in (g, *states))
    return own, gradient.contiguous(), *shards


def defect() -> Finding:
    """Make three steps of AdamW8bit on a layer of FSDP2, on one rank, and the same without FSDP2."""
    import copy

    import torch
    from bitsandbytes.optim import AdamW8bit

    torch.manual_seed(0)
    whole: Any = torch.nn.Linear(64, 64)
    sharded = copy.deepcopy(whole)
    if error := take_steps(AdamW8bit(whole.parameters()), whole, steps=3):
        raise CannotShow("before 0.50 no optimizer of bitsandbytes steps on a CPU, sharded or not") from error
    with one_rank() as mesh:
        from torch.distributed.fsdp import fully_shard

        fully_shard(sharded, mesh=mesh)
        if error := take_steps(AdamW8bit(sharded.parameters()), sharded, steps=3):
            return Finding(True, f"{type(error).__name__}: {str(error).partition('.default ')[2][:60].strip()}")
        off = (sharded.weight.full_tensor() - whole.weight).abs().max().item()
    return Finding(off > 0, f"weights after 3 steps, sharded against not: largest difference {off}")


_OPTIMIZER = "bitsandbytes.optim.optimizer"
_ADEMAMIX = "bitsandbytes.optim.ademamix:AdEMAMix"
_SCALES = {"_patches_scales": zero_scales}


def _init_state(target: str, scales_of: int) -> tuple[Rewrite, ...]:
    zeros = "torch.zeros((blocks,), dtype=torch.float32, device=p.device)"
    small = 'p.numel() < config["min_8bit_size"]'
    in_32_bits = f"{small} or (dtype == torch.uint8 and _patches_cuts_blocks(p))"
    return (
        Rewrite(target, zeros, "_patches_scales(p, (blocks,))", count=scales_of, names=_SCALES),
        Rewrite(target, small, in_32_bits, names={"_patches_cuts_blocks": needs_32_bit_state}),
    )


PATCH = Patch(
    id="bitsandbytes-steps-on-shards",
    summary="no optimizer of bitsandbytes steps under FSDP2: an error on a CPU, illegal memory access on a GPU",
    groups=("shard", "train"),
    messages=(
        Message(
            "bitsandbytes.optimizer_update_8bit_blockwise.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!",
            "torch/lib/libtorch_python.so",
            parts=("got mixed torch.Tensor and DTensor, need to convert all",),
        ),
        Message(
            "Operator bitsandbytes.optimizer_update_32bit.default does not have a sharding strategy registered.",
            "torch/distributed/tensor/_sharding_prop.py",
            parts=("does not have a sharding strategy registered.",),
        ),
    ),
    links=("https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633",),
    why="""
        ``fully_shard`` makes each parameter and its gradient a ``DTensor``, whose shape is the shape of the whole
        and whose memory is one shard. The optimizers pass it to their kernels, with 8-bit scales for the whole. The
        first step raises ``got mixed torch.Tensor and DTensor`` or ``does not have a sharding strategy
        registered``, and on a GPU it is an illegal memory access. All releases. Before 0.50 no optimizer runs on a
        CPU, so the repair begins with 0.50. (#1633)
    """,
    repair="""
        The repair passes the kernels the rank's shard of the parameter, of its gradient and of its states. States
        and scales are sharded like the parameter, so ``torch.distributed.checkpoint`` saves and loads them as it
        does for torch's optimizers, on any number of ranks. Blocks of 256 values share a scale. If every rank has
        the same number of complete rows and these are complete blocks, a step equals a step of one process bit for
        bit. If shards cut a block (odd sizes, a weight that is sharded along another dimension or along two), the
        state of that parameter has 32 bits instead, with a warning.

        So the number of bits depends on the number of ranks. A full state dict is converted to the one of the ranks
        that load it (8 to 32 bits exactly, 32 to 8 bits as a step rounds), and ``torch-checkpoint-other-forms``
        does so for ``dcp.load``. On a GPU, paged states are not paged under FSDP2, with a warning. LARS and LAMB
        limit an update by its norm if the state has 32 bits (small parameters always do), and no rank knows that
        norm: they still fail there, with an error that says why.
    """,
    cost="""
        Without FSDP2 a type check for each parameter in a step.
    """,
    requires=("bitsandbytes>=0.50", "torch>=2.6"),
    tested_up_to="0.50.2",
    edits=(
        *_init_state(f"{_OPTIMIZER}:Optimizer1State.init_state", 1),
        *_init_state(f"{_OPTIMIZER}:Optimizer2State.init_state", 2),
        *_init_state(f"{_ADEMAMIX}.init_state", 1),
        Rewrite(
            f"{_ADEMAMIX}.init_state",
            "torch.zeros((2, blocks), dtype=torch.float32, device=p.device)",
            "_patches_scales(p, (2, blocks))",
            names=_SCALES,
        ),
        Rewrite.to_call(
            f"{_ADEMAMIX}._get_state_double_buffer",
            "torch.zeros((2, *p.size()), dtype=dtype, device=p.device)",
            zero_double_state,
            "p, dtype",
        ),
        *(
            Rewrite(
                target,
                "not self.is_paged or p.numel() < 1e5",
                "not self.is_paged or p.numel() < 1e5 or _patches_is_unpaged(p)",
                names={"_patches_is_unpaged": must_not_page},
            )
            for target in (f"{_OPTIMIZER}:Optimizer8bit.get_state_buffer", f"{_ADEMAMIX}._get_state_double_buffer")
        ),
        Rewrite(
            "bitsandbytes.functional:optimizer_update_32bit",
            "param_norm = 0.0",
            "p, g, state1, state2 = _patches_local(p, g, state1, state2, max_unorm=max_unorm)\n"
            "if p.numel() == 0:\n    return\n"  # a rank without a row
            "param_norm = 0.0",
            names={"_patches_local": local_shards},
        ),
        Rewrite(
            "bitsandbytes.functional:optimizer_update_8bit_blockwise",
            "is_on_gpu([p, g, state1, state2, qmap1, qmap2, absmax1, absmax2])",
            "p, g, state1, state2, absmax1, absmax2 = _patches_local(p, g, state1, state2, absmax1, absmax2)\n"
            "is_on_gpu([p, g, state1, state2, qmap1, qmap2, absmax1, absmax2])",
            names={"_patches_local": local_shards},
        ),
        *MATCH_STATE_BIT_WIDTH,
    ),
    defect=defect,
)
