"""Whether a patch is applied on a release that is newer than any it was tested on.

It is if all the source that it rests on equals the source in one tested release, or if ``python -m patches adopt`` has
verified it on just this stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from ..engine import gate
from ..engine.ids import patch_id_of
from ..engine.patch import Part
from . import adopted
from .source_table import NOT_COMPARED, Comparison, SourceTable, of_installed

STACK = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
"""An entry is for releases of these packages and of the packages that the patch requires."""


class NewerReleases:
    """Judges parts of patches on untested releases. Reads each file once."""

    def __init__(self, read: Callable[[str, Sequence[str]], Mapping[str, str]]) -> None:
        """Take ``read``, which gives the digests of names in a source file."""
        self.sources = SourceTable(of_installed(read))
        self.on_trial: Collection[str] = ()
        """Keys of parts that are applied here because `adopt` is about to find out whether they hold."""
        self.problem = ""
        """Why the file of adopted patches counts for nothing; empty if it counts."""
        self._judged: dict[tuple[str, str, str], tuple[bool, str]] = {}
        self._entries: list[adopted.Entry] | None = None

    def judge(self, part: Part, package: str, version: str) -> tuple[bool, str]:
        """Tell whether ``part`` is applied where ``version`` of ``package``, which it edits, is installed, and why."""
        if part.key in self.on_trial:
            return True, "tried by `python -m patches adopt`"
        key = (part.key, package, version)
        if key not in self._judged:
            self._judged[key] = self._judgement(part, package, version)
        return self._judged[key]

    def _judgement(self, part: Part, package: str, version: str) -> tuple[bool, str]:
        if package != part.package and not self.sources.edits_any(part, package, version):
            return True, ""
        found = self.sources.compare(part, version, package)
        if found.is_known:
            return True, f"the source is that of {found.release}"
        if day := self._adopted_on(part):
            return True, f"verified here on {day}"
        if found.why == NOT_COMPARED:  # what `adopt` finds could not be remembered
            return False, f"{found.why}; {gate.left_out(part, package, version)[1]}"
        command = f"python -m patches adopt {patch_id_of(part.key)}"
        return False, f"{_difference(found)}; to try it on this machine: {command}"

    def _adopted_on(self, part: Part) -> str:
        """Return the day on which it was verified on just this stack; empty if it was not."""
        mine = [entry for entry in self._read() if entry.patch == part.key and entry.versions == stack_of(part)]
        if not mine:
            return ""
        sources = self._fingerprint(part)
        return max((entry.on for entry in mine if entry.sources == sources), default="")

    def _read(self) -> list[adopted.Entry]:
        if self._entries is None:
            try:
                self._entries = adopted.read_entries(adopted.adopted_file())
            except adopted.Nowhere:
                self._entries = []
            except adopted.Unusable as error:
                self.problem, self._entries = str(error), []
        return self._entries

    def _fingerprint(self, part: Part) -> str:
        """Return the digest of what ``part`` rests on, by its metadata: before the import they are all that is known."""
        packages = (part.package, *part.neighbours)
        return self.sources.fingerprint(part, {name: gate.recorded_version(name) or "" for name in packages})

    def entry(self, part: Part, day: str) -> adopted.Entry | None:
        """Return what to remember of ``part``, which held on ``day``; None where its source cannot be read."""
        sources = self._fingerprint(part)
        return adopted.Entry(part.key, stack_of(part), sources, day) if sources else None

    def report_notes(self) -> tuple[str, ...]:
        """Say in the report that the file of adopted patches counts for nothing, if it does."""
        return (self.problem,) if self.problem else ()


def stack_of(part: Part) -> dict[str, str]:
    """Return the releases that an entry is for: of Python, of this plugin, of the stack and of what ``part`` requires."""
    names = sorted({*STACK, *gate.packages(part), *part.neighbours, "bnb-patches"})
    found = {name: version for name in names if (version := gate.recorded_version(name))}
    return {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", **found}


def _difference(found: Comparison) -> str:
    """Say what differs from the nearest release."""
    if not found.release:
        return found.why
    module, _, name = found.different[0].partition(":")
    more = f", and {len(found.different) - 1} more" if len(found.different) > 1 else ""
    return f"{name} of {module} is not that of {found.release}{more}"
