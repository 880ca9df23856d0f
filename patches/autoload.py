"""The automatic path: what happens when an import calls our entry point.

That is bitsandbytes', or the first of transformers, peft, accelerate, torchao and diffusers after torch. It never raises
into that import, whatever a logging handler does. Logger ``bnb_patches``: at most three INFO lines in a process say how many
defects were repaired, DEBUG lines name the patches; a WARNING for a conflict or a failure (an ERROR with
``PATCHES_STRICT``), for compiled code that could not be forgotten, for patches that are left out because a release is newer
than any that they were tested on, and where another distribution has replaced a file of ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from . import second_name
from .engine import gate, imports
from .engine.ids import unknown
from .engine.plan import NOT_FORGOTTEN
from .engine.registry import Registry
from .engine.report import Report, Result, Status
from .process_registry import NEWER_RELEASES, REGISTRY
from .symptoms import FORMER_GROUPS, GROUPS

log = logging.getLogger("bnb_patches")

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """The settings that the environment asks for. A value that means nothing is a warning, and the default holds."""

    autoload: bool = True
    """``PATCHES_AUTOLOAD``: repair a library when it is imported."""
    strict: bool = False
    """``PATCHES_STRICT``: ``patches.apply()`` raises on a conflict; the automatic path logs an error."""
    untested: bool = False
    """``PATCHES_UNTESTED``: also try releases newer than any that a patch was tested on."""
    disabled: frozenset[str] = frozenset()
    """``PATCHES_DISABLE``: ids and groups (as ``python -m patches list`` shows them), by commas, that are left alone."""

    @classmethod
    def read(
        cls,
        known: Iterable[str],
        environ: Mapping[str, str] | None = None,
        find: Callable[[str], str | None] = lambda _: None,
    ) -> Settings:
        """Read the variables; ``find`` gives the present id for one that a patch had before."""
        environ = os.environ if environ is None else environ
        known = list(known)
        disabled = {name.strip() for name in environ.get("PATCHES_DISABLE", "").split(",")} - {""}
        for name in sorted(disabled - set(known)):
            group = FORMER_GROUPS.get(name, name)
            if own := {patch.id for patch in REGISTRY.patches.values() if patch.groups[0] == group}:
                if group != name:
                    REGISTRY.note(f"the group {name} is called {group} now; both names are accepted")
                disabled |= own
            elif present := find(name):
                disabled.add(present)
            else:
                _log(logging.WARNING, "PATCHES_DISABLE: %s", unknown(name, [*known, *GROUPS], "patch or group"))
        return cls(
            autoload=_flag(environ, "PATCHES_AUTOLOAD", cls.autoload),
            strict=_flag(environ, "PATCHES_STRICT", cls.strict),
            untested=_flag(environ, "PATCHES_UNTESTED", cls.untested),
            disabled=frozenset(disabled & set(known)),
        )


def read_settings(registry: Registry = REGISTRY) -> Settings:
    """Read the environment for the patches of ``registry``, which it may name by a former id."""
    return Settings.read(registry.patches, find=registry.ids.find)


def start() -> None:
    """Apply every patch that fits, now or when its package is imported."""
    settings = read_settings()
    if whose := second_name.describe_replaced_package():
        REGISTRY.note(whose)
        _log(logging.WARNING, "%s", whose)
    started = REGISTRY.on_change is not None  # by an earlier import: what was reverted since stays so
    if not settings.autoload:
        if started:
            _leave_alone_what_is_not_imported_yet()
        return
    REGISTRY.disabled = settings.disabled
    if started:
        return
    if old := gate.too_old(REGISTRY.limits.oldest_supported):
        _log(logging.WARNING, "%s; nothing is changed", old)
    REGISTRY.on_change = lambda report: _tell(report, settings)
    REGISTRY.follow_imports(untested=settings.untested)


def _leave_alone_what_is_not_imported_yet() -> None:
    if pending := REGISTRY.report().with_status(Status.PENDING):
        REGISTRY.revert(*(result.id for result in pending))


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in _YES or value in _NO:
        return value in _YES
    if value:
        allowed = ", ".join((*_YES, *_NO))
        text = f"{name}={environ[name]!r} is not valid; expected one of {allowed}. Using {default:d}."
        _log(logging.WARNING, "%s", text)
    return default


_uncounted: list[Result] = []
"""Applied, and in no INFO line yet."""
_counted: set[str] = set()
"""Ids of patches that are in a line, or will be: their other parts may follow."""
_left_out: dict[str, set[str]] = {}
"""By package and version the ids of patches that are left out there as untested; in no line yet."""
_problems: list[str] = []
"""Said already."""
_info_lines: list[str] = []
_MAX_LINES = 3
_MAX_WIDTH = 200


def _tell(report: Report, settings: Settings) -> None:
    if done := report.with_status(Status.APPLIED):
        _log(logging.DEBUG, "applied: %s", ", ".join(dict.fromkeys(result.id for result in done)))
        _uncounted.extend(result for result in done if result.id not in _counted)
        _counted.update(result.id for result in done)
        imports.after_outermost(_tell_how_many)
    if untested := report.with_status(Status.UNTESTED):
        for result in untested:
            _left_out.setdefault(_newer_release(result), set()).add(result.id)
        imports.after_outermost(_tell_what_is_left_out)
    for result in report.with_status(Status.CONFLICT, Status.FAILED):
        level = logging.ERROR if settings.strict else logging.WARNING
        _log(level, "%s: %s: %s", result.id, result.status, result.reason)
    if NOT_FORGOTTEN in report.notes:
        _log(logging.WARNING, "%s", NOT_FORGOTTEN)


def _tell_how_many() -> None:
    """Log one line when the import that a program has asked for is over; nothing once there are enough lines."""
    fresh: dict[str, Result] = {}
    while _uncounted:
        result = _uncounted.pop(0)
        fresh[result.id] = result
    counted = Counter(map(_label, fresh.values()))
    if not counted or len(_info_lines) >= _MAX_LINES:
        return
    more = "; later ones are logged at DEBUG" if len(_info_lines) == _MAX_LINES - 1 else ""
    end = f"{more}. All: python -m bnb_patches report"
    (package, number), *others = counted.most_common()
    line = f"repaired {_defects(number)} of {package}" + "".join(f", {n} of {p}" for p, n in others) + end
    if len(line) > _MAX_WIDTH:
        line = f"repaired {_defects(sum(counted.values()))} of {len(counted)} packages{end}"
    _info_lines.append(line)
    _log(logging.INFO, "%s", line)


def _tell_what_is_left_out() -> None:
    """Log one line about the untested releases that a program has just imported."""
    fresh = {package: len(ids) for package, ids in _left_out.items()}
    _left_out.clear()
    if not fresh:
        return
    first, *others = fresh.items()
    counts = ", ".join(
        [f"{_patches(first[1])} of {first[0]}", *(f"{number} of {package}" for package, number in others)]
    )
    what = "not applied, because the source that they rest on has changed in this release"
    _log(logging.WARNING, "%s: %s. To verify them on this machine: python -m patches adopt", what, counts)
    if NEWER_RELEASES.problem and NEWER_RELEASES.problem not in _problems:
        _problems.append(NEWER_RELEASES.problem)
        _log(logging.WARNING, "%s", NEWER_RELEASES.problem)


def _newer_release(result: Result) -> str:
    """Return the package and release for which a patch is left out: one that it edits, not always the one that it repairs."""
    found = re.match(r"(\S+) ([^\s+]+)\S* is newer than ", result.reason)
    return f"{found[1]} {found[2]}" if found else _label(result)


def _patches(number: int) -> str:
    return "1 patch" if number == 1 else f"{number} patches"


def _label(result: Result) -> str:
    package, version = next(iter(result.versions.items()))
    return f"{package} {str(version).partition('+')[0]}"


def _defects(number: int) -> str:
    return "1 defect" if number == 1 else f"{number} defects"


def _log(level: int, message: str, *arguments: object) -> None:
    with contextlib.suppress(Exception):  # what a handler or a filter raises has no place in an import
        log.log(level, message, *arguments)
