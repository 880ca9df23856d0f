"""By what a user sees: the groups of symptoms and the messages, from ``docs/symptoms.json``.

There every patch has its ``groups``, and ``silent`` where nothing is said. A message is the ``text`` that a user reads,
the ``parts`` of it that are the same for everyone (the whole, if it does not say), the ``patches`` that it may mean,
and where it is ``in``: a file of what is installed, which ``holds`` these strings (the parts, if it does not say), or
"figure", what their reproducers say.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from patches import REGISTRY

from . import DOCS

FILE = DOCS / "symptoms.json"


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

    def said(self, patch_id: str) -> list[str]:
        """The messages that ``patch_id`` repairs."""
        return [message.text for message in self.messages if patch_id in message.patches]


def read() -> Symptoms:
    data = json.loads(FILE.read_text("utf-8"))
    messages = map(_message, data["messages"])
    return Symptoms(
        data["groups"],
        tuple(sorted(messages, key=lambda message: message.text.strip("'`").lower())),
        {patch_id: tuple(entry["groups"]) for patch_id, entry in data["patches"].items()},
        frozenset(patch_id for patch_id, entry in data["patches"].items() if entry.get("silent")),
    )


def _message(entry: Mapping[str, Any]) -> Message:
    parts = entry.get("parts", [entry["text"]])
    return Message(entry["text"], tuple(parts), tuple(entry["patches"]), entry["in"], tuple(entry.get("holds", parts)))


def fragment() -> str:
    """The messages as a table that a script can search, then the symptoms by group; for ``docs/which.md``."""
    known = read()
    lines = ["## By message\n", _search(), "", *_table(known.messages), ""]
    for key, title in known.groups.items():
        rows = [_row(patch_id, known) for patch_id, groups in known.groups_of.items() if key in groups]
        lines += [f"## {title}\n", "| what goes wrong | patch |", "|---|---|", *sorted(rows), ""]
    return "\n".join(lines)


def _row(patch_id: str, known: Symptoms) -> str:
    summary = REGISTRY.patches[patch_id].summary
    return f"| {summary}{' *(silent)*' if patch_id in known.silent else ''} | [{patch_id}](patches/{patch_id}.md) |"


def _search() -> str:
    return (
        "```{raw} html\n"
        '<label class="which-label" for="which">Paste an error message, or a whole traceback:</label>\n'
        '<textarea id="which" rows="3" spellcheck="false"></textarea>\n'
        '<p id="which-said" role="status"></p>\n'
        "```"
    )


def _table(messages: Iterable[Message]) -> Iterator[str]:
    """One row a message; ``data-parts`` is what the script looks for."""
    yield '```{raw} html\n<table class="docutils which"><thead><tr><th>message</th><th>patch</th></tr></thead><tbody>'
    for message in messages:
        parts = html.escape(json.dumps(message.parts, ensure_ascii=False))
        links = (f'<a href="patches/{patch_id}.html">{patch_id}</a>' for patch_id in message.patches)
        text = html.escape(message.text)
        yield f'<tr data-parts="{parts}"><td><code>{text}</code></td><td>{"<br>".join(links)}</td></tr>'
    yield "</tbody></table>\n```"
