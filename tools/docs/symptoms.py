"""What a user sees, for ``docs/which.md``: the messages and the groups of ``patches/features/symptoms.json``."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator

from patches import REGISTRY
from patches.features.symptoms import Message, Symptoms, read

__all__ = ["Message", "Symptoms", "fragment", "read"]


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
