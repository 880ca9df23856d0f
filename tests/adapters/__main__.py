"""``python -m tests.adapters [WORD ...]``: the product, or the trials with all the words; each difference in a line.

``--unpatched`` runs it without the plugin, ``--known`` prints the differences that are known to stay, too.
"""

from __future__ import annotations

import itertools
import logging
import sys

import torch

import patches
from tests.adapters import judge, options, subject, trials

logging.disable(logging.WARNING)
torch.set_num_threads(1)


def main(arguments: list[str]) -> int:
    words = [word for word in arguments if not word.startswith("--")]
    all_of_them = "--known" in arguments
    if "--unpatched" not in arguments:
        patches.apply()
    cells = itertools.product(subject.DTYPES, (True, False), subject.KINDS, (True, False))
    counted = {"trials": 0, "unlike nn.Linear": 0}
    for dtype, autocast, kind, flagged in cells:
        asked = subject.Asked(kind, dtype, flagged)
        for option in options.options():
            name = trials.name(option, asked, autocast)
            if not all(word in name for word in words):
                continue
            counted["trials"] += 1
            reference = trials.run(option, asked, autocast=autocast, plain=True)
            found = trials.run(option, asked, autocast=autocast, plain=False, adapter=reference.adapter)
            different = judge.differences(asked, found, reference)
            if not all_of_them:
                different = judge.unknown(name, different)
            if different:
                counted["unlike nn.Linear"] += 1
                print(f"{name}: {' | '.join(d[:260].replace(chr(10), ' ') for d in different)}", flush=True)
    print(counted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
