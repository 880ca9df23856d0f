"""``python -m patches list | report | diff [ID ...] | verify [ID ...]``, each with ``--json``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

from . import REGISTRY, apply
from .engine import gate, table
from .engine.report import Report, Status


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if `verify` or `report` found something wrong, 2 for bad usage."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except KeyError as error:
        print(f"patches: {error.args[0]}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patches", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, text in (
        ("list", _list, "every patch: what it repairs, and for which releases"),
        ("report", _report, "what is applied here and what is not, with the reason"),
        ("diff", _diff, "what is changed, as a unified diff"),
        ("verify", _verify, "run the reproducers in fresh processes: unpatched, patched, reverted"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("ids", nargs="*", metavar="ID", help="patches; all if none is named")
        command.add_argument("--json", action="store_true", help="for machines")
        command.set_defaults(run=run)
        if name == "verify":
            command.add_argument("--jobs", type=int, default=None, help="processes at a time")
    return parser


def _list(options: argparse.Namespace) -> int:
    chosen = [REGISTRY.patches[r.id] for r in REGISTRY.report(*options.ids)]
    if options.json:
        rows = [{"id": p.id, "summary": p.summary, "requires": p.requires, "links": p.links} for p in chosen]
        print(json.dumps(rows, indent=2))
    else:
        lines = [table.Row((p.id,), (p.summary, f"for {', '.join(p.requires)}")) for p in chosen]
        print(table.text(lines, table.total([p.id for p in chosen], ())))
    return 0


def _report(options: argparse.Namespace) -> int:
    report = _everything(options.ids)
    print(report.to_json() if options.json else report)
    return 1 if report.with_status(Status.CONFLICT, Status.FAILED) else 0


def _diff(options: argparse.Namespace) -> int:
    report = _everything(options.ids)
    if options.json:
        print(json.dumps({r.id: [c.diff for c in r.changes] for r in report if r.changes}, indent=2))
    else:
        print(report.diff())
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .features.verify import verify

    result = verify(*options.ids, jobs=options.jobs, progress=sys.stderr.isatty() and not options.json)
    print(result.to_json() if options.json else result)
    return 0 if result.ok else 1


def _everything(ids: Sequence[str]) -> Report:
    """Import what the patches are for, apply them, and report: what a program here would get."""
    os.environ.setdefault("PATCHES_AUTOLOAD", "0")  # one way of applying is enough
    logging.getLogger("bnb_patches").addHandler(logging.StreamHandler())
    for result in REGISTRY.report(*ids):
        patch = REGISTRY.patches[result.id]
        if gate.check(patch).status is Status.AVAILABLE:
            REGISTRY.import_targets(patch)
    return apply(*ids)


if __name__ == "__main__":
    sys.exit(main())
