"""Files and offloading."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from safetensors.torch import load_file, save_file

from .states import only
from .subject import Subject, four_bits, nested_scales

from .reading import Shown, looks, reader, shown


def _state(s: Subject) -> dict[str, torch.Tensor]:
    only(s.call is None or not s.adapter)
    prefix = s.path + "."
    whole = s.root.state_dict()
    return {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}


def _stands_for(s: Subject, saved: dict[str, torch.Tensor]) -> Shown:
    return saved_weight(saved, "weight"), s.weight, max(s.slack, 1e-3 if s.kind.bits == 4 else 1e-5)


def saved_weight(saved: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What the tensors of a file stand for; ``name`` is the key of the weight."""
    data = saved[name].detach().as_subclass(torch.Tensor)
    if data.is_meta:
        return data
    packed = [key for key in saved if key.startswith(f"{name}.quant_state.")]
    if packed:
        said = json.loads(bytes(saved[packed[0]].tolist()))
        absmax = saved[f"{name}.absmax"]
        if f"{name}.nested_absmax" in saved:
            absmax = nested_scales(absmax, saved[f"{name}.nested_quant_map"], saved[f"{name}.nested_absmax"],
                                   said["nested_blocksize"], said["nested_offset"])  # fmt: skip
        return four_bits(data, saved[f"{name}.quant_map"], said["shape"], said["blocksize"], absmax.float())
    if data.dtype == torch.int8:
        return data.float() * saved[name.removesuffix("weight") + "SCB"].float().reshape(-1, 1) / 127
    return data.float()


@reader(whole=True)
def state_dict(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    yield _stands_for(s, _state(s))


@reader(whole=True)
def safetensors(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    with tempfile.TemporaryDirectory() as folder:
        save_file({key: value.contiguous() for key, value in _state(s).items()}, Path(folder, "m.safetensors"))
        saved = load_file(Path(folder, "m.safetensors"))
    yield _stands_for(s, saved)
    layer = s.kind.quantized(9)
    layer.load_state_dict(saved)
    if not s.adapter:
        yield from looks(s, layer)


def _loaded(s: Subject, layer: Any, **options: Any) -> Iterator[Shown]:
    only(not s.adapter and s.call is None and not hasattr(s.layer, "parametrizations"))  # whose keys are others
    only(
        options.get("strict", True) or not hasattr(s.layer, "weight_orig")
    )  # of a pruned layer: nothing would be loaded
    layer.load_state_dict({key: value.clone() for key, value in _state(s).items()}, **options)
    yield from looks(s, layer)


@reader()
def loaded(s: Subject) -> Iterator[Shown]:
    yield from _loaded(s, s.kind.quantized(9))


@reader()
def loaded_into_one_that_ran(s: Subject) -> Iterator[Shown]:
    layer = s.kind.quantized(9)
    with torch.no_grad():
        layer(s.x())
    yield from _loaded(s, layer)


@reader()
def loaded_before_quantized(s: Subject) -> Iterator[Shown]:
    only(torch.get_default_device().type != "meta")  # a layer from there has whatever is in the memory
    yield from _loaded(s, s.kind.fresh())


@reader()
def loaded_by_assigning(s: Subject) -> Iterator[Shown]:
    with torch.device("meta"):
        layer = s.kind.fresh()
    yield from _loaded(s, layer, assign=True)


@reader()
def loaded_not_strictly(s: Subject) -> Iterator[Shown]:
    yield from _loaded(s, s.kind.quantized(9), strict=False)


@reader()
def saved_by_torch(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    file = io.BytesIO()
    torch.save(_state(s), file)
    file.seek(0)
    yield _stands_for(s, torch.load(file, weights_only=True))


@reader(whole=True)
def state_dict_with_live_tensors(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    prefix = s.path + "."
    whole = s.root.state_dict(keep_vars=True)
    yield _stands_for(s, {k.removeprefix(prefix): v for k, v in whole.items() if k.startswith(prefix)})


@reader(whole=True)
def state_dict_by_torch_distributed(s: Subject) -> Iterator[Shown]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    only(s.call is None and not s.adapter and not s.tied)
    saved = {k.removeprefix(s.path + "."): v for k, v in get_model_state_dict(s.root).items()}
    yield _stands_for(s, saved)


@reader(slow=True)
def distributed_checkpoint(s: Subject) -> Iterator[Shown]:
    import torch.distributed.checkpoint as dcp

    only(s.call is None and not s.adapter)
    saved = _state(s)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        read = {key: torch.empty_like(value, device="cpu") for key, value in saved.items()}
        dcp.load(read, checkpoint_id=folder, no_dist=True)
    yield _stands_for(s, read)
    layer = s.kind.quantized(9)
    layer.load_state_dict(read)
    yield from looks(s, layer)


@reader(slow=True)
def save_pretrained(s: Subject) -> Iterator[Shown]:
    from transformers import PretrainedConfig, PreTrainedModel

    only(s.call is None and not s.adapter and not s.offloaded and not s.tied)

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: Any, layer: Any) -> None:
            super().__init__(config)
            self.layer = layer
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            """None is initialized: the layer has its weight."""

    with tempfile.TemporaryDirectory() as folder:
        Model(PretrainedConfig(), s.layer).save_pretrained(folder)
        saved = load_file(Path(folder, "model.safetensors"))
    yield _stands_for(s, {key.removeprefix("layer."): value for key, value in saved.items()})


@reader(last=True)
def offload_to_cpu(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None)
    cpu_offload(s.root, execution_device=torch.device("cpu"))
    yield from shown(s)
    yield from shown(s, rows=2)
    remove_hook_from_submodules(s.root)
    yield from shown(s)


@reader(last=True)
def offload_to_disk(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None)
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(s.root, folder, execution_device=torch.device("cpu"))
        yield from shown(s)
        yield from shown(s, rows=2)


@reader(last=True)
def offload_and_train(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None and not s.kind.embeds)
    cpu_offload(s.root, execution_device=torch.device("cpu"))
    x = s.x(grad=True)
    y = s.forward(x)
    yield y, s.expected(x), s.tolerance
    y.float().sum().backward()
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader(last=True)
def dispatch(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None and not s.adapter)
    with tempfile.TemporaryDirectory() as folder:
        dispatch_model(s.root, {"layer": "disk", **({"head": "cpu"} if s.tied else {})}, main_device="cpu",
                       offload_dir=folder, force_hooks=True)  # fmt: skip
        yield from shown(s)


@reader(last=True)
def brought_back(s: Subject) -> Iterator[Shown]:
    only(s.offloaded)
    remove_hook_from_submodules(s.root)
    yield from shown(s)
