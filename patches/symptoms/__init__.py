"""By what a user sees: the groups of symptoms and the messages, from ``symptoms.json``.

========== ======================================================================================================
key        what it holds
========== ======================================================================================================
groups     the title of each group by its name, in the order in which groups are shown
most_met   ids of the patches whose defects most people meet, in that order
messages   a list. ``text``: the message that a user reads. ``patches``: the ids that it may mean. ``in``: the file of
           what is installed that says it, or "figure": the reproducers of its patches say it. ``parts`` (optional):
           what of the text is the same for everyone; the whole text if left out. ``holds`` (optional): strings that
           the file in ``in`` holds; the parts if left out
words      a list. ``text``: words that people search for. ``also``: other spellings. ``patches``: what they may mean
patches    by id. ``groups``: the names of its groups; it is listed in the first. ``silent`` (optional): true where
           no message is shown
========== ======================================================================================================

:func:`parse` checks all of that, and says which key is missing where.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_NEEDED = {"messages": ("text", "patches", "in"), "words": ("text", "also", "patches"), "patches": ("groups",)}
_OPTIONAL = {"messages": ("parts", "holds"), "words": (), "patches": ("silent",)}
_LEAST = 8
"""Characters of a message that are enough to look for it."""
_RUN = 5
"""Words in a row that a pasted text and a message must share: part of a long message is enough to find it."""


@dataclass(frozen=True)
class Message:
    """What is said, the parts of it that everyone sees, what it may mean, and which strings stand where to prove it."""

    text: str
    parts: tuple[str, ...]
    patches: tuple[str, ...]
    where: str
    holds: tuple[str, ...]

    def fits(self, pasted: str) -> bool:
        """Whether ``pasted`` holds this message, is a piece of it, or shares some words in a row with it."""
        said, wanted = _plain(self.text), _plain(pasted)
        if all(_plain(part) in wanted for part in self.parts) or len(wanted) >= _LEAST and wanted in said:
            return True
        return any(f" {run} " in f" {wanted} " for run in runs_of_words(said))


@dataclass(frozen=True)
class Words:
    """Words that people search for, other spellings of them, and the patches that they may mean."""

    text: str
    also: tuple[str, ...]
    patches: tuple[str, ...]

    def fits(self, pasted: str) -> bool:
        """Whether ``pasted`` has these words, in one of their spellings."""
        wanted = _plain(pasted)
        return any(re.search(rf"\b{re.escape(_plain(each))}", wanted) for each in (self.text, *self.also))


@dataclass(frozen=True)
class Symptoms:
    """Titles of the groups by key, all messages and words, the groups of each patch, and those that say nothing."""

    groups: dict[str, str]
    messages: tuple[Message, ...]
    words: tuple[Words, ...]
    groups_of: dict[str, tuple[str, ...]]
    silent: frozenset[str]
    most_met: tuple[str, ...]

    def said(self, patch_id: str) -> list[str]:
        """The messages that ``patch_id`` repairs."""
        return [message.text for message in self.messages if patch_id in message.patches]

    def grouped(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """``ids`` by the group in which each is listed, those first that most people meet; "" for unknown ones."""
        found: dict[str, list[str]] = {key: [] for key in (*self.groups, "")}
        for patch_id in self.ranked(ids):
            found[self.groups_of.get(patch_id, ("",))[0]].append(patch_id)
        return {key: own for key, own in found.items() if own}

    def ranked(self, ids: Iterable[str]) -> list[str]:
        """``ids``, those first that most people meet, the others by the alphabet."""
        rank = {patch_id: number for number, patch_id in enumerate(self.most_met)}
        return sorted(ids, key=lambda patch_id: (rank.get(patch_id, len(rank)), patch_id))


def runs_of_words(text: str) -> list[str]:
    """Every :data:`_RUN` words of ``text`` that stand in a row."""
    words = text.split()
    return [" ".join(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]


@functools.cache
def read_symptoms() -> Symptoms:
    return parse_symptoms(json.loads(pkgutil.get_data(str(__package__), "symptoms.json") or b"{}"))


def parse_symptoms(data: Mapping[str, Any]) -> Symptoms:
    """``symptoms.json`` checked, as objects.

    Raises:
        ValueError: a key is missing or unknown; it says which, and where.
    """
    _check(data)
    messages = map(_message, data["messages"])
    return Symptoms(
        data["groups"],
        tuple(sorted(messages, key=lambda message: message.text.strip("'`").lower())),
        tuple(Words(entry["text"], tuple(entry["also"]), tuple(entry["patches"])) for entry in data["words"]),
        {patch_id: tuple(entry["groups"]) for patch_id, entry in data["patches"].items()},
        frozenset(patch_id for patch_id, entry in data["patches"].items() if entry.get("silent")),
        tuple(data["most_met"]),
    )


def _message(entry: Mapping[str, Any]) -> Message:
    parts = entry.get("parts", [entry["text"]])
    return Message(entry["text"], tuple(parts), tuple(entry["patches"]), entry["in"], tuple(entry.get("holds", parts)))


def _check(data: Mapping[str, Any]) -> None:
    if missing := [key for key in ("groups", "most_met", *_NEEDED) if key not in data]:
        raise ValueError(f"symptoms.json: no key {missing[0]!r}")
    for kind, needed in _NEEDED.items():
        entries = data[kind]
        for name, entry in entries.items() if isinstance(entries, dict) else enumerate(entries):
            where = f"symptoms.json: {kind}[{name!r}] ({json.dumps(entry)[:70]})"
            if missing := [key for key in needed if key not in entry]:
                raise ValueError(f"{where} has no key {missing[0]!r}; it needs {', '.join(needed)}")
            known = (*needed, *_OPTIONAL[kind])
            if unknown := [key for key in entry if key not in known]:
                raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for patch_id, entry in data["patches"].items():
        if unknown := [group for group in entry["groups"] if group not in data["groups"]]:
            raise ValueError(
                f"symptoms.json: {patch_id}: no group {unknown[0]!r}; there are {', '.join(data['groups'])}"
            )


def _plain(text: str) -> str:
    return " ".join(text.split()).lower()
