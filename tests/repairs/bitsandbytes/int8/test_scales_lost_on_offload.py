"""INT8 under accelerate's offload hooks and through checkpoints: gradients equal, scales kept or missed aloud."""

from __future__ import annotations

import itertools

import accelerate
import bitsandbytes as bnb
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch.utils.checkpoint import checkpoint

import patches

pytestmark = pytest.mark.one_in(2)

ID = "bitsandbytes-int8-scales-lost-on-offload"
OFFLOAD = (
    "bitsandbytes-int8-backward-live-state",
    ID,
    "accelerate-int8-offload-resident-weights",
    "accelerate-int8-cpu-round-trip",
)
CPU = torch.device("cpu")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + x


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, how: bool | None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
        return x


def net(training: bool) -> Net:
    torch.manual_seed(0)
    return Net().requires_grad_(False).to("cpu").train(training)


def step(model: Net, how: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 4, 64, requires_grad=True)
    y = model(x, how)
    y.square().sum().backward()
    return y.detach(), x.grad


def hook_alone(model: Net, folder) -> None:
    for layer in model.layers:
        add_hook_to_module(layer.base, AlignDevicesHook(CPU, offload=True))


def dispatch(model: Net, folder) -> None:
    places = {"layers.0": "cpu", "layers.1": "disk"}
    accelerate.dispatch_model(model, places, offload_dir=folder, force_hooks=True)


WAYS = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, execution_device=CPU),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device=CPU),
    "dispatch": dispatch,
    "hook": hook_alone,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("warm", [False, True])
def test_offloaded_gradients_equal_those_without_offload(way, warm, tmp_path):
    with patches.applied(*OFFLOAD):
        for training, how in itertools.product((True, False), (None, True, False)):
            expected = step(net(training), None)
            model = net(training)
            if warm:
                step(model, how)
            WAYS[way](model, tmp_path)
            for _ in range(2):
                assert all(map(torch.equal, step(model, how), expected)), (training, how)
            for layer in model.layers[1:]:  # dispatch keeps the first on its device
                assert layer.base.weight.device.type == "meta"
                codes = layer.base.state.CB
                assert codes is None or codes.device.type == "meta", "codes stayed on the execution device"
    with pytest.raises((AttributeError, RuntimeError)):
        model = net(True)
        WAYS[way](model, tmp_path)
        step(model, None)


def test_taking_the_hooks_off_gives_the_model_back(tmp_path):
    with patches.applied(*OFFLOAD):
        expected = step(net(True), None)
        model = net(True)
        WAYS["cpu"](model, tmp_path)
        step(model, None)
        remove_hook_from_module(model, recurse=True)
        assert all(map(torch.equal, step(model, None), expected))
        assert model.layers[0].base.weight.device.type == "cpu"


@pytest.mark.parametrize("training", [True, False])
def test_codes_without_scales_are_an_error_that_names_the_layer(training):
    model = net(training)
    layer = model.layers[1].base
    layer.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False)  # a loader that forgot the scales
    x = torch.randn(2, 4, 64)
    assert float((model(x, None) - net(training)(x, None)).abs().max()) > 1e-2, "silently wrong without the patch"
    with patches.applied(ID) as report:
        assert any("layers.1.base" in note for note in report[ID].notes), "what is damaged already is not named"
    model = net(training)
    model.layers[1].base.weight = bnb.nn.Int8Params(model.layers[1].base.weight.data, requires_grad=False)
    with patches.applied(ID), pytest.raises(RuntimeError, match=r"'layers\.1\.base'.*row scales \(SCB\).*Load"):
        model(x, None)


@pytest.mark.parametrize("training", [True, False])
def test_scales_given_with_the_codes_are_used(training):
    model, x = net(training), torch.randn(2, 4, 64)
    expected = net(training)(x, None)
    layer = model.layers[1].base
    layer.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, SCB=layer.weight.SCB)
    with patches.applied(ID):
        assert torch.equal(model(x, None), expected)


@pytest.mark.parametrize("warm", [False, True])
def test_moving_a_quantized_layer_to_its_own_device_changes_nothing(warm):
    x = torch.randn(2, 4, 64)
    expected = net(False)(x, None)
    with patches.applied(ID):
        model = net(False)
        if warm:
            model(x, None)
        assert torch.equal(model.to("cpu")(x, None), expected)
        assert torch.equal(model.layers[0].base.to("cpu")(x.clone()), net(False).layers[0].base(x))


def test_sound_layers_stay_bit_identical(device):
    def outputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = []
        for threshold, training in itertools.product((0.0, 6.0), (True, False)):
            layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, threshold=threshold).to(device).train(training)
            x = torch.randn(4, 64, device=device)
            found += [layer(x).detach(), layer(x).detach(), *layer.state_dict().values()]
        return found

    before = outputs()
    with patches.applied(ID):
        after = outputs()
    assert len(before) == len(after) and all(map(torch.equal, before, after))


def test_transformers_loads_an_int8_checkpoint_as_it_was_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **size)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    int8 = transformers.BitsAndBytesConfig(load_in_8bit=True)
    ids = torch.arange(8).view(1, 8)

    def load(name: str, **options):
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, device_map={"": "cpu"}, **options)

    with patches.applied(ID), torch.no_grad():
        model = load("float", quantization_config=int8)
        expected = model(ids).logits
        model.save_pretrained(tmp_path / "int8")
        assert torch.equal(load("int8")(ids).logits, expected)
