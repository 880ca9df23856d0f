"""Windows and macOS are users' machines too: nothing that only POSIX has is needed to import, apply and revert."""

from __future__ import annotations

import pytest

HIDE = """
import os, signal, sys

def hide():
    '''Take away what Windows lacks, for whoever imports or looks it up from now on.'''
    for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
        sys.modules[name] = None  # the import of it is an ImportError
    absent = "fork forkpty register_at_fork killpg getpgid setsid getuid sched_getaffinity waitid uname sysconf WNOHANG"
    for name in absent.split():
        vars(os).pop(name, None)
    for name in "SIGKILL SIGALRM SIGHUP SIGCHLD SIGUSR1 setitimer alarm pthread_kill pthread_sigmask".split():
        vars(signal).pop(name, None)
"""


def test_every_module_of_ours_can_be_imported(fresh):
    """Also those of the command line and of `verify`."""
    out = fresh(
        HIDE
        + """
import subprocess  # Python itself on this system needs what Windows has no need of
hide()
import importlib, pkgutil
import bnb_patches_autoload, patches
names = [info.name for info in pkgutil.walk_packages(patches.__path__, "patches.")]
for name in names:
    if not {"operators", "experts"} & set(name.split(".")[:-1]):  # those are the only ones that import torch
        importlib.import_module(name)
bnb_patches_autoload.start()
print(patches.report(), len(names))
""",
        PATCHES_AUTOLOAD="1",
    )
    assert int(out.split()[-1]) > 100


def test_patches_go_in_and_out(forked):
    """The packages are imported before, for on this system they may need what is taken away."""
    pytest.importorskip("bitsandbytes", reason="there is nothing to repair without the stack")
    out = forked(
        HIDE
        + """
import bitsandbytes, peft, transformers
hide()
import patches
before = bitsandbytes.nn.Linear4bit.forward.__code__
report = patches.apply()
assert not report.with_status(patches.Status.CONFLICT, patches.Status.FAILED), report
count = len(report.with_status(patches.Status.APPLIED))
assert bitsandbytes.nn.Linear4bit.forward.__code__ is not before
patches.revert()
assert bitsandbytes.nn.Linear4bit.forward.__code__ is before
print(count)
"""
    )
    assert int(out.split()[-1]) > 20
