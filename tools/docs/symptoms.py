"""What a user sees, for ``docs/which.md``: the messages and the groups of the patches."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator

from patches import REGISTRY, Patch
from patches.symptoms import Symptoms, read_symptoms

__all__ = ["Symptoms", "fragment", "read_symptoms"]


def fragment() -> str:
    """The messages as a table that a script can search, then the symptoms by group; for ``docs/which.md``."""
    known = read_symptoms()
    lines = ["## By message\n", _search(), "", *_table(known), ""]
    for key, title in known.groups.items():
        rows = [_row(patch) for _, patch in sorted(REGISTRY.patches.items()) if key in patch.groups]
        lines += [f"## {title}\n", "| what goes wrong | patch |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(patch: Patch) -> str:
    return f"| {patch.summary}{' *(silent)*' if patch.silent else ''} | [{patch.id}](patches/{patch.id}.md) |"


def _search() -> str:
    return (
        "```{raw} html\n"
        '<label class="which-label" for="which">Paste an error message, a part of it, or a whole traceback; or type a few words:</label>\n'
        '<textarea id="which" rows="3" spellcheck="false"></textarea>\n'
        '<p id="which-said" role="status"></p>\n'
        "```"
    )


def _table(known: Symptoms) -> Iterator[str]:
    """One row a message, and one for words that people search for; what the script looks for is in ``data``."""
    yield '```{raw} html\n<table class="docutils which"><thead><tr><th>message</th><th>patch</th></tr></thead><tbody>'
    for words in known.words:
        yield _line("any", (words.text, *words.also), html.escape(words.text), words.patches)
    for message in known.messages:
        yield _line("parts", message.parts, f"<code>{html.escape(message.text)}</code>", message.patches)
    yield "</tbody></table>\n```"


def _line(key: str, wanted: Iterable[str], shown: str, patches: Iterable[str]) -> str:
    data = html.escape(json.dumps([*wanted], ensure_ascii=False))
    links = (f'<a href="patches/{patch_id}.html">{patch_id}</a>' for patch_id in patches)
    return f'<tr data-{key}="{data}"><td>{shown}</td><td>{"<br>".join(links)}</td></tr>'
