"""peft's adapters on quantized layers, and a small model of transformers."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from ..catalogue import program
from ..checks import close, same
from ..layers import BOTH, ROWS, Quantized, dequantized

ONE_EACH = ("nf4-double", "int8")
CODES = "the merged weight is quantized anew"


def _says_what_it_is(model: Any, q: Quantized) -> None:
    """As ``from_pretrained`` does; peft chooses its layers by it."""
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = q.kind.cls is Linear4bit, q.kind.cls is Linear8bitLt


class Net(torch.nn.Module):
    """What people fine-tune: a quantized projection and something that is not quantized."""

    def __init__(self, q: Quantized) -> None:
        super().__init__()
        self.proj = q.layer
        self.norm = torch.nn.LayerNorm(ROWS, device=q.device)
        _says_what_it_is(self, q)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x))


def adapted(q: Quantized, seed: int = 0, **options: Any) -> Any:
    """``Net`` under LoRA, whose adapter is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["proj"], "init_lora_weights": False, **options})
    return get_peft_model(Net(q), config)


def delta(model: Any, name: str = "default") -> torch.Tensor:
    """What the adapter adds to the weight."""
    proj = model.base_model.model.proj
    return proj.lora_B[name].weight @ proj.lora_A[name].weight * proj.scaling[name]


def normed(q: Quantized, weight: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.nn.functional.linear(q.x if x is None else x, weight, q.bias)
    return torch.nn.functional.layer_norm(y, (ROWS,))


@program(kinds=BOTH, packs="too", bias=True)
def inferred_and_trained(q: Quantized):
    """Forward in eval and in train, and the gradients of the adapter."""
    model = adapted(q)
    weight = q.weight + delta(model).detach()
    with torch.no_grad():
        yield close(model.eval()(q.x), normed(q, weight), 2 * q.tolerance, q.rounding)
    y = model.train()(q.x)
    yield close(y, normed(q, weight), 2 * q.tolerance, q.rounding)
    y[:, ::2].square().sum().backward()
    found = model.base_model.model.proj.lora_B["default"].weight
    loss = normed(q, q.weight + delta(model))[:, ::2].square().sum()
    yield close(found.grad, torch.autograd.grad(loss, found)[0], 0.1, q.rounding)


@program(kinds=ONE_EACH, packs="too")
def switched_off_and_on(q: Quantized):
    """``disable_adapter`` gives the base model."""
    model = adapted(q).eval()
    with torch.no_grad(), model.disable_adapter():
        yield close(model(q.x), normed(q, q.weight), 2 * q.tolerance, q.rounding)
    with torch.no_grad():
        yield close(model(q.x), normed(q, q.weight + delta(model)), 2 * q.tolerance, q.rounding)


@program(kinds=BOTH, packs="too", bias=True)
def merged_after_an_evaluation(q: Quantized):
    """An evaluation, then ``merge_and_unload``: the rounding of the quantization, and no more."""
    model = adapted(q).eval()
    weight = q.weight + delta(model).detach()
    with torch.no_grad():
        yield close(model(q.x), normed(q, weight), 2 * q.tolerance, q.rounding)
        merged = model.merge_and_unload()
        yield close(merged(q.x), normed(q, weight), 0.25, CODES)
        yield close(dequantized(merged.proj)[0], weight, 0.25, CODES)


@program(kinds=ONE_EACH)
def merged_and_unmerged(q: Quantized):
    """As before each synchronisation with an inference engine, once."""
    model = adapted(q).eval()
    with torch.no_grad():
        model.merge_adapter()
        yield close(model(q.x), normed(q, q.weight + delta(model)), 0.25, CODES)
        model.unmerge_adapter()
        yield close(model(q.x), normed(q, q.weight + delta(model)), 0.25, CODES)


@program(kinds=ONE_EACH, packs="too")
def weight_decomposed(q: Quantized):
    """DoRA, which reads the base weight in each forward: train, evaluate, train."""
    model = adapted(q, use_dora=True)
    for train in (True, False, True):
        y = model.train(train)(q.x)
        weight = q.weight + delta(model).detach()
        magnitude = model.base_model.model.proj.lora_magnitude_vector["default"].weight.detach()
        scaled = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
        yield close(y, normed(q, scaled), 3 * q.tolerance, q.rounding)
        if train:
            y[:, ::2].square().sum().backward()
            yield same(model.base_model.model.proj.lora_A["default"].weight.grad.isfinite().all().item(), True)


@program(kinds=ONE_EACH)
def saved_and_loaded(q: Quantized):
    """``save_pretrained`` of the adapter, and ``from_pretrained`` onto another copy of the base."""
    from peft import PeftModel

    model = adapted(q)
    weight = q.weight + delta(model).detach()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(Net(q.other(seed=0)), folder)
    with torch.no_grad():
        yield close(loaded(q.x), normed(q, weight), 2 * q.tolerance)


@program(kinds=ONE_EACH)
def two_of_them(q: Quantized):
    """A second adapter on the same base, used in turn with the first."""
    from peft import LoraConfig

    model = adapted(q)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False))
    with torch.no_grad():
        for name in ("second", "default", "second"):
            model.set_adapter(name)
            yield close(model(q.x), normed(q, q.weight + delta(model, name)), 2 * q.tolerance)


@program(kinds=(*ONE_EACH, "nf4-float-storage"))
def the_whole_cast(q: Quantized):
    """``PeftModel.half()``: adapters and norms change, codes do not."""
    model = adapted(q)
    weight = q.weight + delta(model).detach()
    with torch.no_grad():
        yield close(model.half()(q.x.half()).float(), normed(q, weight), 3e-2, "rounded to float16 in another order")


def small_model(q: Quantized) -> tuple[Any, Any]:
    """A Llama of one layer with quantized projections, and the same with the dequantized weights."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(q.device)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and not isinstance(module, (Linear4bit, Linear8bitLt)):
            if "lm_head" in name:
                continue
            layer = q.kind.cls(module.in_features, module.out_features, bias=False, **q.kind.options)
            layer.load_state_dict(module.state_dict())
            model.set_submodule(name, layer.requires_grad_(False))
    model = model.requires_grad_(False).to(q.device)
    _says_what_it_is(model, q)
    for name, module in model.named_modules():
        if isinstance(module, (Linear4bit, Linear8bitLt)):
            plain.get_submodule(name).weight.data = dequantized(module)[0]
    return model, plain.requires_grad_(False)


@program(kinds=ONE_EACH, packs="too")
def a_model_evaluated_and_trained(q: Quantized):
    """A causal model with LoRA as peft's guide has it: prepared, checkpointed, one step, one evaluation."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model, plain = small_model(q)
    ids = torch.arange(32, device=q.device).view(2, 16)
    gradients = []
    for each in (model, plain):
        each = prepare_model_for_kbit_training(each, gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        each = get_peft_model(each, config).train()
        each(input_ids=ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in each.parameters() if p.requires_grad]))
    yield close(gradients[0], gradients[1], 0.1, q.rounding)
    with torch.no_grad():
        yield close(model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits, 5e-2, q.rounding)


@program(kinds=ONE_EACH)
def a_model_checkpointed_while_its_base_is_in_eval(q: Quantized):
    """The adapter's model says train, its base is in eval: gradients all the same, and right."""
    from peft import LoraConfig, get_peft_model

    model, plain = small_model(q)
    ids = torch.arange(32, device=q.device).view(2, 16)
    gradients = []
    for each in (model.eval(), plain.eval()):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft_model = get_peft_model(each, config)
        with contextlib.suppress(AttributeError):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            each.enable_input_require_grads()
        peft_model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in peft_model.parameters() if p.requires_grad]))
    yield close(gradients[0], gradients[1], 0.2)


@program(kinds=ONE_EACH, packs="too")
def a_model_that_generates(q: Quantized):
    """Greedy decoding with a cache."""
    model, plain = small_model(q)
    ids = torch.arange(8, device=q.device).view(1, 8)
    outputs = [each.eval()(input_ids=ids, use_cache=True) for each in (model, plain)]
    yield close(outputs[0].logits, outputs[1].logits, 5e-2, q.rounding)
    following = [
        each(input_ids=ids[:, :1], past_key_values=out.past_key_values).logits
        for each, out in zip((model, plain), outputs)
    ]
    yield close(following[0], following[1], 5e-2, q.rounding)
