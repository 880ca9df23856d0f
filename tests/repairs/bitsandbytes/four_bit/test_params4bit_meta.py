"""4-bit layers and models run and learn under accelerate's offloading as without it."""

from __future__ import annotations

import pytest
import torch

import patches
from patches.engine.gate import satisfied
from patches.repairs.bitsandbytes.four_bit.params4bit_meta import damage

bnb = pytest.importorskip("bitsandbytes")
accelerate = pytest.importorskip("accelerate")

ID = "bitsandbytes-params4bit-meta"


class Net(torch.nn.Module):
    def __init__(self, nested: bool, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(64)
        self.one, self.two = (
            bnb.nn.Linear4bit(
                64, 64, compute_dtype=torch.float32, compress_statistics=nested, quant_type="nf4", **kwargs
            )
            for _ in range(2)
        )

    def forward(self, x):
        return self.two(self.norm(self.one(x)))


WAYS = {
    "cpu_offload": lambda net, device, folder: accelerate.cpu_offload(net, torch.device(device)),
    "disk_offload": lambda net, device, folder: accelerate.disk_offload(net, folder, torch.device(device)),
    "dispatch_model": lambda net, device, folder: accelerate.dispatch_model(
        net, {"norm": device, "one": device, "two": "disk"}, main_device=device, offload_dir=folder
    ),
}


def run(net, training, device):
    """Outputs and input gradients of two passes in a row."""
    torch.manual_seed(1)
    net.train(training)
    results = []
    for _ in range(2):
        x = torch.randn(3, 64).to(device).requires_grad_(training)
        with torch.set_grad_enabled(training):
            y = net(x)
        if training:
            y.square().sum().backward()
            results.append(x.grad)
        results.append(y.detach())
    return results


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("offload", WAYS.values(), ids=WAYS)
def test_equal_to_no_offload(offload, nested, training, device, tmp_path):
    expected = run(Net(nested).to(device), training, device)
    net = Net(nested).to(device)
    with patches.applied(ID):
        offload(net, device, tmp_path)
        assert net.two.weight.is_meta
        assert all(map(torch.equal, run(net, training, device), expected))
        assert net.two.weight.is_meta, "the codes stay on the device"


@pytest.mark.parametrize("nested", [True, False])
def test_one_copy_to_meta_leaves_the_other(nested, device):
    net = Net(nested).to(device)
    state = net.one.weight.quant_state
    tensors = [state.absmax, state.code, *([state.offset, state.state2.absmax] if nested else [])]
    with patches.applied(ID):
        away = net.one.weight.to("meta")
        assert away.is_meta and away.quant_state is state and not net.one.weight.is_meta
        assert net.one.weight.to(device).quant_state is state
    assert state.absmax is tensors[0] and state.code is tensors[1]
    assert not any(tensor.is_meta for tensor in tensors)


def test_a_module_that_torch_refuses_to_move_is_left_as_it_was():
    """``Module.to("meta")`` fails in torch, after asking the parameter; the layer must survive that."""
    net = Net(nested=True).to("cpu")
    expected = run(net, True, "cpu")
    with patches.applied(ID):
        with pytest.raises(RuntimeError, match="Creating a Parameter"):
            net.one.to("meta")
        assert all(map(torch.equal, run(net, True, "cpu"), expected))


def test_other_moves_take_the_statistics_along():
    """A move within the CPU, as the state sees it: ``QuantState.to`` is called as before."""
    net = Net(nested=True).to("cpu")
    kept = dict(vars(net.one.weight.quant_state))
    with patches.applied(ID):
        net.to("cpu").to(torch.device("cpu"), non_blocking=True)
    assert all(vars(net.one.weight.quant_state)[name] is value for name, value in kept.items())


def test_weights_that_lost_their_statistics_before_are_named():
    net = Net(nested=False).to("cpu")
    with patches.applied(ID):
        net.one.weight.to("meta")
        assert damage() == ()
    net.two.weight.to("meta")
    (words,) = damage()
    assert words.startswith("the quantization state of a 4-bit weight of shape (64, 64) is on the meta device")


@pytest.mark.parametrize("nested", [True, False])
def test_a_skeleton_of_a_model_leaves_the_model(nested, device):
    net = Net(nested).to(device)
    x = torch.randn(3, 64).to(device)
    expected = net(x)
    with patches.applied(ID), torch.no_grad():
        skeleton = {name: parameter.to("meta") for name, parameter in net.named_parameters()}
        assert torch.equal(net(x), expected)
    assert skeleton["one.weight"].is_meta and skeleton["one.weight"].quant_state is net.one.weight.quant_state


@pytest.mark.parametrize("rows, columns", [(64, 64), (1, 64), (64, 1), (2, 1)], ids=str)
def test_moves_of_what_a_user_made_of_codes_are_as_before(rows, columns):
    """Whatever is no codes but does not look like the weights either: casts by hand, pieces, codes by other names."""
    torch.manual_seed(0)
    if rows * columns % 64 and not satisfied("bitsandbytes>=0.47"):
        pytest.skip("0.46.1 quantizes whole blocks alone on a CPU")
    layer = bnb.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compress_statistics=False).to("cpu")
    made = [layer.weight.to(torch.int32), layer.weight.to(torch.float64), layer.weight]
    before = [weight.to("cpu") for weight in made]
    with patches.applied(ID):
        after = [weight.to("cpu") for weight in made]
    for one, two in zip(before, after):
        assert type(one) is type(two) and one.dtype is two.dtype and torch.equal(one, two)
        assert two.quant_state is layer.weight.quant_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_under_a_state_are_quantized_as_without_it(dtype):
    """A checkpoint's weights, with the attributes of the quantized weight whose place they take."""
    net, weights = Net(True).to("cpu"), torch.randn(64, 64).to(dtype)
    expected = bnb.nn.Params4bit(weights.clone(), quant_type="nf4").to("cpu")
    with patches.applied(ID, "bitsandbytes-constructor-kwargs"):
        made = bnb.nn.Params4bit(weights, requires_grad=False, **vars(net.one.weight)).to("cpu")
    assert torch.equal(made.data, expected.data) and made.quant_state.dtype is dtype
    assert torch.equal(made.quant_state.absmax, expected.quant_state.absmax)
    assert made.quant_state is not net.two.weight.quant_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.cpu()], ids=["to", "cpu"])
def test_what_is_written_into_the_weight_of_a_layer_is_moved_as_before(move, dtype):
    """``weight.data = dequantized``, as before an export to another format."""
    net = Net(True).to("cpu")
    for layer in (net.one, net.two):
        values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        layer.weight.data = values.to(dtype)
    expected = {name: parameter.data.clone() for name, parameter in net.named_parameters()}
    with patches.applied(ID):
        move(net)
    assert all(torch.equal(parameter.data, expected[name]) for name, parameter in net.named_parameters())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama from disk in 4 bit, LoRA on every linear layer."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=how, device_map="cpu", dtype=torch.float32
    )
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, lora).train()
    model.enable_input_require_grads()
    return model


def test_lora_on_a_half_offloaded_llama(llama, tmp_path):
    """Loss and every gradient, bit for bit, whatever the checkpointing."""
    tokens = torch.arange(16)[None]

    def train(use_reentrant=None):
        llama.zero_grad()
        if use_reentrant is not None:
            llama.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in llama.named_parameters() if p.requires_grad}
        return {"loss": loss.detach(), **grads}

    expected = train()
    assert len(expected) == 1 + 2 * 7 * 2
    second = [m for m in llama.model.model.layers[1].modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(second) == 7
    with patches.applied(ID):
        for at, layer in enumerate(second):
            if at % 2:
                accelerate.cpu_offload(layer, torch.device("cpu"))
            else:
                accelerate.disk_offload(layer, tmp_path / str(at), torch.device("cpu"))
        assert all(layer.weight.is_meta for layer in second)
        for how in (None, True, False):
            results = train(how)
            assert all(torch.equal(results[name], expected[name]) for name in expected), how
