"""An eager step of LoRA with gradient checkpointing does what it does without the patches, and no more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import patches

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_in(2)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TARGETS = {"q and v": ["q_proj", "v_proj"], "all": "all-linear"}  # the first is peft's default for a Llama
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
KINDS = {
    "4-bit": FOUR_BIT,
    "4-bit nested": {**FOUR_BIT, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=32)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(folder: Path, kind: str, targets: str) -> torch.nn.Module:
    config = transformers.BitsAndBytesConfig(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": torch.device("cpu")}, dtype=torch.float32, quantization_config=config
    )
    model.config.use_cache = False
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=TARGETS[targets], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora).train()


class Products(TorchDispatchMode):
    """Counts matrix products and kernels of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "bitsandbytes" or function in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
        ):
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def step(model: torch.nn.Module) -> tuple[list[torch.Tensor], Counter[str]]:
    """The loss and the gradients of a step, and its products."""
    model.zero_grad()
    with Products() as products:
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)], products.count


def saved_bytes(model: torch.nn.Module) -> int:
    """What saved-tensor hooks carry in a forward without checkpointing."""
    model.gradient_checkpointing_disable()
    seen = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=IDS, labels=IDS).loss.backward()
    return seen


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_products_of_the_same_bits_and_no_weight_carried(folder, kind, targets):
    model = load(folder, kind, targets)
    step(model)  # settles the layers
    expected, products = step(model)
    carried = saved_bytes(load(folder, kind, targets))
    with patches.applied():
        model = load(folder, kind, targets)
        step(model)
        got, patched_products = step(model)
        assert patched_products == products and sum(products.values()) > 26
        assert all(map(torch.equal, got, expected))
        assert saved_bytes(load(folder, kind, targets)) <= carried
