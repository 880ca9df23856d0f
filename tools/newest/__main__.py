"""``make newest``: say which patch no longer holds on the installed releases, and raise `tested_up_to` of those that do.

``python -m tools.newest [--dry-run] [ID ...]``, all patches by default. Of a package that is newer than what a patch was
tested on it shows each definition that has changed and that a patch rests on. Then it runs every reproducer, with patches
applied on releases that they were not tested on: what a newer torch, or another neighbour, does to a patch shows only
then. Where a patch holds, its file says so from then on, as does the table of sources. Exits with 1 if there is
work left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from patches import REGISTRY
from patches.adoption import trial
from patches.engine import gate
from patches.engine.ids import patch_id_of
from patches.engine.patch import Part
from patches.engine.report import Status
from patches.process_registry import NEWER_RELEASES
from patches.verification import Row, verify_by
from tools.newest import advice, changes, raising
from tools.sources.wheel_files import ROOT, WheelFiles

LEFT = "Left to do: read what has changed above, run `make readme`, `make test` and `make check`, and add a line to CHANGELOG.md."


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.newest")
    parser.add_argument("--dry-run", action="store_true", help="change no file")
    parser.add_argument("ids", nargs="*", metavar="ID", help="patches; all by default")
    options = parser.parse_args(arguments)
    if not REGISTRY.patches:
        print("no patch is registered: is this the repository of bnb-patches?", file=sys.stderr)
        return 2
    parts = {part.key: part for patch in REGISTRY.ids.choose(options.ids) for part in patch.parts}
    newer = {key: part for key, part in parts.items() if is_newer(part)}
    changed = show_changes(list(newer.values()))
    rows = verified(options.ids, newer)
    to_do = show_advice(rows, parts, newer)
    holding = [row.name for row in rows if raises(newer.get(row.name)) and advice.holds(row)]
    left = raise_those(holding, changed, newer, options.dry_run) if holding else 0
    print(advice.summary(rows, to_do + left))
    return 1 if to_do or left else 0


def is_newer(part: Part) -> bool:
    """Whether a package that the part edits is newer than any that was tested, or has a version that cannot be read."""
    found = REGISTRY.verdict(part)  # of the others that are for these releases there is nothing to say
    return found.status in (Status.AVAILABLE, Status.UNTESTED) and bool(found.reason)


def raises(part: Part | None) -> bool:
    """Whether the package that the part repairs is newer, not only one beside it: `tested_up_to` is of the former."""
    return part is not None and part.package in changes.newer(part)


def show_changes(newer: Sequence[Part]) -> set[str]:
    """Print each definition that has changed; return the keys of the parts that rest on one or cannot be compared."""
    found, unknown = changes.changes(newer, NEWER_RELEASES.sources)
    for change in found:
        print(changes.describe(change, source), end="\n\n")
    for why, keys in unknown.items():
        print(f"not compared with a tested release ({why}):\n  patches: {', '.join(keys)}", end="\n\n")
    sys.stdout.flush()
    return {key for change in found for key in change.rests_on_it}.union(*unknown.values())


def source(package: str, release: str, module: str) -> str | None:
    """Return the source of a module in a release of its package."""
    return WheelFiles(package, release).text(module)


def verified(ids: Sequence[str], newer: Collection[str]) -> tuple[Row, ...]:
    """Verify patches with the parts ``newer`` applied whatever they were tested on."""
    NEWER_RELEASES.on_trial = frozenset(newer)
    return verify_by(trial.REPRODUCER, (trial.SEPARATOR.join(newer),), ids, None, sys.stderr.isatty()).rows


def show_advice(rows: Sequence[Row], parts: Mapping[str, Part], newer: Collection[str]) -> int:
    """Print what to do about each part that does not hold; return how many there are."""
    count = 0
    for row in rows:
        part = parts[row.name]
        if said := advice.advice(row, part, newer=row.name in newer):
            count += 1
            print(advice.describe(row, part, said), end="\n\n")
    return count


def raise_those(holding: Sequence[str], changed: Collection[str], parts: Mapping[str, Part], dry_run: bool) -> int:
    """Raise `tested_up_to` of the parts that hold, and write the table of sources; return how much is left to do."""
    raised = raising.raise_all(REGISTRY.patches.values(), holding, ROOT, dry_run)
    done = [key for keys in raised.files.values() for key in keys]
    releases = sorted({f"{parts[key].package} {gate.installed_version(parts[key].package)}" for key in holding})
    on_changed = [key for key in holding if key in changed]
    print(f"{len(holding)} hold on {', '.join(releases)}: {len(holding) - len(on_changed)} on unchanged source")
    if on_changed:
        print("\n  ".join([f"{len(on_changed)} on source that has changed, or that was not compared:", *on_changed]))
    print(f"{'Would raise' if dry_run else 'Raised'} `tested_up_to` of {len(done)} in {len(raised.files)} files")
    for key, why in raised.refused.items():
        print(f"  not of {key}: {why}.\n    {advice.FITS.format(id=patch_id_of(key))}")
    if not done:
        print()
        return len(raised.refused)
    if dry_run:
        print()
        return len(holding)
    failed = write_sources()
    print(failed or "Wrote patches/newer_releases/sources.json")
    print(LEFT, end="\n\n")
    return len(raised.refused) + bool(failed)


def write_sources() -> str:
    """Write the table of sources in a process that reads the changed files; return why that failed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tools.sources"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True)
    if not done.returncode:
        return ""
    why = "\n".join(done.stderr.strip().splitlines()[-1:])
    return f"patches/newer_releases/sources.json is as it was ({why}): run `make sources`."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
