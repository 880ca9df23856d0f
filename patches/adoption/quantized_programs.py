"""Programs on quantized weights that bitsandbytes and its neighbours run right without a patch.

On a processor with AVX512-BF16 bitsandbytes repacks 4-bit weights in an eval forward, which a patch repairs. So no
program reads, saves or trains 4-bit weights after it has evaluated them, nor makes a digest of them.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from .digests import digest_of_results
from .tiny import (
    llama_4bit,
    llama_int8,
    logits_of,
    plain_llama,
    saved_and_loaded_adapter,
    token_ids,
    train_two_steps,
    with_lora,
)


def call_4bit() -> str:
    import torch

    exact, double = llama_4bit(), llama_4bit(bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True)
    packed = digest_of_results(exact.state_dict(), double.state_dict())
    return digest_of_results(packed, logits_of(exact), logits_of(double))


def call_int8() -> str:
    model = llama_int8()
    return digest_of_results(model.state_dict(), logits_of(model), logits_of(model))


def generate_4bit() -> str:
    import torch

    model = llama_4bit().eval()
    ids = token_ids()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **options
    )
    return digest_of_results(out.sequences, out.logits)


def train_lora(load: Callable[[], Any], use_reentrant: bool | None = None) -> str:
    from peft import prepare_model_for_kbit_training

    if use_reentrant is None:
        model = prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)
    else:
        model = prepare_model_for_kbit_training(load(), gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model = with_lora(model)
    return digest_of_results(train_two_steps(model), model.state_dict())


def save_and_load_adapter(load: Callable[[], Any]) -> str:
    loaded = saved_and_loaded_adapter(with_lora(load()), load())
    packed = digest_of_results(loaded.state_dict())
    return digest_of_results(packed, logits_of(loaded))


def save_and_load_4bit() -> str:
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model = llama_4bit(bnb_4bit_use_double_quant=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = load_file(f"{folder}/model.safetensors")
        loaded = LlamaForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    packed = digest_of_results(model.state_dict(), file, loaded.state_dict())
    return digest_of_results(packed, logits_of(loaded))


def copy_and_pickle_layers() -> str:
    import torch
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    torch.manual_seed(0)
    x = torch.randn(4, 64)
    results: list[Any] = []
    for layer in (
        Linear4bit(64, 128, compute_dtype=torch.float32, quant_type="nf4").to("cpu"),
        Linear8bitLt(64, 128, has_fp16_weights=False).to("cpu"),
    ):
        saved = io.BytesIO()
        torch.save(layer, saved)
        saved.seek(0)
        copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(saved, weights_only=False)
        results += [[each.state_dict(), each(x)] for each in (layer, *copies)]
    return digest_of_results(results)


def train_with_8bit_optimizer() -> str:
    from bitsandbytes.optim import AdamW8bit

    model = plain_llama()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    return digest_of_results(train_two_steps(model, optimizer), [optimizer.state[each] for each in model.parameters()])


PROGRAMS: Mapping[str, Callable[[], str]] = {
    "load a Llama in 4 bits and call it": call_4bit,
    "load a Llama in INT8 and call it": call_int8,
    "generate with a 4-bit Llama": generate_4bit,
    "train a LoRA on a 4-bit Llama": functools.partial(train_lora, llama_4bit),
    "train a LoRA on a 4-bit Llama, reentrant checkpointing": functools.partial(train_lora, llama_4bit, True),
    "train a LoRA on a 4-bit Llama, non-reentrant checkpointing": functools.partial(train_lora, llama_4bit, False),
    "train a LoRA on an INT8 Llama": functools.partial(train_lora, llama_int8),
    "train a LoRA on an INT8 Llama, reentrant checkpointing": functools.partial(train_lora, llama_int8, True),
    "save a LoRA of a 4-bit Llama and load it": functools.partial(save_and_load_adapter, llama_4bit),
    "save a 4-bit Llama and load it": save_and_load_4bit,
    "copy and pickle quantized layers": copy_and_pickle_layers,
    "train a plain Llama with an 8-bit optimizer": train_with_8bit_optimizer,
}
"""By what a user does."""
