"""``python -m patches explain``: the facts about one patch, or of the message of an error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from .. import symptoms
from ..engine import needs, table
from ..engine.patch import Patch
from ..engine.report import Result, Status

HEADINGS = ("What you see", "Why", "Repair", "Cost", "Turn it off")
NO_COST = "Not measured for this patch alone. What all patches cost together is in"
_ITEMS = re.compile(r"\n(?=[-*] )")


def matching(text: str, patches: dict[str, Patch]) -> list[str]:
    """The patches that ``text`` may mean: an error message, whole or a part of it, a traceback, or some words."""
    known = symptoms.read_symptoms()
    entries: list[symptoms.Said | symptoms.Words] = [*known.messages, *known.words]
    found = [patch_id for entry in entries if entry.fits(text) for patch_id in entry.patches]
    if not found:
        words = re.findall(r"[\w.]+", text.lower())
        texts = {
            i: f"{i} {p.summary} {p.why} {p.repair} {p.cost} {' '.join(known.said(i))}".lower()
            for i, p in patches.items()
        }
        found = [i for ids in known.grouped(texts).values() for i in ids if all(word in texts[i] for word in words)]
    return list(dict.fromkeys(patch_id for patch_id in found if patch_id in patches))


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a field of a patch, without its indentation."""
    return list(filter(None, map(str.strip, inspect.cleandoc(text).split("\n\n"))))


def sections(patch: Patch, result: Result) -> dict[str, list[str]]:
    """The paragraphs under each of :data:`HEADINGS`."""
    edits = [edit.target for edit in needs.edits(patch) or patch.edits]
    return dict(zip(HEADINGS, (
        [*_seen(patch)],
        [*paragraphs(patch.why), *patch.links],
        [
            *paragraphs(patch.repair),
            f"It changes {', '.join(dict.fromkeys(edits))}. The changed lines: python -m patches diff {patch.id}",
        ],
        paragraphs(patch.cost) or [f"{NO_COST} docs/speed.md."],
        [
            f"PATCHES_DISABLE={patch.id}, or patches.revert({patch.id!r}) in a running program.",
            f"For {'; '.join(patch.ranges())}. Tested up to {', '.join(_tested(patch))}. "
            "If the installed code differs from what the patch expects, the patch is skipped and reported as `conflict`.",
            f"Here: {_here(patch, result)}.",
            f"To see the defect and its repair: python -m patches verify {patch.id}.",
        ],
    )))  # fmt: skip


def _tested(patch: Patch) -> list[str]:
    """The newest tested release of each package that is repaired."""
    return list(dict.fromkeys(f"{part.package} {part.tested_up_to}" for part in patch.parts))


def sentence(summary: str) -> str:
    """A summary as a sentence; names of code keep their case."""
    first = summary[0].upper() if summary.split()[0].isalpha() else summary[0]
    return f"{first}{summary[1:]}."


def _here(patch: Patch, result: Result) -> str:
    """What a program on this machine gets."""
    if result.status in (Status.PENDING, Status.AVAILABLE):
        found = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        return f"{found}; a program that imports {patch.package} gets the patch, unless PATCHES_AUTOLOAD=0 is set"
    return f"{result.status}{f' ({result.reason})' if result.reason else ''}"


def _seen(patch: Patch) -> Iterator[str]:
    known = symptoms.read_symptoms()
    yield sentence(patch.summary)
    yield from known.said(patch.id)
    if patch.silent:
        yield "In other cases there is no message." if known.said(patch.id) else "There is no message."
    if patch.effect in EFFECTS:
        yield EFFECTS[patch.effect]


EFFECTS = {
    "warns": "The patch only warns, or raises an error that says what to do.",
    "feature": "It repairs no defect of a library, but what patches.quantize_experts brings about.",
}
"""Said of a patch that repairs no defect of a library."""


def page(patch: Patch, result: Result) -> str:
    """One patch, for people."""
    lines = [patch.id]
    for heading, paragraphs in sections(patch, result).items():
        lines += ["", heading, *(_wrapped(part) for paragraph in paragraphs for part in _ITEMS.split(paragraph))]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return table.wrapped(" ".join(text.replace("``", "`").split()), indent="  ")
