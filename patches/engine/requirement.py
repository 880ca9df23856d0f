"""What a patch or an edit requires: a package, and the releases of it that are meant.

This is a small part of PEP 508: ``name``, then ``>=``, ``<``, ``==`` or ``!=`` and a version, several joined by commas.
packaging has the whole of it, and to import that and read ours takes a sixth of the time that importing this plugin
takes in every program. Versions are read and compared by packaging.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_TEXT = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*?)\s*")
_BOUND = re.compile(r"\s*(>=|<|==|!=)\s*([A-Za-z0-9.!+_-]+)\s*")


class Requirement(NamedTuple):
    """``bounds`` must all hold of the version that is installed."""

    name: str
    specifier: str
    """Its bounds as they were written."""
    bounds: tuple[tuple[str, Version], ...]

    def contains(self, version: str) -> bool:
        """Liberal about builds from before a release: the match of the source decides.

        0.50.0.dev0, and 2.6.0a0 of a container of NVIDIA, may or may not have what came with the release: they are
        taken to lie on both sides of it. A release candidate counts as its release. What follows a "+" does not
        matter. A version that cannot be read meets every bound.
        """
        here = parse_version(version)
        if here is None:
            return True
        base = Version(here.base_version)
        if here.pre and here.pre[0] == "rc" and not here.is_devrelease:
            here = base
        base = base if here.is_prerelease else here
        return all(
            _OPERATORS[sign](here, bound) or (sign != "<" and _OPERATORS[sign](base, bound))
            for sign, bound in self.bounds
        )


def parse_version(version: str) -> Version | None:
    """``version`` without what follows a "+"; None if it is none."""
    try:
        return Version(Version(version).public)
    except InvalidVersion:
        return None


@functools.cache
def parse(text: str) -> Requirement:
    """Read one requirement.

    Raises
    ------
    ValueError
        It is none, or one that asks for more than releases.
    """
    found = _TEXT.fullmatch(text)
    bounds = [_BOUND.fullmatch(bound) for bound in found[2].split(",")] if found and found[2] else []
    try:
        if found and all(bounds):
            return Requirement(found[1], found[2], tuple((b[1], Version(b[2])) for b in bounds if b))
    except InvalidVersion:
        pass
    raise ValueError(f"{text!r} is not a requirement: write a package and bounds, as in 'peft>=0.14,<0.20'; "
                     f"a bound begins with {', '.join(_OPERATORS)}")  # fmt: skip
