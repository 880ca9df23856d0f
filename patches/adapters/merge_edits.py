"""The edits that let a layer of peft put back the weight that it merged into, and the program that shows why.

peft has the code once for each kind of adapter, in a module that is imported when the first quantized layer gets such
an adapter. So each is a patch of its own, or none would go in before all of these modules are there.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..engine import Rewrite
from . import merge_snapshot

LINKS = ("https://github.com/huggingface/trl/issues/3466", "https://github.com/huggingface/trl/issues/6688")
IN_BNB = ("Linear8bitLt", "Linear4bit")


def make_merge_edits(module: str, *classes: str, when: str = "") -> Iterator[Rewrite]:
    """Of the layers ``classes`` in the module ``peft.tuners.<module>``."""
    for name in classes:
        merge, unmerge = (f"peft.tuners.{module}:{name}.{method}" for method in ("merge", "unmerge"))
        yield Rewrite(
            merge,
            find="adapter_names = check_adapters_to_merge(self, adapter_names)",
            replace="""
                adapter_names = check_adapters_to_merge(self, adapter_names)
                _patches_before = _patches_packed(self, adapter_names)
            """,
            names={"_patches_packed": merge_snapshot.snapshot_before_merge},
            when=when,
        )
        yield Rewrite(
            merge,
            find="self.merged_adapters.append(active_adapter)",
            replace="""
                self.merged_adapters.append(active_adapter)
                _patches_note(self, _patches_before)
            """,
            names={"_patches_note": merge_snapshot.record_merge},
            when=when,
        )
        yield Rewrite(
            unmerge,
            find="len(self.merged_adapters) > 0",
            replace="len(self.merged_adapters) > 0 and not _patches_put_back(self)",
            names={"_patches_put_back": merge_snapshot.restore},
            when=when,
        )
