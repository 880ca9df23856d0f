"""Which features are in use, and by whom: their edits are in while one of the users is alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

from .patch import Feature

if TYPE_CHECKING:
    from .plan import Draft


def put_in(feature: Feature, draft: Draft) -> None:
    """Plan to put in the edits of ``feature``; raise ``Conflict`` if they do not fit."""
    _, failed = draft.put_in({feature.id: feature.edits})
    for error in failed.values():
        raise error


class Features:
    """The features that were ever used, and the users of each.

    Each change of a list of users is one call into C: no interrupt and no other thread comes between.
    """

    def __init__(self) -> None:
        self._users: dict[str, list[ref[Any]]] = {}
        self._known: dict[str, Feature] = {}

    def __iter__(self) -> Iterator[Feature]:
        return iter(tuple(self._known.values()))

    def ids(self) -> tuple[str, ...]:
        """Return the ids of the features that were ever used."""
        return tuple(self._known)

    def add_user(self, feature: Feature, user: object) -> None:
        """Count ``user`` as one that uses ``feature``, until it is removed or gone."""
        self._users.setdefault(feature.id, []).append(ref(user))
        self._known[feature.id] = feature

    def remove_user(self, feature: Feature, user: object) -> None:
        """Count ``user`` no more."""
        self._users[feature.id].remove(ref(user))

    def unused(self) -> set[str]:
        """Return the ids of the features that have no user now; one may be gone by an interrupt, without a word."""
        return {feature.id for feature in self if all(user() is None for user in self._users[feature.id])}
