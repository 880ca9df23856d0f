"""The texts of a patch as Markdown."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Mapping

from patches import REGISTRY, Patch

_CODE = re.compile(r"(``.+?``)", re.DOTALL)
_URL = re.compile(r"(?<![(<])https://[^\s),]+")
_NUMBER = re.compile(r"(?:\b\w+ )?#(\d+)\b")


def title(patch: Patch) -> str:
    """The docstring of its file: the defect in one sentence."""
    return markdown(inspect.getdoc(sys.modules[patch.module]) or "", patch)


def file(patch: Patch) -> str:
    """The path of its file from the root of the repository."""
    return patch.module.removeprefix("bnb_").replace(".", "/") + ".py"  # it lies below `patches`


def markdown(text: str, patch: Patch) -> str:
    """``text``; names of other patches are links to their pages."""
    numbers = {number: url for url in patch.links if (number := url.rpartition("/")[2]).isdecimal()}
    parts = _CODE.split(text)
    parts[::2] = [_prose(part, numbers) for part in parts[::2]]
    parts[1::2] = [_code(part.strip("`"), patch) for part in parts[1::2]]
    return "".join(parts).strip()


def _prose(text: str, numbers: Mapping[str, str]) -> str:
    text = re.sub(r"([<_*\[\]])", r"\\\1", text)
    text = re.sub(r"^\\\* ", "* ", text, flags=re.MULTILINE)  # a list
    text = _URL.sub(lambda found: f"<{found[0].replace(chr(92), '')}>", text)
    return _NUMBER.sub(lambda found: f"[{found[0]}]({numbers[found[1]]})" if found[1] in numbers else found[0], text)


def _code(name: str, patch: Patch) -> str:
    """Code; the id of a patch, or the file beside this one that holds it, leads to its page."""
    known = name if name in REGISTRY.patches else _files(patch.package).get(name)
    return f"[`{known}`]({known}.md)" if known else f"`` {name} ``" if "`" in name else f"`{name}`"


@functools.cache
def _files(package: str) -> dict[str, str]:
    """The patches of ``package`` by the names of their files."""
    return {file(patch).rpartition("/")[2]: patch.id for patch in REGISTRY.patches.values() if patch.package == package}
