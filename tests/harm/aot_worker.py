"""A process that trains compiled layers with torch's cache on disk, and writes down what it got.

``python aot_worker.py CACHE OUT KINDS [ROOT]``: with the plugin of the checkout ``ROOT``, or without any.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

KINDS = ("nf4-double", "int8-threshold")
TRAINED = ("nf4-double",)
"""In train; the others in eval, where INT8 looks for outliers."""


def main(cache: str, out: str, kinds: str, root: str = "") -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    import torch

    if root:
        sys.path.insert(0, root)
        import patches

        assert str(Path(patches.__file__).parent.parent) == root
        patches.apply(strict=True)
    from tests import compiling
    from tests.harm.layers import quantized

    compiling.for_an_empty_cache()

    shown = {}
    for kind in kinds.split(","):
        q = quantized(kind)
        x = q.inputs(grad=True)
        y = torch.compile(q.layer.train(kind in TRAINED))(x)
        y.sum().backward()
        checks = [q.right(y, x), q.gradient(x)]
        shown[kind] = [(check.right, check.figure) for check in checks]
    Path(out).write_text(json.dumps(shown))


if __name__ == "__main__":
    main(*sys.argv[1:])
