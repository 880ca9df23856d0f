"""What every patch must do, over the whole registry and on the releases that are installed.

Each test runs in fresh processes, because what is tested is the state of a process. ``PATCH=ID`` takes one patch in place
of all.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Sequence

import pytest

from patches import REGISTRY
from patches.engine import gate
from patches.engine.edits import Rewrite, module_of
from patches.engine.patch import Patch
from patches.engine.match import check
from patches.verification import PHASES, _NOT_THERE
from tests import processor, releases
from tests.snapshot import SNAPSHOT
from tools.newest import advice

ALL = [REGISTRY.patches[i] for i in os.environ.get("PATCH", "").split()] or list(REGISTRY.patches.values())
HERE = [p for p in ALL if REGISTRY.is_for(p)]
"""Those for the installed releases."""

DAILY = [p.id for p in ALL if releases.is_newest() or any(module_of(e).startswith("bitsandbytes") for e in p.edits)]


@pytest.mark.parametrize("patch", ALL, ids=lambda p: p.id)
def test_declared_well(patch: Patch):
    """The declaration is whole: a reader finds the defect, its source and its range."""
    assert patch.id == patch.id.lower() and patch.id.startswith(patch.package.lower() + "-")
    assert patch.summary and not patch.summary.endswith(".") and "\n" not in patch.summary
    assert all(link.startswith("https://") for link in patch.links)
    assert patch.edits and all(part.tested_up_to for part in patch.parts)
    module = sys.modules[patch.module]
    assert module.PATCH is patch and inspect.getdoc(module) and patch.why and patch.repair
    for edit in patch.edits:
        if isinstance(edit, Rewrite):
            check(edit)
            assert all(name.startswith("_patches_") for name in edit.names)


def test_ids_are_in_the_names_of_their_files():
    """Whoever reads an id in a log finds the file: package and file name, or package, folder and file name."""
    for patch in ALL:
        package, *folder, file = patch.module.split(".")[2:]
        named = {"-".join(parts).replace("_", "-") for parts in ((package, file), (package, *folder, file))}
        assert patch.id in named, (patch.id, named)


def test_importing_patches_imports_none_of_the_packages(fresh):
    heavy = sorted({module_of(e).partition(".")[0] for p in ALL for e in p.edits} | {"torch"})
    out = fresh(f"import sys, patches; patches.report(); print([n for n in {heavy} if n in sys.modules])")
    assert out.strip() == "[]"


VERIFY = """
import sys, patches
from patches import verification as verify
from tests.forks import verifying
verifying.begin()
verify.PHASES = tuple(sys.argv[1].split())
print(patches.verify(*sys.argv[2:], jobs=2).to_json(None))
"""
BUT_REVERTED = PHASES[:-1]


@pytest.fixture(scope="module")
def daily(pytestconfig) -> Sequence[str]:
    """The phases: every day as installed and with all patches, before a release and of what PATCH names with each alone, too.

    Every day the own tests of most patches apply them alone, as does the catalogue of harm.
    """
    return (
        ("unpatched", "all") if releases.is_daily(pytestconfig) and len(ALL) == len(REGISTRY.patches) else BUT_REVERTED
    )


def verified(forked, kind: str, phases: Sequence[str], *ids: str) -> list[dict]:
    """The rows of ``verify`` in a process that runs on the processor ``kind``."""
    if not ids:
        pytest.skip("PATCH names no patch that this is about")
    said = forked(VERIFY, " ".join(phases), *ids, **{processor.VARIABLE: kind})
    rows = json.loads(said.splitlines()[-1])["rows"]
    wrong = [f"{row['id']}: {row['reason']}{advice.forgotten(row)}" for row in rows if row["verdict"] == "wrong"]
    assert not wrong, "\n".join(wrong)
    absent = [said for row in rows for present, said in row["findings"].values() if present is False]
    unsure = [said for said in absent if re.search(r"\bnan\b", said)]
    assert not unsure, "NaN is less than any bound, and shows nothing"
    return rows


@pytest.mark.parametrize(
    "ids, phases",
    [
        pytest.param(DAILY, None, id="daily"),
        pytest.param([p.id for p in ALL], PHASES, id="reverted", marks=pytest.mark.release(
            "test_exactly: after revert every function and attribute is the object that it was; alone: the newest release")),
    ],
)  # fmt: skip
def test_present_absent_present(forked, daily, ids, phases):
    """Unpatched the defect is there, patched it is not; nowhere where it is fixed. Before a release: reverted it is back."""
    rows = verified(forked, "plain", phases or daily, *ids)
    hidden = {row["id"]: row["reason"] for row in rows if row["verdict"] == "cannot show"}
    assert all(hidden.values()), "who cannot show a defect says why"
    assert not [i for i, why in hidden.items() if _NOT_THERE in why], "on this stack every reproducer runs"
    undecided = [row for row in rows if row["verdict"] == "skipped" and row["findings"]]
    unrepaired = [f"{row['id']}: {row['reason']}{advice.forgotten(row)}" for row in undecided]
    assert not unrepaired, "on this stack no patch is left undecided:\n" + "\n".join(unrepaired)
    if len(ALL) < len(REGISTRY.patches) and len(hidden) == len(rows):
        pytest.skip(f"on this pretended processor PATCH names only what cannot show its defect: {hidden}")
    assert [row for row in rows if row["verdict"] == "ok"], "at least one defect can be shown everywhere"


@pytest.mark.parametrize(
    "those",
    ["of 4 bits", pytest.param("others", marks=pytest.mark.release("those whose functions handle 4-bit weights"))],
)
def test_present_absent_present_where_4_bit_weights_are_repacked(forked, daily, those):
    """The same on a processor with AVX512-BF16, for all that is not about INT8 alone."""
    if not gate.satisfied("bitsandbytes>=0.49"):
        pytest.skip("before 0.49 bitsandbytes does not ask the processor")
    ids = [p.id for p in HERE if "bitsandbytes" in str(p.requires) and "int8" not in p.id]
    ids = [i for i in ids if ("4bit" in i or i == "bitsandbytes-cpu-repack") == (those == "of 4 bits")]
    rows = verified(forked, processor.WITH_AVX512BF16, daily, *ids)
    shown = {row["id"] for row in rows if row["verdict"] == "ok"}
    other = [row for row in rows if row["verdict"] not in ("ok", "cannot show") or row["id"] not in shown]
    assert not other, "each of them shows its defect there too, in a part that this stack can run"


# What is done to a process that has imported every target, by what is asked: what is out again leaves no trace. Each
# but the last, whose wrappers stay, puts all back, so that one process does them in turn.
EXACTLY = {
    "all applied together, twice, and reverted": """
report = patches.apply()
states = {r.id: (str(r.status), r.reason) for r in report if r.id in {p.id for p in here}}
assert all(s == "applied" for s, _ in states.values()), states
assert all(r.changes and all(c.diff for c in r.changes) for r in report.with_status(Status.APPLIED))
first, _keep1 = snapshot()
assert len(changed(before, first)) >= len(here)
patches.apply()
second, _keep2 = snapshot()
assert changed(first, second) == []
del _keep1, _keep2  # who keeps code of ours has a use for its names
gc.collect()  # what an error in a lazy module left of snapshot() keeps it too, until then
patches.revert()
after, _keep3 = snapshot()
assert changed(before, after) == [], changed(before, after)
assert not REGISTRY._store.read().slots
assert len(here) == len(json.loads(sys.argv[2]))
""",
    "each alone applied and reverted": """
for patch in here:  # where it edits, after each; everywhere, after all
    edited = {module_of(e) for e in REGISTRY.edits(patch)}
    one, _keep1 = snapshot(edited)
    with patches.applied(patch.id):
        assert changed(one, snapshot(edited)[0]), patch.id
    after, _keep2 = snapshot(edited)
    assert changed(one, after) == [], (patch.id, changed(one, after))
after, _keep3 = snapshot()
assert changed(before, after) == [], changed(before, after)
""",
    # several patches share functions: each can come or leave first, and the last one puts the original back
    "put in and taken out one by one, in any order, and the rest stays": """
import random
for seed in sys.argv[3:]:
    order = [p.id for p in here]
    random.Random(seed[::-1]).shuffle(order)
    for name in order:
        patches.apply(name, strict=True)
    assert {r.id for r in patches.report().with_status(Status.APPLIED)} == set(order)
    random.Random(seed).shuffle(order)
    for i, name in enumerate(order):
        patches.revert(name)
        left = {r.id for r in patches.report().with_status(Status.APPLIED)}
        assert left == set(order[i + 1:]), (name, set(order[i + 1:]) ^ left)
    after, _keep1 = snapshot()
    assert changed(before, after) == [], changed(before, after)
""",
    # for every rewritten function: an alias taken before, and a third party that wraps the name after
    "names copied before see the rewrite, and a wrapper put on after survives": """
from patches.engine.edits import Rewrite
from patches.engine.targets import holder_of
sites = {e.target: e for p in here for e in REGISTRY.edits(p) if isinstance(e, Rewrite)}
aliases = {t: next(s.held() for s, _ in slots_of(e) if s.key[0] == "code") for t, e in sites.items()}
codes = {t: f.__code__ for t, f in aliases.items()}
patches.apply(strict=True)
assert all(aliases[t].__code__ is not codes[t] for t in sites), "an alias taken before sees the change"
wrappers = {}
for t in [t for t in sites if not t.endswith(".fake")]:  # a shape function has no name to wrap
    owner, name = holder_of(t)
    raw = vars(owner)[name]
    wrappers[t] = staticmethod(lambda *a, **k: None) if isinstance(raw, staticmethod) else (lambda *a, **k: None)
    setattr(owner, name, wrappers[t])
patches.revert()
for t in wrappers:
    owner, name = holder_of(t)
    assert vars(owner)[name] is wrappers[t], "the third party's wrapper is still there"
assert all(aliases[t].__code__ is codes[t] for t in sites), "and what it wrapped is the original again"
""",
}

IN_TURN = """
import json, traceback
load()
here = [p for p in here if p.id in json.loads(sys.argv[2])]
before, _keep = snapshot()
wrong = {}
for name, script in json.loads(sys.argv[1]).items():
    try:
        now, _kept = snapshot()
        assert changed(before, now) == [], "what was done before this left something"
        exec(script, dict(globals()))
    except Exception:
        wrong[name] = traceback.format_exc()
print(json.dumps(wrong))
"""


@pytest.fixture(scope="module")
def wrong(forked, pytestconfig) -> dict[str, str]:
    """What of ``EXACTLY`` failed, and where. To import every target takes longer than all of it.

    On an older bitsandbytes each patch alone is one of those that edit bitsandbytes. Every day patches are taken out in an
    order that each release has of its own, before a release in three.
    """
    ids = [p.id for p in HERE if p.id in DAILY]
    orders = [str(gate.installed_version("bitsandbytes")), *([] if releases.is_daily(pytestconfig) else ["1", "2"])]
    return json.loads(forked(SNAPSHOT + IN_TURN, json.dumps(EXACTLY), json.dumps(ids), *orders).splitlines()[-1])


@pytest.mark.parametrize("what", EXACTLY)
def test_exactly(what, wrong):
    assert what not in wrong, wrong[what]


@pytest.mark.release("the test below, where torch alone is imported before")
def test_applied_before_the_import_it_follows_the_import(fresh):
    """``patches.apply()`` first, then the packages: the same end state as the other way round."""
    fresh(
        SNAPSHOT
        + """
report = patches.apply()
assert {r.status for r in report if r.id in {p.id for p in here}} <= {Status.PENDING}, str(report)
load()
states = {r.id: (str(r.status), r.reason) for r in patches.report() if r.id in {p.id for p in here}}
assert all(s == "applied" for s, _ in states.values()), states
"""
    )


@releases.of_the_newest
def test_applied_where_torch_alone_is_imported_it_imports_nothing_and_follows(fresh):
    """Some edits are in torch, for a defect of another package: they wait for that one too."""
    fresh(
        SNAPSHOT
        + """
import sys, torch
before = set(sys.modules)
patches.apply()
assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in {p.package for p in here}}
load()
states = {r.id: (str(r.status), r.reason) for r in patches.report() if r.id in {p.id for p in here}}
assert all(s == "applied" for s, _ in states.values()), states
"""
    )


def test_the_entry_point_repairs_and_can_be_switched_off(forked):
    """What a user gets by installing: the shim, called from inside the import of bitsandbytes."""
    probe = """
import importlib.metadata as m, sys
real = m.entry_points
class Point:
    name = "bnb_patches"
    def load(self):
        import bnb_patches_autoload
        return bnb_patches_autoload.start
m.entry_points = lambda *a, **k: [Point()] if k.get("group") == "bitsandbytes.backends" else real(*a, **k)
import bitsandbytes, importlib, patches
for name in sys.argv[1:]:  # what import bitsandbytes leaves out: parametrize
    importlib.import_module(name)
print([r.id for r in patches.report().with_status(patches.Status.APPLIED)])
"""
    ours = [p.id for p in HERE if all(module_of(e).startswith("bitsandbytes") for e in REGISTRY.edits(p))]
    probe = functools.partial(forked, probe, *{module_of(e) for p in HERE if p.id in ours for e in REGISTRY.edits(p)})
    on = probe(PATCHES_AUTOLOAD="1")
    assert set(ours) <= set(eval(on.splitlines()[-1]))
    assert eval(probe(PATCHES_AUTOLOAD="0").splitlines()[-1]) == []
    first = (ours or [ALL[0].id])[0]
    left = eval(probe(PATCHES_AUTOLOAD="1", PATCHES_DISABLE=first).splitlines()[-1])
    assert first not in left and set(ours) - {first} <= set(left)
