"""The page of one patch, and the table of all."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from patches import Patch

from . import prose
from .figures import Figure
from .reports import Seen
from .symptoms import Symptoms
from .words import link, releases

NO_DIFF = (
    "Left out: no release that has this defect was installed where the page was built. "
    "`python -m patches diff {id}` shows it where one is."
)
INTRODUCTION = """\
{count} defects, by the package that is repaired. Each has a page with its story, the changed lines and its reproducer. To
find one by what you see, go to [](../which.md).

The end of a range is the last release tested, or, with "below", the one that repaired it upstream."""
REPRODUCER = (
    "This is what `python -m patches verify {id}` runs: the defect must be there without the patch, gone with it, and "
    "back after it was taken out."
)


def page(patch: Patch, symptoms: Symptoms, figure: Figure | None, changes: Iterable[Seen]) -> str:
    """A page in Markdown: what goes wrong, what it says, what was measured, what is changed, the reproducer."""
    first, rest = prose.story(patch)
    parts = [
        f"# {patch.id}\n\n**{_sentence(patch.summary)}**",
        _facts(patch),
        f"## The defect and its repair\n\n{first}\n\n{rest}".rstrip(),
        *_says(patch, symptoms),
        *_measured(patch, figure),
        *_changed(patch, list(changes)),
        f"## Its reproducer\n\n{REPRODUCER.format(id=patch.id)}\n\n{_block('python', inspect.getsource(patch.defect))}",
    ]
    return "\n\n".join(parts) + "\n"


def index(patches: Iterable[Patch]) -> str:
    """The table of all, a part for each package that is repaired, and what Sphinx puts into the navigation."""
    packages: dict[str, list[Patch]] = {}
    for patch in patches:
        packages.setdefault(patch.package, []).append(patch)
    total = sum(map(len, packages.values()))
    lines = ["# The patches\n", INTRODUCTION.format(count=total)]
    for package, own in packages.items():
        lines += [f"\n## {package}\n", "| patch | without it |", "|---|---|", *map(_row, own)]
        lines += ["\n```{toctree}\n:hidden:\n", *(p.id for p in own), "```"]
    return "\n".join(lines) + "\n"


def _row(patch: Patch) -> str:
    upstream = ", ".join(map(link, patch.links))
    return f"| [{patch.id}]({patch.id}.md)<br>{releases(patch)} | {_escaped(patch.summary)}<br>Upstream: {upstream} |"


def _facts(patch: Patch) -> str:
    rows = [
        ("releases", releases(patch)),
        ("seen on", f"torch {', '.join(patch.seen_on)}"),
        ("upstream", ", ".join(map(link, patch.links))),
        ("file", f"`{prose.file(patch)}`"),
        ("to leave it out", f"`PATCHES_DISABLE={patch.id}`"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _says(patch: Patch, symptoms: Symptoms) -> Iterator[str]:
    if said := symptoms.said(patch.id):
        blocks = "\n\n".join(_block("text", text) for text in said)
        also = "\n\nIn other cases nothing is said." if patch.id in symptoms.silent else ""
        yield f"## What is said without it\n\n{blocks}{also}"
    elif patch.id in symptoms.silent:
        yield "## What is said without it\n\nNothing."


def _measured(patch: Patch, figure: Figure | None) -> Iterator[str]:
    if figure is None:
        return
    on = ", ".join(f"{name} {version}" for name, version in figure["on"].items())
    rows = [f"| {word} | {_cell(figure[phase])} |" for word, phase in (("without", "unpatched"), ("with", "patched"))]
    yield "\n".join([f"## Measured\n\n`verify` on {on}:\n", "| the patch | its reproducer says |", "|---|---|", *rows])


def _changed(patch: Patch, changes: list[Seen]) -> Iterator[str]:
    if not changes:
        yield f"## What is changed\n\n{NO_DIFF.format(id=patch.id)}"
        return
    yield "## What is changed"
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


def _sentence(summary: str) -> str:
    first = summary[0].upper() if summary.split()[0].isalpha() else summary[0]
    return _escaped(f"{first}{summary[1:]}.")


def _escaped(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "\\<")
