"""``python -m tools.gpu.verified FILE``: ``patches verify`` in parts, what is known after each of them in the file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

PART = 24
"""Patches of a part: what it begins with, the import of the stack, takes as long as the reproducers of a few."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.verified", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("ids", nargs="*", metavar="ID", help="patches; all if none is named")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    options = parser.parse_args()
    import patches

    ids = options.ids or sorted(result.id for result in patches.report())
    rows = []
    for first in range(0, len(ids), PART):
        rows += [asdict(row) for row in patches.verify(*ids[first : first + PART], jobs=options.jobs).rows]
        known = {"ok": all(row["verdict"] != "wrong" for row in rows), "of": len(ids), "rows": rows}
        options.file.write_text(json.dumps(known, indent=1) + "\n")
    return int(any(row["verdict"] == "wrong" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
