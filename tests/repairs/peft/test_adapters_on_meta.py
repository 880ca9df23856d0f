"""Adapters put on an offloaded model, trained: losses, gradients and adapters of the whole model, bit for bit.

Also of ``peft-modules-to-save-offloaded``, ``peft-modules-to-save-offloaded``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import patches
from tests.repairs.peft import offloading
from tests.repairs.peft.offloading import CHECKPOINTING, KINDS, WAYS, assert_same, lora, offloaded, step, ways, whole

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.one_in(2)


@pytest.mark.parametrize("kind, way", [(kind, way) for kind in KINDS for way in ways(kind)])
def test_get_peft_model(kind, way, base, device):
    with patches.applied():
        model = lora(offloaded(base, kind, way, device))
        assert not any(p.is_meta for name, p in model.named_parameters() if "lora_" in name)
        assert_same(step(model), step(lora(whole(base, kind, device))))


@pytest.mark.parametrize("way", ["from_pretrained", "cpu_offload"])
def test_cast_after_it_was_offloaded(way, base, device):
    """What is kept aside has the dtype from before; it is cast each time that it is brought, in backward as well."""
    with patches.applied():
        got = step(lora(offloaded(base, "plain", way, device).bfloat16()))
        assert_same(got, step(lora(whole(base, "plain", device).bfloat16())))


def test_offloaded_before_it_is_quantized(device):
    """Weights are kept aside then, and each forward quantizes them: they are not the packed weights that backward needs."""
    from accelerate import cpu_offload
    from bitsandbytes.nn import Linear4bit

    def gradients(offload: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4") for _ in range(2))
        )
        cpu_offload(model, execution_device=torch.device(device)) if offload else model.to(device)
        adapted = lora(model, target_modules=["0", "1"], task_type=None)
        adapted(torch.randn(3, 64, device=device)).square().mean().backward()
        return {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}

    with patches.applied():
        assert_same(gradients(offload=True), gradients(offload=False))


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed(kind, checkpointing, base, device):
    def prepared(model: torch.nn.Module) -> torch.nn.Module:
        options = {"use_reentrant": CHECKPOINTING[checkpointing]}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
        return lora(model)

    with patches.applied():
        got = step(prepared(offloaded(base, kind, "dispatch_model", device)))
        assert_same(got, step(prepared(whole(base, kind, device))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_with_accumulation_and_evaluation(kind, base, device):
    """Two optimizer steps of two accumulated backwards each, an evaluation between them."""

    def trained(model: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ids, seen = offloading.IDS.to(device), []
        for _ in range(2):
            model.train()
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(offloading.logits(model))
        return [*seen, *(p.detach() for p in model.parameters() if p.requires_grad)]

    with patches.applied():
        got, expected = (trained(lora(make())) for make in (
            lambda: offloaded(base, kind, "dispatch_model", device), lambda: whole(base, kind, device)))  # fmt: skip
        assert got[2].ne(got[5]).any(), "nothing was learnt"
        assert all(map(torch.equal, got, expected)) and len(got) == len(expected)


@pytest.mark.parametrize("kind, way", [("plain", "from_pretrained"), ("plain", "disk_offload"), ("nf4", "cpu_offload")])
def test_modules_to_save(kind, way, base, device):
    """The copies stay on the device and are trained; the map of the offloaded weights is not copied with them."""

    def model(of: torch.nn.Module) -> torch.nn.Module:
        return lora(of, target_modules=["q_proj"], modules_to_save=["lm_head", "input_layernorm"])

    with patches.applied():
        off = model(offloaded(base, kind, way, device))
        assert_same(step(off), step(model(whole(base, kind, device))))


@pytest.mark.skipif(
    patches.report("peft-modules-to-save-offloaded").results[0].status is patches.Status.NOT_AFFECTED,
    reason="peft has no trainable tokens before 0.15",
)
@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_trainable_tokens(way, base, device):
    def model(of: torch.nn.Module) -> torch.nn.Module:
        return lora(of, target_modules=["q_proj"], trainable_token_indices=[1, 3])

    with patches.applied():
        assert_same(step(model(offloaded(base, "plain", way, device))), step(model(whole(base, "plain", device))))


LINEAR = ["q_proj", "v_proj"]
TUNERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "rslora": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, use_rslora=True, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, use_dora=True, init_lora_weights=False),
    "pissa": lambda: peft.LoraConfig(r=2, target_modules=LINEAR, init_lora_weights="pissa"),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, r=2, total_step=10, target_modules=LINEAR, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=LINEAR, feedforward_modules=[], init_ia3_weights=False),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=LINEAR, init_weights=False),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=LINEAR, init_weights=False),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=LINEAR, init_weights=False),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=LINEAR, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=LINEAR, init_weights=False),
    "ln": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}
QUANTIZED_TOO = {"dora": ("int8", "nf4"), "ia3": ("int8",), "vera": ("nf4",), "oft": ("nf4",), "adalora": ("int8",)}
"""The kinds that have layers of their own for quantized weights."""


@pytest.mark.parametrize(
    "tuner, kind", [(tuner, kind) for tuner in TUNERS for kind in ("plain", *QUANTIZED_TOO.get(tuner, ()))]
)
def test_every_kind_of_adapter(tuner, kind, base, device):
    def model(of: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(of, TUNERS[tuner]()).train()

    with patches.applied():
        expected = step(model(whole(base, kind, device)))
        assert_same(step(model(offloaded(base, kind, "disk_offload", device))), expected)
        if tuner not in ("prompt", "prefix"):  # they ask for the device of the first layer, which is at home here
            assert_same(step(model(offloaded(base, kind, "layer by layer", device))), expected)


def test_a_second_adapter(base, device):
    def model(of: torch.nn.Module) -> torch.nn.Module:
        model = lora(of, target_modules=LINEAR)
        model.add_adapter("other", peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False))
        model.set_adapter("other")
        return model

    with patches.applied():
        for kind in KINDS:
            assert_same(
                step(model(offloaded(base, kind, "disk_offload", device))), step(model(whole(base, kind, device)))
            )


@pytest.mark.parametrize("way", WAYS)
def test_what_is_offloaded_stays_so(way, base: Path, device):
    """After a training step all that was offloaded is on meta again."""
    with patches.applied():
        model = lora(offloaded(base, "plain", way, device))
        before = {name for name, p in model.named_parameters() if p.is_meta}
        step(model)
        assert before and before == {name for name, p in model.named_parameters() if p.is_meta}


def test_preloaded_submodules_are_refused(base, device):
    """A block that brings what is inside it by name would not find it under a new name."""
    from accelerate import cpu_offload

    with patches.applied():
        model = whole(base, "plain", device)
        cpu_offload(model, execution_device=torch.device(device), preload_module_classes=["LlamaDecoderLayer"])
        with pytest.raises(ValueError, match="without preload_module_classes"):
            lora(model)
