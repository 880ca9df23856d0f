"""Whether all ranks found the same, without a collective: ranks without the plugin would not take part in one."""

from __future__ import annotations

from datetime import timedelta

PATIENCE = timedelta(seconds=30)
"""How long a rank waits for the others, which come from the same broadcast."""


def all_agree(mine: bool, about: str) -> bool:
    """Whether ``mine`` is true on every rank; each rank of the default group calls it. Raises if one does not answer."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()  # type: ignore[no-untyped-call]
    keys = [f"bnb_patches/{about}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "1" if mine else "0")
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError as error:  # dist.DistStoreError
        silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"Ranks {silent} did not say within {PATIENCE.seconds} s whether packed weights fit their quantization "
            "state. A rank that runs without bnb-patches cannot: call patches.check_ranks() on every rank."
        ) from error
    return all(store.get(key) == b"1" for key in keys)
