"""Messages between ranks through the store: a collective would hang if some ranks run without the plugin."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

ANSWER_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for the others, which come from the same broadcast and may be late."""
SHORT_TIMEOUT = timedelta(seconds=5)
_PAUSE = 0.01


def tell_ranks(topic: str, word: str = "1") -> None:
    """Publish ``word`` on ``topic`` for the other ranks of the default group."""
    import torch.distributed as dist

    _store().set(_key(topic, dist.get_rank()), word)


def silent_ranks(topic: str, patience: timedelta = SHORT_TIMEOUT) -> list[int]:
    """Return the ranks of the default group that have published nothing on ``topic`` within ``patience``."""
    import torch.distributed as dist

    store, ranks = _store(), range(dist.get_world_size())
    try:
        store.wait([_key(topic, rank) for rank in ranks], patience)
    except RuntimeError:  # dist.DistStoreError: time is up
        return absent_ranks(topic, ranks)
    return []


def absent_ranks(topic: str, ranks: Iterable[int]) -> list[int]:
    """Return the ``ranks`` that have published nothing on ``topic`` yet, without waiting."""
    store = _store()
    return [rank for rank in ranks if not store.check([_key(topic, rank)])]


def all_agree(mine: bool, topic: str, plugin_present: str) -> bool:
    """Tell whether ``mine`` is true on every rank; each rank of the default group calls it. Raise if one does not answer.

    Ranks with the plugin have published on ``plugin_present`` before: a rank that has not runs without it.
    """
    import torch.distributed as dist

    tell_ranks(topic, "1" if mine else "0")
    store, began = _store(), time.monotonic()
    missing = list(range(dist.get_world_size()))
    while True:
        missing = absent_ranks(topic, missing)
        if not missing:
            return all(store.get(_key(topic, rank)) == b"1" for rank in range(dist.get_world_size()))
        if failed := [rank for rank in missing if store.check([_key(_failed(topic), rank)])]:
            raise RuntimeError(f"Ranks {failed} raised an error while rank 0 sent its state dict; see their logs.")
        if time.monotonic() - began > ANSWER_TIMEOUT.seconds:
            absent = absent_ranks(plugin_present, missing)
            why = (
                "run without bnb-patches: call patches.check_ranks() on every rank"
                if absent
                else "have ended or hang: see their logs"
            )
            raise RuntimeError(
                "Rank 0 sent packed weights without their quantization state. Each rank must say whether they equal its "
                f"own, and ranks {absent or missing} did not within {ANSWER_TIMEOUT.seconds} s. They {why}."
            )
        time.sleep(_PAUSE)


def give_up(topic: str) -> None:
    """Tell the ranks that wait in :func:`all_agree` that this one has raised an error and does not come to it."""
    tell_ranks(_failed(topic))


def _failed(topic: str) -> str:
    return f"{topic}/failed"


def _key(topic: str, rank: int) -> str:
    return f"bnb_patches/{topic}/{rank}"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
