"""By what a user sees: the groups of symptoms and the messages, from ``symptoms.json``.

There every patch has its ``groups``, the first of which it is listed in, and ``silent`` where nothing is said. A message
is the ``text`` that a user reads, the ``parts`` of it that are the same for everyone (the whole, if it does not say),
the ``patches`` that it may mean, and where it is ``in``: a file of what is installed, which ``holds`` these strings (the
parts, if it does not say), or "figure", what their reproducers say. ``most_met`` are the patches whose defects most
people meet, in that order.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """What is said, the parts of it that everyone sees, what it may mean, and which strings stand where to prove it."""

    text: str
    parts: tuple[str, ...]
    patches: tuple[str, ...]
    where: str
    holds: tuple[str, ...]


@dataclass(frozen=True)
class Symptoms:
    """Titles of the groups by key, all messages, the groups of each patch, and those that say nothing."""

    groups: dict[str, str]
    messages: tuple[Message, ...]
    groups_of: dict[str, tuple[str, ...]]
    silent: frozenset[str]
    most_met: tuple[str, ...]

    def said(self, patch_id: str) -> list[str]:
        """The messages that ``patch_id`` repairs."""
        return [message.text for message in self.messages if patch_id in message.patches]

    def grouped(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """``ids`` by the group in which each is listed, those first that most people meet; "" for unknown ones."""
        rank = {patch_id: number for number, patch_id in enumerate(self.most_met)}
        found: dict[str, list[str]] = {key: [] for key in (*self.groups, "")}
        for patch_id in sorted(ids, key=lambda patch_id: (rank.get(patch_id, len(rank)), patch_id)):
            found[self.groups_of.get(patch_id, ("",))[0]].append(patch_id)
        return {key: own for key, own in found.items() if own}


@functools.cache
def read() -> Symptoms:
    data = json.loads(pkgutil.get_data(str(__package__), "symptoms.json") or b"")
    messages = map(_message, data["messages"])
    return Symptoms(
        data["groups"],
        tuple(sorted(messages, key=lambda message: message.text.strip("'`").lower())),
        {patch_id: tuple(entry["groups"]) for patch_id, entry in data["patches"].items()},
        frozenset(patch_id for patch_id, entry in data["patches"].items() if entry.get("silent")),
        tuple(data["most_met"]),
    )


def _message(entry: Mapping[str, Any]) -> Message:
    parts = entry.get("parts", [entry["text"]])
    return Message(entry["text"], tuple(parts), tuple(entry["patches"]), entry["in"], tuple(entry.get("holds", parts)))
