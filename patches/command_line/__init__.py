"""``python -m patches list | report | diff | verify | adopt | explain``, each with ``--json``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from .. import adoption, autoload, verification
from ..engine import gate
from ..engine.report import Report, Status
from ..newer_releases import adopted
from ..process_registry import REGISTRY
from ..verification.processes import NoInterpreter
from . import colour, explain, glance, notice, reports, streams

_LIVE = (
    "import the packages and apply the patches in this process; without --live, the files of the packages are read. "
    "Only --live shows packages whose import raises an error, and functions that another program replaces"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 if `verify` or `report` found something wrong, 2 for bad usage."""
    options = _parser().parse_args(argv)
    text, code = _answer(options)
    sys.stdout.write(text)
    _show_held_back(options)
    return code


def command() -> int:
    """Run :func:`main` in a process of its own: its streams may be closed, cut off or full, and it may be stopped.

    More exit codes: 2 if the answer cannot be written, 130 after Ctrl-C, 143 after SIGTERM. Where its reader has
    gone (``| head``) the code is the answer's.
    """
    streams.fill()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as the shell has it for what runs in the background
            signal.signal(number, _stop)
    try:
        helped = io.StringIO()
        try:
            with contextlib.redirect_stdout(helped):
                options = _parser().parse_args()
        except SystemExit as left:  # with a complaint, or after --help
            streams.write(sys.stdout, helped.getvalue())
            return int(left.code or 0)
        with streams.reserve_output() as out:
            text, code = _answer(options)
            if not options.json and colour.wanted(out):
                text = colour.painted(text, options.command)
            try:
                streams.write(out, text)
            except OSError as error:
                _complain(f"cannot write: {error.strerror}")
                return 2
            _show_held_back(options)
            return code
    except _Stopped as stopped:
        _complain(stopped.name)
        return stopped.code


class _Stopped(KeyboardInterrupt):
    """A signal asks us to end; libraries let it pass as they do Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.name = "interrupted" if number == signal.SIGINT else "terminated"
        self.code = 128 + number


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, lambda *_: os._exit(128 + number))  # a second signal ends the process at once
    raise _Stopped(number)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        streams.write(sys.stderr, f"patches: {text}\n")


class _Parser(argparse.ArgumentParser):
    """Answers bad usage in one line."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message}; see {self.prog} --help")
        raise SystemExit(2)


def _show_held_back(options: argparse.Namespace) -> None:
    """Show what the packages printed at their import, if something went wrong there."""
    if options.held_back:
        _complain(f"while the packages were imported, this was printed:\n{options.held_back.rstrip()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m patches", description="Show what the plugin repairs and what it changes here, and check it."
    )
    version = gate.recorded_version("bnb-patches") or "unknown"
    parser.add_argument(
        "--version", action="version", version=f"bnb-patches {version}", help="print the version of the plugin"
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, run, text in (
        ("list", _list, "every patch: what it repairs, and for which releases"),
        ("report", _report, "which patches are applied here, which are not, and why"),
        ("diff", _diff, "the changed code, as a unified diff"),
        (
            "verify",
            _verify,
            "run each reproducer in fresh processes: without the patch, with it, with all patches, after revert",
        ),
        (
            "adopt",
            _adopt,
            "verify on this machine the patches that are not applied on a newer release, and apply those that hold",
        ),
        ("explain", _explain, "explain one patch, or find the patches for an error message in quotes"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        if name == "explain":
            command.add_argument(
                "text", nargs="+", metavar="ID or message", help="the id of a patch, or an error message"
            )
        else:
            command.add_argument("ids", nargs="*", metavar="ID", help="ids of patches; all patches if none is named")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run, held_back="")
        if name == "report":
            command.add_argument("--all", action="store_true", help="one line for each patch")
            command.add_argument("--live", action="store_true", help=_LIVE)
        if name == "adopt":
            command.add_argument(
                "--forget",
                action="store_true",
                help="forget the results of earlier runs, of all patches or of the named ones",
            )
        if name in ("verify", "adopt"):
            command.add_argument(
                "--jobs",
                type=_count,
                help="how many processes at a time; by default one for each processor, at most four",
            )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text}")
    return int(text)


def _answer(options: argparse.Namespace) -> tuple[str, int]:
    """Return the text to print and the exit code."""
    try:
        REGISTRY.ids.choose(getattr(options, "ids", ()))
    except KeyError as error:
        _complain(error.args[0])
        return "", 2
    text, code = options.run(options)
    return text and f"{text}\n", code


def _list(options: argparse.Namespace) -> tuple[str, int]:
    chosen = REGISTRY.ids.choose(options.ids)
    if options.json:
        rows = [{"id": p.id, "summary": p.summary, "requires": p.requires, "links": p.links} for p in chosen]
        return json.dumps(rows, indent=2), 0
    return glance.patches(chosen, headed=not options.ids), 0


def _report(options: argparse.Namespace) -> tuple[str, int]:
    with notice.after_a_while("reading the installed packages", wanted=not options.live):
        if options.live:
            report, options.held_back = reports.imported(options.ids, automatic=True)
        else:
            report = reports.of_files(options.ids)
        whole = options.all or options.ids
        text = report.to_json() if options.json else str(report) if whole else glance.report(report)
    return text, 1 if report.with_status(Status.CONFLICT, Status.FAILED) else 0


def _diff(options: argparse.Namespace) -> tuple[str, int]:
    report, options.held_back = reports.imported(options.ids)
    for note in report.notes:
        _complain(note)
    if options.json:
        return json.dumps({r.id: [c.diff for c in r.changes] for r in report if r.changes}, indent=2), 0
    for result in report if options.ids else ():
        if not result.changes:
            reason = f": {result.reason}" if result.reason else ""
            _complain(f"{result.id} changes nothing here, because it is {result.status}{reason}")
    return report.diff(), 0


def _verify(options: argparse.Namespace) -> tuple[str, int]:
    doing = "running each reproducer in fresh processes: without its patch, with it, with all patches, after revert"
    return _run_in_processes(verification.verify, options, doing)


def _adopt(options: argparse.Namespace) -> tuple[str, int]:
    if options.forget:
        return _forget(options)
    return _run_in_processes(adoption.adopt, options, "verifying in fresh processes the patches that are not applied")


def _run_in_processes(verb: Callable[..., Any], options: argparse.Namespace, doing: str) -> tuple[str, int]:
    bar = sys.stderr.isatty() and not options.json
    try:
        with notice.after_a_while(doing, wanted=not bar):
            result = verb(*options.ids, jobs=options.jobs, progress=bar)
    except NoInterpreter as error:
        _complain(str(error))
        return "", 2
    return result.to_json() if options.json else str(result), 0 if result.ok else 1


def _forget(options: argparse.Namespace) -> tuple[str, int]:
    try:
        file = adopted.adopted_file()
        number = adopted.forget_entries({patch.id for patch in REGISTRY.ids.choose(options.ids)} if options.ids else ())
    except adopted.Nowhere as error:
        _complain(f"{error}: nothing is remembered; {adopted.VARIABLE} names a file elsewhere")
        return "", 2
    except OSError as error:
        _complain(f"{file} cannot be written: {error.strerror or error}")
        return "", 2
    if options.json:
        return json.dumps({"forgotten": number, "file": str(file)}), 0
    return f"{number} forgotten in {file}", 0


def _explain(options: argparse.Namespace) -> tuple[str, int]:
    text = " ".join(options.text)
    known = REGISTRY.ids.find(text)
    if wrong := None if known else explain.complaint(text, REGISTRY.patches):
        _complain(wrong)
        return "", 2
    found = [known] if known else explain.matching(text, REGISTRY.patches)
    REGISTRY.disabled = autoload.read_settings().disabled
    report = REGISTRY.report(*found) if found else Report(())
    if options.json:
        rows = [{"id": i, **explain.sections(REGISTRY.patches[i], report[i])} for i in found]
        return json.dumps(rows, indent=2), 0 if found else 1
    if not found:
        _complain(
            f"{text[:80]!r} matches no patch and no known message. `patches.inspect(model)` finds what is wrong with a "
            "loaded model; `python -m patches list` shows all patches"
        )
        return "", 1
    if len(found) == 1:
        return explain.page(REGISTRY.patches[found[0]], report[found[0]]), 0
    chosen = [REGISTRY.patches[i] for i in found]
    return f"{glance.patches(chosen, headed=False)}; about one patch: python -m patches explain ID", 0
