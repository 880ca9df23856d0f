"""How long the plugin would have lasted: each past release of the packages that it repairs, as if it were tomorrow's."""

from __future__ import annotations

from tools.stacks import ROOT

OLDEST = {
    "transformers": "5.0.0",
    "peft": "0.14.0",
    "bitsandbytes": "0.46.1",
    "accelerate": "1.1.0",
    "diffusers": "0.33.0",
}
"""The releases that are replayed begin with these; in the order in which they are run: what changes most comes first."""
STEPS = (1, 2, 4)
COUNTS = ROOT / "docs" / "replay_counts.json"
