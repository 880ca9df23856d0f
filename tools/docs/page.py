"""The page of one patch, of each group, and of all groups."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping

from packaging.version import Version

from patches import Patch
from patches.command_line import explain
from patches.engine import needs
from patches.symptoms import GROUPS, WORDS, group_patches

from . import figures, prose
from .figures import Figure
from .reports import Seen
from .stacks import shown_on
from .words import link, releases

NO_DIFF = (
    "No diff: no release that has this defect was installed where this page was built. "
    "`python -m patches diff {id}` shows it where one is."
)
INTRODUCTION = """\
{count} defects in the groups of `python -m patches list`: by what a user does. To find one by an error
message, go to [](../find_your_defect.md). The end of a range of releases is the last one tested, or, with "below", the one that
repaired the defect upstream."""
REPRODUCER = (
    "`python -m patches verify {id}` runs this program in fresh processes: the defect must be present without the patch, "
    "absent with it, and present again after revert."
)


def page(patch: Patch, measured: Mapping[str, Figure], changes: Iterable[Seen]) -> str:
    """A page in Markdown, under the headings of ``python -m patches explain``."""
    why, repair, cost = (
        [prose.markdown(p, patch) for p in explain.paragraphs(text)] for text in (patch.why, patch.repair, patch.cost)
    )
    first = prose.title(patch)
    upstream = ", ".join(map(link, patch.links))
    parts = (
        [*_says(patch), *_measured(patch, measured)],
        [first, *why, f"Upstream: {upstream}. File: `{prose.file(patch)}`."],
        [*repair, *_changed(patch, list(changes))],
        cost or [f"{explain.NO_COST} [](../speed.md)."],
        [_facts(patch), REPRODUCER.format(id=patch.id), *_programs(patch)],
    )
    title = f"# {patch.id}\n\n**{_escaped(explain.sentence(patch.summary))}**"
    sections = (f"## {heading}\n\n" + "\n\n".join(part) for heading, part in zip(explain.HEADINGS, parts))
    return "\n\n".join([title, *sections]) + "\n"


def _programs(patch: Patch) -> list[str]:
    """The source of each reproducer, once where several parts have the same."""
    functions = dict.fromkeys(getattr(part.defect, "func", part.defect) for part in patch.parts)
    return [_block("python", inspect.getsource(function)) for function in functions]


def index(patches: Mapping[str, Patch]) -> str:
    """The groups, each a page of its own, which Sphinx puts into the navigation."""
    grouped = group_patches(patches.values())
    lines = [
        "# The patches\n",
        INTRODUCTION.format(count=sum(p.effect == "repairs" for p in patches.values())),
        "\n| when | patches |",
        "|---|---|",
    ]
    lines += [f"| [{GROUPS[key]}](group-{key}.md) | {len(group)} |" for key, group in grouped.items()]
    lines += ["\n```{toctree}\n:hidden:\n", *(f"group-{key}" for key in grouped), "```"]
    return "\n".join(lines) + "\n"


def groups(patches: Mapping[str, Patch]) -> dict[str, str]:
    """The page of each group by its name: a table of its patches."""
    pages = {}
    for key, group in group_patches(patches.values()).items():
        also = sorted(i for i, patch in patches.items() if key in patch.groups[1:])
        lines = [f"# {GROUPS[key]}\n", "| patch | without it |", "|---|---|", *map(_row, group)]
        if also:
            lines += ["\nListed elsewhere, and met here too: " + ", ".join(f"[{i}]({i}.md)" for i in also) + "."]
        ids = [patch.id for patch in group]
        pages[f"group-{key}"] = "\n".join([*lines, "\n```{toctree}\n:hidden:\n", *ids, "```"]) + "\n"
    return pages


def _row(patch: Patch) -> str:
    upstream = ", ".join(map(link, patch.links))
    effect = f" *({explain.EFFECTS[patch.effect].label})*" if patch.effect in explain.EFFECTS else ""
    return f"| [{patch.id}]({patch.id}.md){effect}<br>{releases(patch)} | {_escaped(patch.summary)}<br>Upstream: {upstream} |"


def _facts(patch: Patch) -> str:
    rows = [
        ("releases with the defect", releases(patch)),
        *_shown(patch),
        ("if the installed code is another", "the patch is skipped and reported as `conflict`"),
        ("to leave it out", f"`PATCHES_DISABLE={patch.id}`, or `patches.revert({patch.id!r})`"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _shown(patch: Patch) -> list[tuple[str, str]]:
    """The series of torch on which a stack of docs/releases.md showed the defect and its repair, if one did."""
    found = sorted(shown_on(patch.id), key=Version)
    return [("shown and repaired on", f"torch {', '.join(found)}")] if found else []


def _says(patch: Patch) -> Iterator[str]:
    yield from (_block("text", message.text) for message in patch.messages)
    yield from explain.remarks(patch)
    words = dict.fromkeys(each for text, also in WORDS.items() if text in patch.words for each in (text, *also))
    if words := [each for each in words if not any(each in other for other in words if other != each)]:
        yield f"People search for: {'; '.join(words)}."


def _measured(patch: Patch, measured: Mapping[str, Figure]) -> Iterator[str]:
    for part in patch.parts:
        figure = measured.get(figures.name(patch.id, part.name))
        if figure is None:
            continue
        on = ", ".join(f"{name} {version}" for name, version in figure["on"].items())
        which = f"The reproducer of {part.name}" if part.name else "The reproducer"
        rows = [
            f"| {word} | {_cell(figure[phase])} |" for word, phase in (("without", "unpatched"), ("with", "patched"))
        ]
        yield "\n".join([f"{which}, run by `verify` on {on}:\n", "| the patch | it says |", "|---|---|", *rows])


def _changed(patch: Patch, changes: list[Seen]) -> Iterator[str]:
    edits = dict.fromkeys(edit.target for edit in needs.edits(patch) or patch.edits)
    yield "\n".join(f"- `{target}`" for target in edits)
    if not changes:
        yield NO_DIFF.format(id=patch.id)
    for change in changes:
        where = f"{change.package} {', '.join(change.releases)}"
        if len(changes) > 1 and change.package != "bitsandbytes" and change.beside:
            where += f" with bitsandbytes {', '.join(change.beside)}"
        diff = "\n".join(change.diffs)
        yield f"### On {where}\n\n{_block('diff', diff)}"


def _block(language: str, text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else "nothing"


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "\\<")
