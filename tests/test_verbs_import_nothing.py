"""No public verb imports a module of ours: another verb may be called from a signal handler in the midst of that import."""

from __future__ import annotations

import json
import os

import pytest

import patches

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

VERBS = {
    "apply": "patches.apply()",
    "applied": "patches.applied(strict=False).__enter__()",
    "report": "str(patches.report())",
    "revert": "patches.revert()",
    "verify": "patches.verify()",
    "inspect": "patches.inspect(torch.nn.Linear(2, 2))",
    "check_ranks": "patches.check_ranks(None)",
    "compile_options": "patches.compile_options({'shape_padding': False})",
    "quantize_experts": "patches.quantize_experts()",
}
SOURCE = """
    import contextlib, json, os, sys
    {first}
    import torch, bitsandbytes
    import patches

    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("bnb_patches", "patches"):
                seen.append(name)

    for verb, call in json.loads(sys.argv[1]).items():
        sys.stdout.flush()
        child = os.fork()  # each verb begins in a process in which none was called
        if child == 0:
            seen = []
            sys.meta_path.insert(0, Watch())
            if verb == "verify":  # it starts processes: here that they cannot be had is enough
                sys.executable = ""
            with contextlib.suppress(Exception):
                exec(call)
            print(json.dumps([verb, seen]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


def test_these_are_the_verbs():
    assert set(VERBS) == {name for name in patches.__all__ if name.islower()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each verb is called in a fork of one process")
@pytest.mark.parametrize("first", ["", "import patches"], ids=["bitsandbytes first", "patches first"])
def test_they_import_nothing_of_ours(first, fresh):
    said = fresh(SOURCE.format(first=first), json.dumps(VERBS), PATCHES_DISABLE="offload")
    seen = dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))
    assert seen == dict.fromkeys(VERBS, [])


def test_a_verb_from_within_the_first_apply_of_the_process(fresh):
    """As a signal handler may call it: at each line that the first ``apply`` runs in the file of settings."""
    source = """
        import sys
        import bitsandbytes
        import patches

        calls = []

        def handler(frame, event, argument):
            file = frame.f_code.co_filename
            if event == "line" and file.endswith("autoload.py") and len(calls) < 40:
                sys.settrace(None)
                calls.append(patches.apply("peft-dora-cache"))
                sys.settrace(handler)
            return handler

        sys.settrace(handler)
        patches.apply()
        sys.settrace(None)
        assert calls, "nothing was called meanwhile"
        print("held")
    """
    assert fresh(source).split() == ["held"]
