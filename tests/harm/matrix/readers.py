"""What reads a layer: each yields what it found beside what the weight that was set demands."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from .states import adapted, only
from .subject import Holder, Subject, saved_weight

Shown = tuple[Any, torch.Tensor, float]
"""A result, its reference, the relative error that it may have."""


@dataclass(frozen=True)
class Reader:
    name: str
    body: Callable[[Subject], Iterator[Shown]]
    last: bool
    """Whether nothing may follow: the reader leaves another layer behind."""
    whole: bool
    """Whether an error must leave the layer as it was: the reader is one call of the user."""
    slow: bool


READERS: dict[str, Reader] = {}


def reader(last: bool = False, whole: bool = False, slow: bool = False) -> Callable[..., Any]:
    def put(body: Callable[[Subject], Iterator[Shown]]) -> Callable[[Subject], Iterator[Shown]]:
        READERS[body.__name__] = Reader(body.__name__, body, last, whole, slow)
        return body

    return put


def shown(s: Subject, rows: int = 5, dtype: torch.dtype = torch.float32, off: float = 0.0) -> Iterator[Shown]:
    x = s.x(rows, dtype)
    with torch.no_grad():
        yield s.forward(x), s.expected(x), max(s.tolerance, off)


def looks(s: Subject, layer: Any) -> Iterator[Shown]:
    """Another layer that must compute the same."""
    x = s.x()
    with torch.no_grad():
        yield layer(x), s.expected(x), s.tolerance


@reader(whole=True)
def forward(s: Subject) -> Iterator[Shown]:
    yield from shown(s)


@reader(whole=True)
def forward_eval(s: Subject) -> Iterator[Shown]:
    s.root.eval()
    yield from shown(s)


@reader(whole=True)
def forward_one_row(s: Subject) -> Iterator[Shown]:
    yield from shown(s, rows=1)


@reader()
def forward_twice(s: Subject) -> Iterator[Shown]:
    yield from shown(s)
    yield from shown(s, rows=2)


@reader()
def forward_bf16(s: Subject) -> Iterator[Shown]:
    only(not s.kind.embeds)
    yield from shown(s, dtype=torch.bfloat16, off=0.04)


@reader()
def forward_autocast(s: Subject) -> Iterator[Shown]:
    with torch.autocast("cpu", torch.bfloat16):
        yield from shown(s, off=0.04)


@reader()
def forward_inference(s: Subject) -> Iterator[Shown]:
    x = s.x()
    with torch.inference_mode():
        y = s.forward(x)
    yield y, s.expected(x), s.tolerance


@reader(whole=True)
def backward(s: Subject) -> Iterator[Shown]:
    only(not s.kind.embeds)
    x = s.x(grad=True)
    y = s.forward(x)
    yield y, s.expected(x), s.tolerance
    y.float().pow(2).sum().backward()
    yield x.grad, 2 * y.detach().float() @ s.effective(), max(s.tolerance, 0.02)


@reader()
def backward_checkpointed(s: Subject) -> Iterator[Shown]:
    only(not s.kind.embeds)
    x = s.x(grad=True)
    y = torch.utils.checkpoint.checkpoint(s.forward, x, use_reentrant=False)
    y.float().sum().backward()
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader()
def forward_tied(s: Subject) -> Iterator[Shown]:
    only(s.tied)
    yield from looks(s, s.root.head)


@reader()
def call_functionally(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    x = s.x()
    with torch.no_grad():
        yield functional_call(s.root, dict(s.root.named_parameters()), (x,)), s.expected(x), s.tolerance


# -- adapters ------------------------------------------------------------------------------------


def _adapter_gradients(s: Subject) -> Iterator[Shown]:
    wrapped = s.root.get_submodule(s.path.removesuffix(".base_layer"))
    x = s.x(grad=True)
    y = s.forward(x)
    yield y, s.expected(x), s.tolerance
    y.float().sum().backward()
    a, b = wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight
    if s.adapter == "lora":
        ones = torch.ones_like(y).float()
        found = ones.t() @ (x.detach().float() @ a.detach().float().t()) * wrapped.scaling["default"]
        yield b.grad, found, max(s.tolerance, 0.02)
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader(last=True)
def lora_gradients(s: Subject) -> Iterator[Shown]:
    if not s.adapter:
        adapted(s, dora=False)
    only(s.adapter == "lora")
    yield from _adapter_gradients(s)


@reader(last=True)
def dora_gradients(s: Subject) -> Iterator[Shown]:
    if not s.adapter:
        adapted(s, dora=True)
    only(s.adapter == "dora")
    yield from _adapter_gradients(s)


def _merge(s: Subject, dora: bool = False) -> torch.Tensor:
    if not s.adapter:
        adapted(s, dora)
    only(s.adapter in ("lora", "dora"))
    return s.effective()


@reader(last=True)
def merge(s: Subject) -> Iterator[Shown]:
    whole = _merge(s)
    s.root.merge_adapter()
    yield _through(s, whole)


def _through(s: Subject, weight: torch.Tensor, model: Any = None) -> Shown:
    """The forward of a model whose weight was quantized once more."""
    x = s.x()
    with torch.no_grad():
        y = (model or s.root)(x)
    return y, torch.nn.functional.linear(x, weight, s.bias), s.tolerance + s.kind.requantized


@reader(last=True)
def merge_and_unmerge(s: Subject) -> Iterator[Shown]:
    _merge(s)
    s.root.merge_adapter()
    s.root.unmerge_adapter()
    yield _through(s, s.effective())


@reader(last=True)
def merge_and_unload(s: Subject) -> Iterator[Shown]:
    whole = _merge(s)
    yield _through(s, whole, s.root.merge_and_unload())


@reader(last=True)
def merge_dora(s: Subject) -> Iterator[Shown]:
    whole = _merge(s, dora=True)
    yield _through(s, whole, s.root.merge_and_unload())


@reader(last=True)
def unmerge(s: Subject) -> Iterator[Shown]:
    only(s.adapter == "merged")
    s.root.unmerge_adapter()
    assert s.delta is not None
    s.adapter, before = "lora", s.weight
    s.becomes(before - s.delta, s.slack)
    yield _through(s, s.effective())


# -- files ---------------------------------------------------------------------------------------


def _state(s: Subject) -> dict[str, torch.Tensor]:
    only(s.call is None or not s.adapter)
    prefix = s.path + "."
    whole = s.root.state_dict()
    return {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}


def _stands_for(s: Subject, saved: dict[str, torch.Tensor]) -> Shown:
    return saved_weight(saved, "weight"), s.weight, max(s.slack, 1e-3 if s.kind.bits == 4 else 1e-5)


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
    only(not s.adapter and s.call is None)
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

    with tempfile.TemporaryDirectory() as folder:
        Model(PretrainedConfig(), s.layer).save_pretrained(folder)
        saved = load_file(Path(folder, "model.safetensors"))
    yield _stands_for(s, {key.removeprefix("layer."): value for key, value in saved.items()})


# -- offloading ----------------------------------------------------------------------------------


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


# -- copies, casts, dequantizing -----------------------------------------------------------------


def _copy(s: Subject, root: Any) -> Iterator[Shown]:
    x = s.x()
    with torch.no_grad():
        yield root(x), s.expected(x), s.tolerance


@reader()
def deepcopy(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    yield from _copy(s, copy.deepcopy(s.root))


@reader()
def pickle_whole(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    yield from _copy(s, pickle.loads(pickle.dumps(s.root)))


@reader()
def save_whole(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    file = io.BytesIO()
    torch.save(s.root, file)
    file.seek(0)
    yield from _copy(s, torch.load(file, weights_only=False))


def _cast(s: Subject, dtype: torch.dtype, how: Callable[[Any], Any]) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None and not s.adapter)
    how(s.root)
    y, reference, tolerance = next(shown(s, dtype=dtype, off=0.04) if not s.kind.embeds else shown(s, off=0.04))
    yield y, reference, tolerance


@reader(last=True)
def half(s: Subject) -> Iterator[Shown]:
    yield from _cast(s, torch.float16, lambda root: root.half())


@reader(last=True)
def bfloat16(s: Subject) -> Iterator[Shown]:
    yield from _cast(s, torch.bfloat16, lambda root: root.bfloat16())


@reader(last=True)
def to_dtype(s: Subject) -> Iterator[Shown]:
    yield from _cast(s, torch.float16, lambda root: root.to("cpu", torch.float16))


@reader(last=True)
def to_cpu(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None)
    s.root.to("cpu")
    yield from shown(s)


@reader(last=True)
def weight_to_cpu(s: Subject) -> Iterator[Shown]:
    only(not s.offloaded and s.call is None)
    s.layer.weight = s.layer.weight.to("cpu")
    yield from shown(s)


@reader()
def dequantize_by_peft(s: Subject) -> Iterator[Shown]:
    from peft.utils.integrations import dequantize_module_weight

    only(not s.offloaded and not s.kind.embeds)
    yield dequantize_module_weight(s.layer), s.weight, max(s.slack, 1e-2)


@reader(last=True)
def dequantize_by_transformers(s: Subject) -> Iterator[Shown]:
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import dequantize_and_replace

    only(not s.offloaded and s.call is None and not s.kind.embeds and not s.adapter and not s.tied)
    config = BitsAndBytesConfig(load_in_8bit=s.kind.bits == 8, load_in_4bit=s.kind.bits == 4)
    s.root.dtype = torch.float32
    root = dequantize_and_replace(s.root, quantization_config=config)
    yield from _copy(s, root.float())


# -- compiling -----------------------------------------------------------------------------------


@reader(slow=True)
def compile_it(s: Subject) -> Iterator[Shown]:
    only(s.call is None)
    x = s.x()
    with torch.no_grad():
        yield torch.compile(s.root, backend="eager")(x), s.expected(x), s.tolerance


@reader(slow=True)
def compile_backward(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.kind.embeds)
    x = s.x(grad=True)
    y = torch.compile(s.root, backend="aot_eager")(x)
    y.float().sum().backward()
    yield x.grad, torch.ones_like(y).float() @ s.effective(), max(s.tolerance, 0.02)


@reader(slow=True)
def export(s: Subject) -> Iterator[Shown]:
    only(s.call is None and not s.offloaded)
    x = s.x()
    with torch.no_grad():
        program = torch.export.export(s.root.eval(), (x,), strict=False)
        yield program.module()(x), s.expected(x), s.tolerance


@reader()
def inspect(s: Subject) -> Iterator[Shown]:
    """What ``patches.inspect`` looks at stays as it is."""
    only(s.call is None)
    try:
        import patches
    except ImportError:
        pass
    else:
        if hasattr(patches, "inspect"):
            patches.inspect(s.root)
    yield from shown(s)


__all__ = ["READERS", "Holder", "Reader"]
