"""``python -m tests.distributed [--pairs SEED] [WORD ...]``: cells whose name has each WORD, without the plugin and with it.

All are hours; with ``--pairs`` it is a choice of some 450 in which any two parts of a name occur together, 20 minutes. A cell
may not get worse by the plugin, is never wrong with it, and no rank is left waiting. Prints every cell that is not right, with
what each rank said, and ends with 1 if there is harm.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.distributed import cells
from tests.distributed.launching import launch, together

ROOT = Path(__file__).parents[2]
Said = dict[str, list[tuple[str, str]]]


def environ() -> dict[str, str]:
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def chosen(names: Iterable[str], words: list[str]) -> list[str]:
    return [name for name in names if all(word in name for word in words)]


def compare(where: str, names: list[str], bare: Said, repaired: Said, counts: Counter[str]) -> bool:
    """Print what is not right; whether there is harm."""
    harm = False
    for name in names:
        before, after = together(bare[name]), together(repaired[name])
        counts[f"{before} -> {after}"] += 1
        worse = after in ("wrong", "apart") or (before == "right" and after != "right")
        worse |= after == "none" and name.startswith("load")  # of what is written, every cell says something
        harm |= worse
        if after not in ("right", "none"):
            words = " || ".join(dict.fromkeys(words[:300] for _, words in repaired[name]))
            print(f"{'HARM ' if worse else ''}{where} {name}: {before} -> {after}: {words}", flush=True)
    return harm


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed")
    parser.add_argument("--pairs", type=int, metavar="SEED")
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args(arguments)
    words = options.words

    def some(names: Iterable[str], more: int = 0) -> list[str]:
        found = chosen(names, words)
        return found if options.pairs is None else cells.in_pairs(found, options.pairs + more)

    counts: Counter[str] = Counter()
    harm = False
    env = environ()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for table in (cells.training(), cells.embeddings(), cells.adapters()):
            if names := some(table):
                said = [launch(folder, names, env, 2, plugin, timeout=14_400) for plugin in (False, True)]
                harm |= compare("2 ranks", names, *said, counts)
        if chosen(cells.loading(), words):
            for world in cells.WORLDS:
                for plugin in (False, True):
                    launch(folder, list(cells.saving()), env, world, plugin, timeout=14_400)
            for world in cells.WORLDS:
                loads = some(filter(cells.is_written, cells.loading()), world)
                said = [launch(folder, loads, env, world, plugin, timeout=14_400) for plugin in (False, True)]
                harm |= compare(f"{world} ranks" if world else "unsharded", loads, *said, counts)
                harm |= unpatched_readers(world, loads, said[0])
    print(f"{sum(counts.values())} cells:", ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    return int(harm)


def unpatched_readers(world: int, names: list[str], said: Said) -> bool:
    """Whether a reader without the plugin is worse off with what ranks with the plugin saved.

    What one process saves without the plugin is the measure, too: torch refuses its quantization states in a full state dict.
    """
    harm = False
    for name in names:
        without = name.replace("+/", "-/")
        alone = re.sub(r"/\d[+-]/", "/0-/", name)
        measured = without != name and without in said and alone in said
        if measured and together(said[without]) == together(said[alone]) == "right" != together(said[name]):
            print(f"HARM unpatched reader on {world} {name}: {said[name]}", flush=True)
            harm = True
    return harm


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
