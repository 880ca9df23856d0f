"""What a patch is. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import requirement

if TYPE_CHECKING:
    from .edits import Edit


@dataclass(frozen=True)
class Finding:
    """The answer of a reproducer: is the defect there, and by how much.

    ``figure`` is what was measured, in words with a unit ("relative error 1.42",
    "8 of 12 gradients missing"), for the table that ``python -m patches verify`` prints.
    """

    present: bool
    figure: str = ""

    def __bool__(self) -> bool:
        return self.present


class CannotShow(Exception):
    """Raised by a ``defect()`` that this host cannot run, with the reason in words.

    For what a user's program cannot reach here (a processor without AVX512-BF16, say);
    never for a reproducer that is merely inconvenient.
    """


class Message(NamedTuple):
    """A message that a user sees without the patch."""

    text: str
    where: str
    """The file of an installed package that says it, or "figure": the reproducer says it."""
    parts: tuple[str, ...] = ()
    """The parts of it that are the same for everyone; the whole text if there are none."""
    holds: tuple[str, ...] = ()
    """Strings that the file ``where`` holds; the parts if there are none."""


class Feature(NamedTuple):
    """Edits that repair nothing: they are in while someone uses them. See ``Registry.hold``."""

    id: str
    summary: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Part:
    """One place where the defect of a patch shows: gated, applied and verified by itself.

    It has the fields of :class:`Patch`. ``name`` says in few words which place it is; it is empty where there is one.
    """

    name: str
    requires: tuple[str, ...]
    tested_up_to: str
    edits: tuple[Edit, ...]
    defect: Callable[[], Finding]
    damage: Callable[[], tuple[str, ...]] | None = None
    key: str = ""
    """The id of the patch and the name; the patch fills it in."""
    neighbours: tuple[str, ...] = field(init=False, compare=False, default=())
    """Other packages in which it has edits, as their modules are named."""

    def __post_init__(self) -> None:
        """Note the neighbours: the gate asks for them at every import."""
        own = self.package.replace("-", "_")
        named = {edit.target.partition(":")[0].partition(".")[0] for edit in self.edits}
        vars(self)["neighbours"] = tuple(sorted(named - {own}))

    @property
    def package(self) -> str:
        """Name of the distribution that is repaired, the first of ``requires``."""
        return requirement.parse(self.requires[0]).name

    @property
    def parts(self) -> tuple[Part, ...]:
        """Itself: functions that take a patch take a part as well."""
        return (self,)

    def damaged(self) -> tuple[str, ...]:
        """Call :attr:`damage`, if there is one; return what it says, or that it failed, which must not keep a patch out."""
        try:
            return () if self.damage is None else tuple(self.damage())
        except Exception as error:
            return (f"looking for what was damaged before failed: {type(error).__name__}: {error}",)


def _no_defect() -> Finding:
    raise CannotShow("the parts of the patch have a reproducer each")


@dataclass(frozen=True)
class Patch:
    """One defect: who has it, what repairs it, and how to see it.

    Parameters
    ----------
    id:
        Unique, lower case, words joined by hyphens, beginning with the repaired package.
    summary:
        One line, what goes wrong for the user without it.
    links:
        Upstream issues and pull requests.
    requires:
        Requirements (:mod:`patches.engine.requirement`) that must all hold for the defect to be
        there. The first names the package that is repaired.
    tested_up_to:
        The newest release of that package on which the defect was shown and repaired.
    edits:
        The changes, see :mod:`patches.engine.edits`. An edit with ``when`` is for the releases
        that it names.
    defect:
        Runs the smallest program of a user that may go wrong, offline, on a CPU, in about a second, and says whether
        the defect is there. Raises :class:`CannotShow` where the host cannot run it.
    parts:
        If one cause has several places, in other libraries or in modules that are imported on their own: a
        :class:`Part` for each place, instead of the fields ``requires``, ``tested_up_to``, ``edits`` and ``defect``.
    why:
        What is wrong in the source, which users have the defect, on which releases, and the report upstream. Paragraphs
        whose indentation is removed, as in the next two fields.
    repair:
        What the patch does, why that is right, and what stays as it was.
    cost:
        What it costs a program, measured; empty if it was not measured alone.
    groups:
        Names of its groups in :data:`patches.symptoms.GROUPS`; it is listed in the first.
    silent:
        Whether there are cases without any message.
    messages:
        The messages that a user sees without the patch, word for word.
    words:
        Entries of :data:`patches.symptoms.WORDS` by which it is found.
    effect:
        "repairs"; "warns" if the patch only warns or raises an error; "feature" if it is only for what a function of
        the plugin makes, such as quantized experts.
    former_ids:
        Ids that earlier releases had for this patch, or for patches that were merged into it. Each is still accepted.
    damage:
        Returns sentences that name objects of this process which the defect had already damaged when the patch was
        applied. Runs once, right after the patch is applied; changes nothing.
    """

    id: str
    summary: str
    links: tuple[str, ...]
    requires: tuple[str, ...] = ()
    tested_up_to: str = ""
    edits: tuple[Edit, ...] = ()
    defect: Callable[[], Finding] = _no_defect
    parts: tuple[Part, ...] = ()
    why: str = ""
    repair: str = ""
    cost: str = ""
    groups: tuple[str, ...] = ()
    silent: bool = False
    messages: tuple[Message, ...] = ()
    words: tuple[str, ...] = ()
    effect: Literal["repairs", "warns", "feature"] = "repairs"
    former_ids: tuple[str, ...] = ()
    damage: Callable[[], tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        """Give each part its key, and the patch the requirements and edits of its parts."""
        parts = tuple(replace(part, key=f"{self.id}: {part.name}") for part in self.parts if part.name)
        if parts:
            first = parts[0]
            found = (first.requires, first.tested_up_to, tuple(edit for part in parts for edit in part.edits))
            vars(self).update(zip(("requires", "tested_up_to", "edits"), found))
        else:
            own = Part("", self.requires, self.tested_up_to, self.edits, self.defect, self.damage, self.id)
            parts = (own,)
        vars(self)["parts"] = parts

    @property
    def package(self) -> str:
        """Name of the distribution that is repaired, the first of ``requires``; of several parts the first one's."""
        return self.parts[0].package

    def ranges(self) -> list[str]:
        """Return the requirements of each part, with the names of the parts that have them where these differ."""
        found = self.names_of_parts(lambda part: ", ".join(part.requires))
        return list(found) if len(found) == 1 else [f"{text} ({', '.join(names)})" for text, names in found.items()]

    def names_of_parts(self, text: Callable[[Part], str]) -> dict[str, list[str]]:
        """Return each ``text`` of a part, with the names of the parts that have it."""
        found: dict[str, list[str]] = {}
        for part in self.parts:
            found.setdefault(text(part), []).append(part.name)
        return found

    @property
    def module(self) -> str:
        """Name of the module that declares the patch."""
        run: Any = self.parts[0].defect
        return str(getattr(run, "func", run).__module__)
