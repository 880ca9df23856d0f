"""The slice of the matrix: nothing gets worse with the plugin, in fixed trials and in random walks."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from itertools import product

import pytest

from patches.engine import gate
from tests.releases import SHORT, is_newest, of_the_newest

from . import cover, decided, running, trials
from .changes import CHANGES
from .subject import KINDS

OLDER = SHORT[:-1]
PARTS = 2 * len(OLDER)
HERE = gate.installed_version("bitsandbytes")
WALKS = 40 if is_newest() else 15
ASKED = int(os.environ.get("PATCHES_MATRIX_SEED", 0))
SEED = ASKED or int("".join(filter(str.isdigit, version("bitsandbytes"))))
"""Of the walks of every day, the same for a release each day: with another one, who changed nothing could find it red."""
FRESH = ASKED or (int(time.time()) % 1_000_000 if is_newest() else SEED + 1)
"""Of the walks before a release: other ones each time on the newest. An older one does not change, so its walks do not."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="trials run in forks of one process")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    running.prepare()


def daily() -> tuple[trials.Trial, ...]:
    """Every day the older releases run a sixth each of the slice with one layer of each family, the newest the other half.
    Before a release each runs the slice with every layer.
    """
    parts = [OLDER.index(HERE)] if HERE in OLDER else range(len(OLDER), PARTS)
    return tuple(dict.fromkeys(trial for number in parts for trial in trials.share(number, PARTS)))


def told(before: running.Found, after: running.Found) -> str:
    """What is worse and not decided, shrunk where it is a walk, with the patches that do it alone."""
    found = running.worse(before, {trial: after[trial] for trial in before})
    bad = {trial: why for trial, why in found.items() if not decided.reason(trial, why)}
    first = [*bad][:3]
    alone = running.culprits(first, before) if first else {}
    lines = [f"{trial}\n    {why}\n    alone: {', '.join(alone.get(trial, [])) or '?'}" for trial, why in bad.items()]
    lines += [f"shrunk: {running.shrunk(trial)}" for trial in first if len(trial.steps) > 3]
    return "\n".join(lines)


def not_reached(after: running.Found) -> list[tuple[str, str]]:
    """The pairs of which each trial turned out to make no sense."""
    reached = {pair for trial, trace in after.items() if trace is not None for pair in pairs(trial)}
    return sorted({pair for trial in after for pair in pairs(trial)} - reached)


def assert_reached(layers: tuple[str, ...], after: running.Found) -> None:
    covering = {trials.Trial(kind, steps) for kind, steps in cover.cover(layers)}
    missed = not_reached({trial: after[trial] for trial in covering})
    assert not missed, "no trial of these has sense (cover.makes_sense)"


def pairs(trial: trials.Trial) -> set[tuple[str, str]]:
    """Of a trial of :mod:`.cover`: its layer and its change, its change and its readers."""
    _, change, *readers = trial.steps
    return {(trial.kind, change), *((change, reader) for reader in readers)}


def test_nothing_in_the_slice_gets_worse() -> None:
    before, after = running.judged(daily())
    bad = told(before, after)
    assert not bad, f"worse with the plugin (python -m tests.harm.matrix 'TRIAL' shows one):\n{bad}"


def test_nothing_in_random_walks_gets_worse() -> None:
    walked(SEED, WALKS)


@pytest.mark.release("the slice of every day, with fewer layers, of which each release runs a part")
def test_nothing_in_the_whole_slice_gets_worse() -> None:
    slices = (cover.LAYERS, tuple(KINDS)) if is_newest() else (cover.LAYERS,)
    whole = dict.fromkeys(trial for layers in slices for trial in trials.fixed_slice(layers))
    rest = {*trials.fixed_slice(), *trials.compiling()} - {*daily(), *whole}
    before, after = running.judged([*whole, *sorted(rest, key=str)])
    bad = told(before, after)
    assert not bad, bad
    for layers in slices:
        assert_reached(layers, after)


@pytest.mark.release("a few walks every day, the same each day")
def test_nothing_in_more_walks_gets_worse() -> None:
    walked(FRESH, 3_000)


def walked(seed: int, count: int) -> None:
    print(f"PATCHES_MATRIX_SEED={seed}")
    bad = told(*running.judged(trials.walks(seed, count)))
    assert not bad, f"PATCHES_MATRIX_SEED={seed}: worse with the plugin:\n{bad}"


@of_the_newest
@pytest.mark.parametrize("layers", [tuple(KINDS), cover.LAYERS], ids=["every", "one_of_each_family"])
def test_the_slice_covers_each_change_with_each_layer_and_each_reader(layers: tuple[str, ...]) -> None:
    """But for changes and readers that never go together, such as an optimizer's steps and packed weights."""
    covered = {pair for kind, steps in cover.cover(layers) for pair in pairs(trials.Trial(kind, steps))}
    assert {(kind, change) for kind, change in product(layers, CHANGES) if cover.meant(kind, change)} <= covered
    assert {KINDS[kind].family for kind in layers} == {kind.family for kind in KINDS.values()}
    left = {*product(CHANGES, cover.QUICK)} - covered
    for change, reader in left:
        kinds = [kind for kind in cover.LAYERS if cover.meant(kind, change)]
        assert not any(cover.makes_sense(kind, state, change, reader) for kind, state in product(kinds, cover.DAILY))
    assert len(left) <= 640, "a rule of cover.makes_sense that says too much leaves out what could run"


def test_the_product_is_large_and_holds_what_was_found_once() -> None:
    assert len(trials.product()) >= 10_000
    assert set(trials.named()) <= set(daily())
    parts = [set(trials.share(number, PARTS)) for number in range(PARTS)]
    assert set().union(*parts) == set(trials.fixed_slice(cover.LAYERS))
    for trial in trials.named():
        assert trials.Trial.parse(str(trial)) == trial
        assert trial.kind in KINDS


def test_a_walk_is_told_by_its_seed_and_shrinks() -> None:
    assert trials.walks(5, 20) == trials.walks(5, 20) != trials.walks(6, 20)
    walk = trials.walks(5, 1)[0]
    assert all(len(shorter.steps) <= len(walk.steps) for shorter in trials.shorter(walk))
