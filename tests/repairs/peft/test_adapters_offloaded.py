"""A model that has adapters, offloaded: the answer of the whole model, and no training that goes nowhere."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import patches
from tests.repairs.peft import offloading
from tests.repairs.peft.offloading import KINDS, logits, lora, whole

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.one_in(2)

ID = "peft-adapters-offloaded"
ADAPTERS = {
    "LoRA": ("LoraConfig", {"r": 2, "init_lora_weights": False}, KINDS),
    "DoRA": ("LoraConfig", {"r": 2, "init_lora_weights": False, "use_dora": True}, ("plain", "nf4")),
    "IA3": ("IA3Config", {"feedforward_modules": [], "init_ia3_weights": False}, KINDS),
    "VeRA": ("VeraConfig", {"r": 2, "init_weights": False}, KINDS),
    "LoHa": ("LoHaConfig", {"r": 2, "init_weights": False}, ("plain",)),
    "OFT": ("OFTConfig", {"oft_block_size": 8, "init_weights": False}, KINDS),
    "HiRA": ("HiraConfig", {"r": 2, "init_weights": False}, KINDS),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return offloading.save_base(tmp_path_factory.mktemp("base") / "model")


def adapted(name: str, model: Any) -> Any:
    config, options, _ = ADAPTERS[name]
    if not hasattr(peft, config):
        pytest.skip(f"this peft has no {config}")
    torch.manual_seed(1)
    return peft.get_peft_model(model, getattr(peft, config)(target_modules=["q_proj", "v_proj"], **options)).eval()


@pytest.mark.parametrize("name, kind", [(name, kind) for name, (*_, kinds) in ADAPTERS.items() for kind in kinds])
def test_the_answer_is_that_of_the_whole_model(name, kind, base, device):
    with patches.applied():
        expected = logits(adapted(name, whole(base, kind, device)))
        for offload in (accelerate.cpu_offload, accelerate.disk_offload):
            where = {} if offload is accelerate.cpu_offload else {"offload_dir": tempfile.mkdtemp(dir=base.parent)}
            model = offload(adapted(name, whole(base, kind, device)), execution_device=torch.device(device), **where)
            for _ in range(2):
                assert torch.equal(logits(model), expected), offload.__name__
            assert all(p.is_meta for p in model.parameters()), "nothing has stayed"


def test_merged_and_taken_out(base, device):
    with patches.applied():
        before = logits(whole(base, "plain", device))
        reference = adapted("LoHa", whole(base, "plain", device))
        reference.merge_adapter()
        model = accelerate.cpu_offload(
            adapted("LoHa", whole(base, "plain", device)), execution_device=torch.device(device)
        )
        model.merge_adapter()
        assert torch.equal(logits(model), logits(reference))
        model.unmerge_adapter()
        assert torch.allclose(logits(model), logits(adapted("LoHa", whole(base, "plain", device))), atol=1e-5)
        with model.disable_adapter():
            assert torch.allclose(logits(model), before, atol=1e-5)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["whole", "non-reentrant", "reentrant"])
def test_a_step_says_that_the_adapter_cannot_be_trained_there(base, device, checkpointing, made):
    """Unpatched, a LoRA model trains nothing, silently: whether its optimizer is made before it is offloaded or after."""
    with patches.applied():
        model = lora(whole(base, "plain", device))
        old = torch.optim.AdamW(model.parameters(), lr=1e-3)
        accelerate.cpu_offload(model, execution_device=torch.device(device))
        optimizer = old if made == "before" else torch.optim.AdamW(model.parameters(), lr=1e-3)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        ids = offloading.IDS.to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(
            RuntimeError, match="has offloaded adapter weights, such as those of 'base_model.* base model first"
        ):
            optimizer.step()
        resident = torch.nn.Parameter(torch.ones(1, device=device))
        resident.sum().backward()
        torch.optim.SGD([resident], lr=0.5).step()
        assert resident.item() == 0.5


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_to_the_inputs_is_that_of_the_whole_model(base, device, kind, offload):
    """Saliency: as people write it, with ``backward()`` on a model whose adapters want gradients."""

    def of_input(model: Any) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * 5 * 64, device=device).view(2, 5, 64).requires_grad_()
        for _ in range(2):
            x.grad = None
            model(inputs_embeds=x).logits.square().mean().backward()
        return x.grad

    where = {"offload_dir": tempfile.mkdtemp(dir=base.parent)} if offload == "disk_offload" else {}
    with patches.applied():
        expected = of_input(lora(whole(base, kind, device)))
        model = lora(whole(base, kind, device))
        model = getattr(accelerate, offload)(model, execution_device=torch.device(device), **where)
        assert torch.equal(of_input(model), expected)
        assert all(p.grad is None for p in model.parameters()), "as unpatched"


def test_what_is_not_offloaded_is_trained(base, device):
    """One layer is offloaded with its adapters: the others are trained by an optimizer that holds those alone."""

    def trained(model: Any, layer: int) -> dict[str, torch.Tensor]:
        resident = {
            n: p for n, p in model.named_parameters() if p.requires_grad and not p.is_meta and f"layers.{layer}" in n
        }
        optimizer = torch.optim.SGD(resident.values(), lr=0.1)
        ids = offloading.IDS.to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        return resident

    with patches.applied():
        model = lora(whole(base, "plain", device))
        accelerate.cpu_offload(model.base_model.model.model.layers[1], execution_device=torch.device(device))
        offloading.assert_same(trained(model, 0), trained(lora(whole(base, "plain", device)), 0))


def test_after_the_hooks_are_gone_it_is_trained_as_ever(base, device):
    with patches.applied():
        model = accelerate.cpu_offload(lora(whole(base, "plain", device)), execution_device=torch.device(device))
        offloading.logits(model)
        with torch.enable_grad():
            model(input_ids=offloading.IDS.to(device)).logits.sum().backward()
        accelerate.hooks.remove_hook_from_submodules(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        offloading.step(model)
        optimizer.step()


def test_other_gradients_are_those_of_the_whole_model(base, device):
    """Of the input, where the adapters want none or are not asked for theirs."""

    def of_input(model: Any, frozen: bool) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * 5 * 64, device=device).view(2, 5, 64).requires_grad_()
        model.requires_grad_(not frozen)
        loss = model(inputs_embeds=x).logits.square().mean()
        return torch.autograd.grad(loss, x)[0]

    with patches.applied():
        for frozen in (True, False):
            model = accelerate.cpu_offload(lora(whole(base, "plain", device)), execution_device=torch.device(device))
            assert torch.equal(of_input(model, frozen), of_input(lora(whole(base, "plain", device)), frozen))


def test_what_is_put_on_an_offloaded_model_is_trained_as_ever(base, device):
    with patches.applied():
        model = lora(offloading.offloaded(base, "plain", "cpu_offload", device))
        offloading.assert_same(offloading.step(model), offloading.step(lora(whole(base, "plain", device))))


def test_other_modules_get_no_hooks(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.ones(1))}))
    with patches.applied(ID):
        accelerate.cpu_offload(model, execution_device=torch.device(device))
    assert not any(module._forward_pre_hooks for module in model.modules())
