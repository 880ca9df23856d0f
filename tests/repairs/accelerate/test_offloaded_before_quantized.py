"""4-bit layers that were offloaded before anything quantized them: every forward is that of a quantized layer."""

from __future__ import annotations

import pytest
import torch

import patches

bnb = pytest.importorskip("bitsandbytes")
accelerate = pytest.importorskip("accelerate")

ID, META = "accelerate-offloaded-before-quantized", "bitsandbytes-params4bit-meta"
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
WAYS = {
    "cpu_offload": lambda net, folder: accelerate.cpu_offload(net, torch.device("cpu")),
    "disk_offload": lambda net, folder: accelerate.disk_offload(net, folder, torch.device("cpu")),
    "dispatch_model": lambda net, folder: accelerate.dispatch_model(
        net, {"0": "disk", "1": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}


def net(nested: bool = True, quant_storage: torch.dtype = torch.uint8) -> torch.nn.Sequential:
    torch.manual_seed(0)
    options = {"compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": nested}
    options["quant_storage"] = quant_storage
    return torch.nn.Sequential(*(bnb.nn.Linear4bit(64, 64, **options) for _ in range(2))).requires_grad_(False)


def outputs_and_gradients(model: torch.nn.Module, calls: int = 3) -> list[torch.Tensor]:
    found = []
    for _ in range(calls):
        x = X.clone().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize("ids", [(ID,), (ID, META), ()], ids=["alone", "with the statistics kept", "all"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("offload", WAYS.values(), ids=WAYS)
def test_equal_to_a_model_that_was_quantized(offload, nested, ids, tmp_path):
    expected = outputs_and_gradients(net(nested).to("cpu"))
    with patches.applied(*ids):
        model = net(nested)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        offload(model, tmp_path)
        assert all(map(torch.equal, outputs_and_gradients(model), expected))
        assert model[0].weight.is_meta, "and is offloaded again"
        for name, tensor in kept.items():
            assert torch.equal(model[int(name[0])]._hf_hook.weights_map[name[2:]], tensor), "what is kept was changed"


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
def test_storage_of_floating_point_is_told_from_weights(storage):
    """Both are kept in floating point; codes have another shape."""
    expected = net(quant_storage=storage).to("cpu")
    bits = expected[0].weight.data.view(torch.uint8).clone()
    with patches.applied(ID, META):
        for model in (net(quant_storage=storage), net(quant_storage=storage).to("cpu")):
            for layer in model:
                layer.quant_state = None  # as of a layer that was given a weight which was quantized elsewhere
            accelerate.cpu_offload(model, torch.device("cpu"))
            for _ in range(3):
                model[0]._hf_hook.pre_forward(model[0])
                assert torch.equal(model[0].weight.data.view(torch.uint8), bits)
                model[0]._hf_hook.post_forward(model[0], None)
                assert model[0].weight.is_meta


def test_layers_offloaded_one_by_one():
    """Each has two hooks then, in a row."""
    expected = outputs_and_gradients(net().to("cpu"))
    with patches.applied(ID):
        model = net()
        for layer in model:
            accelerate.cpu_offload(layer, torch.device("cpu"))
            assert len(layer._hf_hook.hooks) == 2
        assert all(map(torch.equal, outputs_and_gradients(model), expected))


@pytest.mark.parametrize("offload", WAYS.values(), ids=WAYS)
def test_layers_that_are_quantized_are_not_asked(offload, tmp_path):
    """What their hooks keep is read once a forward, as before."""
    reads = []

    def counted(weights):
        class Counted(type(weights)):
            def __getitem__(self, name):
                reads.append(name)
                return super().__getitem__(name)

        weights.__class__ = Counted

    with patches.applied(ID, META):
        model = net().to("cpu")
        offload(model, tmp_path)
        for layer in model:
            counted(layer._hf_hook.weights_map)
        expected = outputs_and_gradients(net().to("cpu"), 1)
        assert all(map(torch.equal, outputs_and_gradients(model, 1), expected))
    assert sorted(reads) == ["bias", "bias", "weight", "weight"]


def test_without_it_the_cast_weights_are_refused_by_name():
    """``bitsandbytes-params4bit-meta`` keeps a state that looks valid; what is no codes is not read by it."""
    with patches.applied(META):
        model = net()
        accelerate.cpu_offload(model, torch.device("cpu"))
        first = model(X)
        assert first.isfinite().all()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="should hold 2048 bytes of packed weights and holds 4096 bytes of"):
                model(X)
