"""What a layer has been through before something about it is changed."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable

import torch
from accelerate import cpu_offload, disk_offload

from .subject import Subject

Step = Callable[[Subject], None]
STATES: dict[str, Step] = {}


class NotMeant(Exception):
    """The trial makes no sense: the step or reader is about other layers."""


def state(body: Step) -> Step:
    STATES[body.__name__] = body
    return body


def only(condition: object) -> None:
    if not condition:
        raise NotMeant


@state
def cold(s: Subject) -> None:
    pass


@state
def ran(s: Subject) -> None:
    with torch.no_grad():
        s.forward(s.x())


@state
def trained(s: Subject) -> None:
    only(not s.kind.embeds)
    s.forward(s.x(grad=True)).sum().backward()


@state
def evaluated(s: Subject) -> None:
    s.root.eval()
    ran(s)


@state
def inferred(s: Subject) -> None:
    with torch.inference_mode():
        s.forward(s.x())


@state
def copied(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    ran(s)
    s.root = copy.deepcopy(s.root)


@state
def pickled(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    ran(s)
    s.root = pickle.loads(pickle.dumps(s.root))


@state
def saved_whole(s: Subject) -> None:
    only(s.call is None and not s.offloaded)
    file = io.BytesIO()
    torch.save(s.root, file)
    file.seek(0)
    s.root = torch.load(file, weights_only=False)


@state
def from_meta(s: Subject) -> None:
    """Made on meta, loaded by assigning."""
    only(not s.adapter and not s.offloaded)
    saved = {name: tensor.clone() for name, tensor in s.layer.state_dict().items()}
    with torch.device("meta"):
        layer = s.kind.fresh()
    layer.load_state_dict(saved, assign=True)
    s.replace_layer(layer)


@state
def tied(s: Subject) -> None:
    """Another layer has the same weight, and ran."""
    only(not s.adapter and not s.offloaded and not s.tied)
    s.root.head = s.kind.fresh()
    s.root.head.weight = s.layer.weight
    if s.bias is not None:
        s.root.head.bias = s.layer.bias
    s.tied = True
    with torch.no_grad():
        s.root.head(s.x())


@state
def on_cpu(s: Subject) -> None:
    only(not s.offloaded)
    cpu_offload(s.root, execution_device=torch.device("cpu"))
    s.offloaded = True


@state
def on_cpu_ran(s: Subject) -> None:
    on_cpu(s)
    ran(s)


@state
def on_disk(s: Subject) -> None:
    only(not s.offloaded)
    folder = tempfile.TemporaryDirectory()
    s.folders.append(folder)
    disk_offload(s.root, folder.name, execution_device=torch.device("cpu"))
    s.offloaded = True


def adapted(s: Subject, dora: bool) -> None:
    from peft import LoraConfig, get_peft_model

    only(not s.adapter and not s.kind.embeds and not s.tied and s.call is None)
    s.root.is_loaded_in_8bit = s.kind.family == "int8"
    s.root.is_loaded_in_4bit = s.kind.family == "4bit"
    torch.default_generator.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["layer"], init_lora_weights=False, use_dora=dora)
    s.root = get_peft_model(s.root, config)
    s.path = "base_model.model.layer.base_layer"
    s.adapter = "dora" if dora else "lora"
    s.effective()  # seen before anything is offloaded


@state
def lora(s: Subject) -> None:
    adapted(s, dora=False)


@state
def lora_ran(s: Subject) -> None:
    ran(s)
    adapted(s, dora=False)
    ran(s)


@state
def dora(s: Subject) -> None:
    adapted(s, dora=True)


@state
def merged(s: Subject) -> None:
    ran(s)
    adapted(s, dora=False)
    whole = s.effective()
    s.root.merge_adapter()
    s.delta = whole - s.weight
    s.adapter = "merged"
    s.becomes(whole, s.kind.requantized)


@state
def merged_and_unloaded(s: Subject) -> None:
    adapted(s, dora=False)
    whole = s.effective()
    s.root = s.root.merge_and_unload()
    s.path, s.adapter = "layer", ""
    s.becomes(whole, s.kind.requantized)


@state
def compiled(s: Subject) -> None:
    only(s.call is None)
    s.call = torch.compile(s.root, backend="eager")
    ran(s)
