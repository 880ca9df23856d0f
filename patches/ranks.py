"""Compare the packages and the patches of all ranks of a distributed run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .engine import gate
from .engine.report import Report
from .process_registry import REGISTRY

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RankFacts = Mapping[str, str]
"""The version of each package and the status of each patch in one rank."""


class RanksDiffer(RuntimeError):
    """Ranks of one run have different packages or patch states; the message says which has what."""


def check_ranks(group: ProcessGroup | None = None) -> Report:
    """Compare package versions and patch states of all ranks; call it before training starts.

    A collective operation, over any backend: every rank of ``group`` must call it. Call it after the imports of the
    training script, so that no patch is still waiting for one. A process on its own (``WORLD_SIZE`` unset or 1) has
    nothing to compare with and passes.

    Parameters
    ----------
    group:
        The ``torch.distributed.ProcessGroup`` to compare; by default all ranks.

    Returns
    -------
    Report
        The state of this rank, and of every rank.

    Raises
    ------
    RanksDiffer
        On every rank, with the same message: what differs, and which ranks have what.
    RuntimeError
        The process was launched as one of several, but ``torch.distributed`` is not initialised.
    """
    report = REGISTRY.report()
    gathered = _gather((platform.node(), _facts(report)), group)
    if differences := compare_ranks([facts for _, facts in gathered]):
        hosts = [host for host, _ in gathered]
        where = f" ({', '.join(f'{r}: {h}' for r, h in enumerate(hosts))})" if len(set(hosts)) > 1 else ""
        found = "\n  ".join([f"the {len(gathered)} ranks{where} do not run the same code:", *differences])
        raise RanksDiffer(
            f"{found}\nInstall the same packages everywhere and set the same PATCHES_* variables, then start again."
        )
    return report


def compare_ranks(ranks: Sequence[RankFacts]) -> list[str]:
    """Return a line for each difference: the package or patch, and the ranks that have each value."""
    lines: dict[tuple[tuple[str, tuple[int, ...]], ...], list[str]] = {}
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            values.setdefault(facts.get(name, "unknown"), []).append(rank)
        if len(values) > 1:
            key = tuple((value, tuple(having)) for value, having in values.items())
            lines.setdefault(key, []).append(name)
    return [f"{', '.join(names)}: {'; '.join(_on(*part) for part in parts)}" for parts, names in lines.items()]


def _on(value: str, ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs)
    return f"{value} on rank{'s' if len(ranks) > 1 else ''} {shown}"


def _facts(report: Report) -> dict[str, str]:
    packages = ["torch", *sorted({name for result in report for name in result.versions}), "bnb-patches"]
    facts = {"Python": platform.python_version()}
    facts |= {name: gate.installed_version(name) or "absent" for name in packages}
    return facts | {result.id: str(result.status) for result in report}


def _gather(mine: tuple[str, RankFacts], group: ProcessGroup | None) -> list[tuple[str, RankFacts]]:
    """Return the facts of every rank of ``group``, in the order of ranks."""
    world = os.environ.get("WORLD_SIZE", "1")
    try:
        import torch.distributed as dist
    except ImportError:  # nothing to be distributed with
        return [mine]
    if not (dist.is_available() and dist.is_initialized()):
        if world not in ("", "1"):
            raise RuntimeError(
                f"check_ranks() in one of {world} processes (WORLD_SIZE), but torch.distributed is not "
                "initialised: call it after init_process_group(), Accelerator() or TrainingArguments.device"
            )
        return [mine]
    gathered: list[tuple[str, RankFacts]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
