"""What ranks tell each other without a collective, in which ranks without the plugin would not take part."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

PATIENCE = timedelta(seconds=30)
"""How long a rank waits for the others, which come from the same broadcast."""
SHORT = timedelta(seconds=5)


def say(about: str, word: str = "1") -> None:
    """Tell the other ranks of the default group ``word`` about something that all of them are at."""
    import torch.distributed as dist

    _store().set(_key(about, dist.get_rank()), word)


def silent(about: str, patience: timedelta = SHORT) -> list[int]:
    """The ranks that have said nothing about that, also not within ``patience``."""
    import torch.distributed as dist

    store, ranks = _store(), range(dist.get_world_size())
    try:
        store.wait([_key(about, rank) for rank in ranks], patience)
    except RuntimeError:  # dist.DistStoreError: time is up
        return [rank for rank in ranks if not store.check([_key(about, rank)])]
    return []


def all_agree(mine: bool, about: str) -> bool:
    """Whether ``mine`` is true on every rank; each rank of the default group calls it. Raises if one does not answer."""
    import torch.distributed as dist

    say(about, "1" if mine else "0")
    if ranks := silent(about, PATIENCE):
        raise RuntimeError(
            f"Ranks {ranks} did not say within {PATIENCE.seconds} s whether packed weights fit their quantization "
            "state. A rank that runs without bnb-patches cannot: call patches.check_ranks() on every rank."
        )
    return all(_store().get(_key(about, rank)) == b"1" for rank in range(dist.get_world_size()))


def _key(about: str, rank: int) -> str:
    return f"bnb_patches/{about}/{rank}"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
