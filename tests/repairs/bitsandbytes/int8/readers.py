"""INT8 layers in every condition, and everybody who reads their scales: what the tests of their one owner share."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import accelerate
import bitsandbytes as bnb
import peft
import torch

X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
CPU = torch.device("cpu")


def linear(seed: int = 0, warm: bool = True) -> bnb.nn.Linear8bitLt:
    torch.manual_seed(seed)
    layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).requires_grad_(False).to("cpu").eval()
    if warm:
        layer(X)
    return layer


def copied(layer):
    return copy.deepcopy(layer)


def unpickled(layer):
    return pickle.loads(pickle.dumps(layer))


def loaded_whole(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


LAYERS = {
    "ran": linear,
    "copied": lambda: copied(linear()),
    "unpickled": lambda: unpickled(linear()),
    "from a file": lambda: loaded_whole(linear()),
    "moved": lambda: linear().to("cpu"),
    "cast": lambda: linear().half(),
    "of inference mode": lambda: torch.inference_mode()(linear)(),
}


def saved_and_loaded(layer, folder):
    other = linear(1, warm=False)
    other.load_state_dict(layer.state_dict())
    return other(X)


def offloaded(layer, folder):
    model = accelerate.cpu_offload(torch.nn.Sequential(layer), execution_device=CPU)
    first = model(X)
    assert torch.equal(model(X), first)
    return first


def on_disk(layer, folder):
    return accelerate.disk_offload(torch.nn.Sequential(layer), folder, execution_device=CPU)(X)


def under_a_hook(layer, folder):
    hook = accelerate.hooks.AlignDevicesHook(CPU, offload=True)
    return accelerate.hooks.add_hook_to_module(layer, hook)(X)


def adapter(layer):
    base = torch.nn.Sequential(layer)
    base.is_loaded_in_8bit = True
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))


def merged_and_unmerged(layer, folder):
    model = adapter(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
        model.unmerge_adapter()
        with model.disable_adapter():
            return model(X)


def compiled(layer, folder):
    return torch.compile(layer, fullgraph=True, backend="aot_eager")(X)


def by_hand(layer, folder):
    """The habit of who reads scales: the weight's, and if it has none the state's."""
    weight = layer.weight
    scale = weight.SCB if weight.SCB is not None else layer.state.SCB
    return bnb.functional.int8_vectorwise_dequant(weight.data, scale) @ X.T


def of_a_copied_weight(layer, folder):
    weight = copy.deepcopy(layer.weight)
    return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB) @ X.T


def of_a_moved_weight(layer, folder):
    weight = layer.weight.to("cpu")
    return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB) @ X.T


def of_pieces(layer, folder):
    pieces = layer.weight.chunk(2)
    return torch.cat([bnb.functional.int8_vectorwise_dequant(piece.data, piece.SCB) for piece in pieces]) @ X.T


READERS = {
    f.__name__: f for f in (
        saved_and_loaded, offloaded, on_disk, under_a_hook, merged_and_unmerged, compiled, by_hand, of_a_copied_weight,
        of_a_moved_weight, of_pieces,
    )
}  # fmt: skip
AFTER = {"as is": lambda it: it, "copied": copied, "from a file": loaded_whole, "cast": lambda it: it.float()}
