"""The slice of the matrix: nothing gets worse with the plugin, in fixed trials and in random walks."""

from __future__ import annotations

import os
import time

import pytest

from . import decided, running, trials
from .changes import CHANGES
from .readers import READERS
from .subject import KINDS

WALKS = 250
SEED = int(os.environ.get("PATCHES_MATRIX_SEED", 0)) or int(time.time()) % 1_000_000

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="trials run in forks of one process")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    running.prepare()


def worse(before: running.Found, after: running.Found) -> dict[trials.Trial, str]:
    """The trials that are worse, less those that are so on purpose."""
    return {trial: why for trial, why in running.worse(before, after).items() if not decided.reason(trial, why)}


def told(bad: dict[trials.Trial, str], before: running.Found) -> list[str]:
    """What is worse and not known to be, shrunk where it is a walk, with the patches that do it alone."""
    bad = {trial: why for trial, why in bad.items() if trial not in trials.still_worse()}
    first = dict(list(bad.items())[:3])
    alone = running.culprits(list(first), before) if first else {}
    lines = [f"{trial}\n    {why}\n    alone: {', '.join(alone.get(trial, [])) or '?'}" for trial, why in bad.items()]
    lines += [f"shrunk: {running.shrunk(trial)}" for trial in first if len(trial.steps) > 3]
    return lines


@pytest.mark.release("two minutes as is and two patched; test_sees.py runs every day, on what was found before")
def test_nothing_in_the_fixed_slice_gets_worse() -> None:
    chosen = trials.fixed_slice()
    before = running.as_is(chosen)
    found = worse(before, running.patched(chosen))
    repaired = set(trials.still_worse()) - found.keys()
    assert not repaired, f"no longer worse: take them off {trials.STILL_WORSE.name}"
    bad = told(found, before)
    assert not bad, "worse with the plugin (python -m tests.harm.matrix 'TRIAL' shows one):\n" + "\n".join(bad)


@pytest.mark.release("a walk may meet what nobody has seen yet; test_sees.py runs every day")
def test_nothing_in_random_walks_gets_worse() -> None:
    print(f"PATCHES_MATRIX_SEED={SEED}")
    chosen = trials.walks(SEED, WALKS)
    before = running.as_is(chosen)
    bad = told(worse(before, running.patched(chosen)), before)
    assert not bad, f"PATCHES_MATRIX_SEED={SEED}: worse with the plugin:\n" + "\n".join(bad)


def test_the_slice_covers_each_change_with_each_layer_and_each_reader() -> None:
    covered = {(trial.kind, step) for trial in trials.fixed_slice() for step in trial.steps[1:-1]}
    read = {(step, trial.steps[-1]) for trial in trials.fixed_slice() for step in trial.steps[1:-1]}
    special = ("forward_tied", "brought_back")  # of the states tied and offloaded
    for change in CHANGES:
        assert {kind for kind in KINDS if trials.meant(kind, change)} <= {k for k, c in covered if c == change}
        quick = {name for name, reader in READERS.items() if not reader.slow and name not in special}
        assert quick <= {reader for c, reader in read if c == change}


def test_the_product_is_large_and_holds_what_was_found_once() -> None:
    assert len(trials.product()) >= 10_000
    assert set(trials.named()) <= set(trials.fixed_slice())
    for trial in trials.named():
        assert trials.Trial.parse(str(trial)) == trial
        assert trial.kind in KINDS


def test_a_walk_is_told_by_its_seed_and_shrinks() -> None:
    assert trials.walks(5, 20) == trials.walks(5, 20) != trials.walks(6, 20)
    walk = trials.walks(5, 1)[0]
    assert all(len(shorter.steps) <= len(walk.steps) for shorter in trials.shorter(walk))
