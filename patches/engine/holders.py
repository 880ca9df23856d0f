"""Features: edits that are in as long as someone who asked for them is alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from .patch import Feature

if TYPE_CHECKING:
    from .plan import Draft


def hold(feature: Feature, holder: ref[Any], draft: Draft) -> None:
    """Plan to have ``feature`` in as long as ``holder`` is alive. Raises ``Conflict`` if it does not fit."""
    _, failed = draft.put_in({feature.id: feature.edits})
    for error in failed.values():
        raise error
    draft.holders[feature.id] = (*draft.holders.get(feature.id, ()), holder)


def release(feature: Feature, holder: object, problems: list[str], draft: Draft) -> None:
    """Plan to end the use by ``holder``. ``problems``: what must stay, if it was the last."""
    others = tuple(user for user in draft.holders.get(feature.id, ()) if user() is not holder)
    problems[:] = _left_to(others, feature, draft)


def drop_dead(feature: Feature, draft: Draft) -> None:
    """A holder that is gone without a word, by an interrupt say, does not hold."""
    users = draft.holders.get(feature.id, ())
    if any(user() is None for user in users):
        _left_to(tuple(user for user in users if user() is not None), feature, draft)


def _left_to(users: tuple[ref[Any], ...], feature: Feature, draft: Draft) -> list[str]:
    if users:
        draft.holders[feature.id] = users
        return []
    draft.holders.pop(feature.id, None)
    return [outcome.reason for outcome in draft.take_out({feature.id})[1].values()]
