"""What a user sees, for ``docs/find_your_defect.md``: the messages and the groups of the patches."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator

from patches import REGISTRY, Patch
from patches.engine.patch import Message
from patches.symptoms import GROUPS, WORDS, common_parts


def fragment() -> str:
    """The messages as a table that a script can search, then the symptoms by group; for ``docs/find_your_defect.md``."""
    lines = ["## By message\n", _search(), "", *_table(), ""]
    for key, title in GROUPS.items():
        rows = [_row(patch) for _, patch in sorted(REGISTRY.patches.items()) if key in patch.groups]
        lines += [f"## {title}\n", "| what goes wrong | patch |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def messages() -> list[tuple[Message, list[str]]]:
    """Every message once, with the ids of the patches that it may mean."""
    found: dict[str, tuple[Message, list[str]]] = {}
    for patch in REGISTRY.patches.values():
        for message in patch.messages:
            _, ids = found.get(message.text, (message, []))
            found[message.text] = message, [*ids, patch.id]
    return sorted(found.values(), key=lambda each: each[0].text.strip("'`").lower())


def words() -> dict[str, list[str]]:
    """The words that people search for, each with the ids of the patches that it may mean."""
    return {text: [patch.id for patch in REGISTRY.patches.values() if text in patch.words] for text in WORDS}


def _row(patch: Patch) -> str:
    return f"| {patch.summary}{' *(silent)*' if patch.silent else ''} | [{patch.id}](patches/{patch.id}.md) |"


def _search() -> str:
    return (
        "```{raw} html\n"
        '<label class="defect-label" for="defect">Paste an error message, a part of it, or a whole traceback; or type a few words:</label>\n'
        '<textarea id="defect" rows="3" spellcheck="false"></textarea>\n'
        '<p id="defect-said" role="status"></p>\n'
        "```"
    )


def _table() -> Iterator[str]:
    """One row a message, and one for words that people search for; what the script looks for is in ``data``."""
    yield '```{raw} html\n<table class="docutils defects"><thead><tr><th>message</th><th>patch</th></tr></thead><tbody>'
    for text, ids in words().items():
        yield _line("any", (text, *WORDS[text]), html.escape(text), ids)
    for message, ids in messages():
        yield _line("parts", common_parts(message), f"<code>{html.escape(message.text)}</code>", ids)
    yield "</tbody></table>\n```"


def _line(key: str, wanted: Iterable[str], shown: str, patches: Iterable[str]) -> str:
    data = html.escape(json.dumps([*wanted], ensure_ascii=False))
    links = (f'<a href="patches/{patch_id}.html">{patch_id}</a>' for patch_id in patches)
    return f'<tr data-{key}="{data}"><td>{shown}</td><td>{"<br>".join(links)}</td></tr>'
