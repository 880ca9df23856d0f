"""``python -m tests.harm [WORD ...]``: what programs do, unpatched and with each set of patches.

Those whose id has one of the words in it, or all. ``PATCHES_TEST_PROCESSOR`` says on which processor.
"""

from __future__ import annotations

import os
import sys
import time

from tests import processor

os.environ["PATCHES_AUTOLOAD"] = "0"
os.environ.setdefault("HARM_EVERY_PAIR", "1")
processor.pretend(os.environ.setdefault(processor.VARIABLE, "plain"))


def main(words: list[str]) -> int:
    from .test_catalogue import CASES
    from .verdicts import Verdicts

    chosen = [case for case in CASES if not words or any(word in case.id for word in words)]
    verdicts, bad = Verdicts(chosen), 0
    for case in chosen:
        start = time.process_time()
        judged = verdicts.of(case)
        took = time.process_time() - start
        print(f"{'HARM' if judged.faults else 'ok  '} {case.id}  ({len(judged.reached)} patches, {took:.2f} s)")
        print(f"       unpatched:   {judged.unpatched}")
        print(f"       all patches: {judged.patched['all patches']}")
        for fault in judged.faults:
            print(f"     ! {fault}")
        bad += bool(judged.faults)
    print(f"{len(chosen)} programs, {bad} that the patches harm")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
