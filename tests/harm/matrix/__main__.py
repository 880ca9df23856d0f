"""``python -m tests.harm.matrix``: the whole product and random walks, and who makes what worse."""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("PATCHES_AUTOLOAD", "0")

from collections import Counter  # noqa: E402

from . import decided, running, trials  # noqa: E402
from .judge import ERROR, RIGHT, WRONG, Trace  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harm.matrix", description=__doc__)
    parser.add_argument(
        "--slice", action="store_true", help="each change with each layer and each reader once, as make check"
    )
    parser.add_argument("--walks", type=int, default=2000, help="how many random walks (2000)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of the walks")
    parser.add_argument("--only", default="", help="only trials whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only every n-th trial of the product or slice")
    parser.add_argument("--first", type=int, default=0, help="where --every begins: 0 to N - 1 make the whole (0)")
    parser.add_argument("--alone", action="store_true", help="run what is worse with each patch alone")
    parser.add_argument("--counts", action="store_true", help="print what stays wrong, by step")
    parser.add_argument("trial", nargs="*", help="trials by name, with their traces")
    asked = parser.parse_args()
    chosen = [trials.Trial.parse(name) for name in asked.trial]
    if not chosen:
        whole = (*trials.fixed_slice(), *trials.compiling()) if asked.slice else trials.product()
        some = (*trials.named(), *whole[asked.first :: asked.every])
        chosen = [t for t in (*some, *trials.walks(asked.seed, asked.walks)) if asked.only in str(t)]
    print(f"{len(chosen)} trials, walks of seed {asked.seed}", flush=True)
    running.prepare()
    start = time.time()
    if asked.counts or asked.trial:
        before, after = running.as_is(chosen), running.patched(chosen)
    else:
        before, after = running.judged(chosen)
    print(f"{time.time() - start:.0f} s", flush=True)
    print("patched", dict(Counter(map(_end, after.values()))))
    which = "" if len(before) == len(after) else ", of those that are not right patched"
    print(f"as is{which}", dict(Counter(map(_end, before.values()))))
    if asked.trial:
        for trial in chosen:
            print(
                trial,
                *(f"\n  as is   {o}" for o in before[trial] or ()),
                *(f"\n  patched {o}" for o in after[trial] or ()),
            )
    worse = running.worse(before, after)
    causes = {why.partition("(")[2][-80:] + trial.steps[-1]: trial for trial, why in worse.items()}  # one of each
    alone = running.culprits(list(causes.values()), before) if asked.alone and worse else {}
    for trial, why in sorted(worse.items(), key=lambda item: (item[1], str(item[0]))):
        print(
            f"{'DECIDED' if decided.reason(trial, why) else 'WORSE'} {trial}\n      {why}"
            + (f"\n      alone: {', '.join(alone[trial])}" if trial in alone else "")
        )
    counted = Counter(decided.reason(trial, why) for trial, why in worse.items())
    print(
        f"{counted.pop('', 0)} worse",
        *(f"{number} decided: {because}" for because, number in counted.items()),
        sep="\n",
    )
    if asked.counts:
        wrong = [t for t in before if _end(before[t]) == _end(after[t]) == WRONG]
        for name, number in Counter(step for t in wrong for step in t.steps[1:-1]).most_common():
            print(f"{number:6} stay wrong: {name}")
    return any(not decided.reason(trial, why) for trial, why in worse.items())


def _end(trace: Trace) -> str:
    """What a trial comes to: its error, else the worst that it showed."""
    if not trace:
        return "makes no sense"
    if trace[-1].ended:
        return ERROR
    return WRONG if any(outcome.what == WRONG for outcome in trace) else RIGHT


if __name__ == "__main__":
    sys.exit(main())
