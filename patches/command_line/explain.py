"""``python -m patches explain``: the facts about one patch, or about the message of an error."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from typing import NamedTuple

from .. import symptoms
from ..engine import needs, table
from ..engine.ids import unknown
from ..engine.patch import Patch
from ..engine.report import Result, Status

HEADINGS = ("What you see", "Why", "Repair", "Cost", "Turn it off")
NO_COST = "Not measured for this patch alone. What all patches cost together is in"
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
_ITEMS = re.compile(r"\n(?=[-*] )")


class Effect(NamedTuple):
    """The words for a patch that repairs no defect of a library, in a table and as a sentence."""

    label: str
    sentence: str


EFFECTS = {
    "warns": Effect("only warns", "The patch only warns, or raises an error that says what to do."),
    "feature": Effect(
        "a part of quantize_experts",
        "The patch repairs no defect of a library: it is for models whose experts quantize_experts has quantized.",
    ),
}


def complaint(text: str, patches: Mapping[str, Patch]) -> str:
    """Say what is wrong with ``text`` if it can mean no patch: it has no word, or it is an id that was misspelt."""
    if not re.search(r"\w{3}", text):
        return "give the id of a patch, or an error message in quotes; `python -m patches list` shows all patches"
    near = _ID.fullmatch(text) and difflib.get_close_matches(text, patches, n=1, cutoff=0.85)
    return unknown(text, patches) if near and not any(text in known for known in patches) else ""


def matching(text: str, patches: Mapping[str, Patch]) -> list[str]:
    """Find the patches that ``text`` may mean: an error message, whole or a part of it, a traceback, some words, or a part of an id."""
    if _ID.fullmatch(text) and (named := [known for known in patches if text in known]):
        return named
    found = [p.id for p in patches.values() if any(symptoms.message_fits(message, text) for message in p.messages)]
    found += [p.id for p in patches.values() if any(symptoms.words_fit(words, text) for words in p.words)]
    found += [p.id for p in patches.values() if _quotes(p, text)]
    if not found:
        wanted = re.findall(r"\w+(?:\.\w+)*", text.lower())
        for group in symptoms.group_patches(patches.values()).values():
            found += [patch.id for patch in group if _mentions_all(patch, wanted)]
    return list(dict.fromkeys(found))


def _quotes(patch: Patch, text: str) -> bool:
    """Tell whether the cause of ``patch`` has the words of ``text`` before its first parenthesis, if these are four or more."""
    words = text.partition("(")[0].strip(" .").lower().split()
    return len(words) >= 4 and " ".join(words) in " ".join(patch.why.lower().split())


def _mentions_all(patch: Patch, words: list[str]) -> bool:
    messages = " ".join(message.text for message in patch.messages)
    text = f"{patch.id} {patch.summary} {patch.why} {patch.repair} {patch.cost} {messages}".lower()
    return all(word in text for word in words)


def paragraphs(text: str) -> list[str]:
    """Split the text of a field of a patch into its paragraphs, without its indentation."""
    return list(filter(None, map(str.strip, inspect.cleandoc(text).split("\n\n"))))


def sections(patch: Patch, result: Result) -> dict[str, list[str]]:
    """Return the paragraphs under each of :data:`HEADINGS`."""
    targets = dict.fromkeys(edit.target for edit in needs.edits(patch) or patch.edits)
    what_you_see = [
        sentence(patch.summary),
        *(f"Message: {message.text}" for message in patch.messages),
        *remarks(patch),
    ]
    why = [*paragraphs(patch.why), *patch.links]
    repair = [
        *paragraphs(patch.repair),
        f"It changes {', '.join(targets)}. The changed lines: python -m patches diff {patch.id}",
    ]
    cost = paragraphs(patch.cost) or [f"{NO_COST} docs/speed.md."]
    turn_it_off = [
        f"PATCHES_DISABLE={patch.id}, or patches.revert({patch.id!r}) in a running program.",
        _releases(patch),
        "If the installed code differs from what the patch expects, the patch is skipped and reported as `conflict`.",
        f"Here: {_here(patch, result)}.",
        f"To see the defect and its repair: python -m patches verify {patch.id}.",
    ]
    return dict(zip(HEADINGS, (what_you_see, why, repair, cost, turn_it_off)))


def sentence(summary: str) -> str:
    """Turn a summary into a sentence; names of code keep their case."""
    first = summary[0].upper() if summary.split()[0].isalpha() else summary[0]
    return f"{first}{summary[1:]}."


def remarks(patch: Patch) -> list[str]:
    """Say where there is no message, and whether the patch repairs no defect of a library."""
    found = []
    if patch.silent:
        found.append("In other cases there is no message." if patch.messages else "There is no message.")
    if patch.effect in EFFECTS:
        found.append(EFFECTS[patch.effect].sentence)
    return found


def _releases(patch: Patch) -> str:
    """Say for which releases the patch is, and up to which it was tested; by parts where these differ."""
    tested = {f"{part.package} {part.tested_up_to}" for part in patch.parts}
    if len(tested) == 1:
        return f"For {'; '.join(patch.ranges())}. Tested up to {tested.pop()}."
    found = patch.names_of_parts(
        lambda part: f"{', '.join(part.requires)}, tested up to {part.package} {part.tested_up_to}"
    )
    parts = (f"\n- {', '.join(names)}: {text}" for text, names in found.items())
    return f"For these releases, by parts of the patch:{';'.join(parts)}."


def _here(patch: Patch, result: Result) -> str:
    """Say whether a program on this machine gets the patch."""
    if result.status in (Status.PENDING, Status.AVAILABLE):
        found = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        return f"{found}; a program that imports {patch.package} gets the patch, unless PATCHES_AUTOLOAD=0 is set"
    return f"{result.status}{f' ({result.reason})' if result.reason else ''}"


def page(patch: Patch, result: Result) -> str:
    """Show one patch to a person."""
    lines = [patch.id]
    for heading, paragraphs in sections(patch, result).items():
        lines += ["", heading, *(_wrapped(part) for paragraph in paragraphs for part in _ITEMS.split(paragraph))]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return table.wrapped(" ".join(text.replace("``", "`").split()), indent="  ")
