"""The edits that let a layer of peft put back what it merged into, and the program that shows why.

peft has the code once for each kind of adapter, in a module that is imported when the first quantized layer gets such
an adapter. So each is a patch of its own, or none would go in before all of these modules are there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from ....engine import CannotShow, Finding, Rewrite
from ....engine.gate import satisfied
from . import unmerged

LINKS = ("https://github.com/huggingface/trl/issues/3466", "https://github.com/huggingface/trl/issues/6688")
IN_BNB = ("Linear8bitLt", "Linear4bit")


def edits(module: str, *classes: str, when: str = "") -> Iterator[Rewrite]:
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
            names={"_patches_packed": unmerged.packed},
            when=when,
        )
        yield Rewrite(
            merge,
            find="self.merged_adapters.append(active_adapter)",
            replace="""
                self.merged_adapters.append(active_adapter)
                _patches_note(self, _patches_before)
            """,
            names={"_patches_note": unmerged.note},
            when=when,
        )
        yield Rewrite(
            unmerge,
            find="len(self.merged_adapters) > 0",
            replace="len(self.merged_adapters) > 0 and not _patches_put_back(self)",
            names={"_patches_put_back": unmerged.put_back},
            when=when,
        )


def defect(config: str, int8: bool = False, **options: Any) -> Finding:
    """Merge an adapter into a quantized layer, ask the model without adapters, and compare with what it was."""
    import peft
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    if satisfied("peft<0.15") and not torch.cuda.is_available():
        raise CannotShow("peft 0.14 dequantizes on CUDA only")
    torch.manual_seed(0)
    if int8:
        layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    else:
        layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    base: Any = torch.nn.Sequential(layer).to("cpu")
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = not int8, int8  # as from_pretrained says it
    x = torch.randn(4, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: merging rounds
        expected = base(x)
        model = peft.get_peft_model(base, getattr(peft, config)(target_modules=["0"], **options))
        model.merge_adapter()
        with model.disable_adapter():
            error = float((model(x) - expected).norm() / expected.norm())
    return Finding(error > 0, f"relative error of the model without its adapter {error:.1e}")
