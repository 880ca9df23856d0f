"""Merging adapters into offloaded layers is silently lost, fails, or brings the whole model to the device."""

from __future__ import annotations

from typing import Any

from ...adapters.merge_offloaded_layers import onload_for_merge, unmerge_onloaded
from ...engine import Finding, Message, Patch, Rewrite
from ...offload import offloaded_modules


def defect() -> Finding:
    """Merge into a linear layer that accelerate keeps in CPU memory, against the adapter beside it."""
    import torch
    from accelerate import cpu_offload
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(8, 8)),
        LoraConfig(r=2, target_modules=["0"], init_lora_weights=False),
    )
    cpu_offload(model.base_model.model[0].base_layer, execution_device=torch.device("cpu"))
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
        error = float((model.merge_and_unload()(x) - expected).norm() / expected.norm())
    return Finding(error > 1e-3, f"relative error of the merged model {error:.1e}")


_UNMERGE: dict[str, Any] = {
    "find": "module.unmerge()",
    "replace": "_patches_unmerge(module)",
    "names": {"_patches_unmerge": unmerge_onloaded},
}
_WITH_SET_ADAPTER = (  # before peft 0.18
    ("lora.model:LoraModel", ""),
    ("lycoris_utils:LycorisTuner", ""),
    ("ia3.model:IA3Model", ""),
    ("vera.model:VeraModel", ""),
    ("oft.model:OFTModel", ""),
    ("boft.model:BOFTModel", ""),
    ("hra.model:HRAModel", ""),
    ("bone.model:BoneModel", ""),
    ("vblora.model:VBLoRAModel", ""),
    ("fourierft.model:FourierFTModel", ""),
    ("ln_tuning.model:LNTuningModel", ""),
    ("trainable_tokens.model:TrainableTokensModel", " and peft>=0.15"),
    ("randlora.model:RandLoraModel", " and peft>=0.16"),
    ("c3a.model:C3AModel", " and peft>=0.16"),
    ("miss.model:MissModel", " and peft>=0.17"),
    ("shira.model:ShiraModel", " and peft>=0.17"),
)

PATCH = Patch(
    id="peft-merge-offloaded",
    summary="merging into offloaded layers is silently lost, fails, or moves the whole model to the device",
    groups=("offload", "merge"),
    silent=True,
    messages=(Message("Cannot copy out of meta tensor; no data!", "torch/lib/libtorch_cpu.so"),),
    words=("OOM (out of memory)",),
    links=(
        "https://github.com/huggingface/peft/pull/1190",
        "https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/tuners_utils.py#L77",
    ),
    why="""
        ``merge_and_unload``, ``merge_adapter`` and ``unmerge_adapter`` bring an offloaded layer with
        ``onload_layer``. That is right only for a plain linear layer in a model that accelerate dispatched as a
        whole:

        - Layers that were offloaded one by one (``cpu_offload(layer)``) have two hooks in a ``SequentialHook``,
          which ``onload_layer`` does not look into. On a plain layer the merge is written to the meta device and
          silently lost with the next forward. On a quantized layer it raises ``Cannot copy out of meta tensor; no
          data!``.
        - ``unmerge_adapter`` fails on INT8 layers, because the row scales are not brought (``'NoneType' object has
          no attribute 'to'``).
        - A merge below the wrapped layer (``trainable_token_indices``) is not written back.
        - ``merge_and_unload`` brings every module of the model, the outermost too, and with it everything below at
          once: the whole model, several times.
        - Weights that were on disk stay in memory after the merge.
        - ``set_adapter`` of a merged model, and so ``add_adapter``, unmerges without bringing the weight: it
          changes the meta tensor, and the next forward still has the old adapter.
    """,
    repair="""
        The repair brings only the offloaded modules below a peft layer. After the merge it writes what has changed
        to where the hook reads it: into the map in memory, or to a new file that the map's index then names. The
        new file is in a folder that is removed when the process ends; existing files, perhaps the checkpoint
        itself, are never changed. The layer stays offloaded. A layer without an offload hook takes the old path.
        All releases of peft.
    """,
    requires=("peft>=0.14", "accelerate>=0.26.1"),
    tested_up_to="0.21.2",
    edits=(
        Rewrite(
            "peft.tuners.tuners_utils:onload_layer",
            find="offloaded_modules = []",
            replace="""
                if _patches_offloaded(layer):
                    with _patches_brought(layer):
                        yield
                    return
                offloaded_modules = []
            """,
            names={"_patches_offloaded": offloaded_modules.is_offloaded, "_patches_brought": onload_for_merge},
        ),
        Rewrite("peft.tuners.tuners_utils:set_adapter", **_UNMERGE, when="peft>=0.18"),
        Rewrite("peft.tuners.mixed.model:MixedModel.set_adapter", **_UNMERGE),
        *(
            Rewrite(f"peft.tuners.{tuner}.set_adapter", **_UNMERGE, when=f"peft<0.18{since}")
            for tuner, since in _WITH_SET_ADAPTER
        ),
    ),
    defect=defect,
)
