"""Merging into offloaded layers and out of them again: the answers of the whole model, and no file of the user's changed."""

from __future__ import annotations

import pytest
import torch

import patches
from tests.repairs.peft.offloading import IDS, KINDS, logits, lora, offloaded, quantization, save_base, ways, whole

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

pytestmark = pytest.mark.one_in(2)

ALL = [(kind, way) for kind in KINDS for way in ways(kind)]


@pytest.mark.parametrize("kind, way", ALL)
def test_merge_and_unload(kind, way, base, device):
    checkpoint = (base / "model.safetensors").read_bytes()
    with patches.applied():
        got, expected = lora(offloaded(base, kind, way, device)), lora(whole(base, kind, device))
        away = {name for name, p in got.base_model.model.named_parameters() if p.is_meta}
        got, expected = got.merge_and_unload(), expected.merge_and_unload()
        for _ in range(2):  # the second forward brings the weights anew
            assert torch.equal(logits(got), logits(expected))
        still = {name for name, p in got.named_parameters() if p.is_meta}
    assert still == {name.replace(".base_layer", "") for name in away}
    assert (base / "model.safetensors").read_bytes() == checkpoint


@pytest.mark.parametrize("kind, way", ALL)
def test_merged_and_unmerged(kind, way, base, device):
    """``merge_adapter``, a forward without adapters, which takes them out, ``merge_adapter`` again, ``unmerge_adapter``."""
    with patches.applied():
        answers = []
        for model in (lora(offloaded(base, kind, way, device)), lora(whole(base, kind, device))):
            seen = [logits(model)]
            model.merge_adapter()
            seen.append(logits(model))
            with model.disable_adapter():
                seen.append(logits(model))
            model.merge_adapter()
            model.unmerge_adapter()
            answers.append([*seen, logits(model)])
            with model.disable_adapter():
                assert torch.equal(logits(model), seen[2])
        assert all(map(torch.equal, *answers))
        assert not torch.equal(answers[0][0], answers[0][2]), "the adapter changes nothing"


@pytest.mark.parametrize("kind, way", [("plain", "from_pretrained"), ("int8", "cpu_offload"), ("nf4", "disk_offload")])
def test_another_adapter_is_set_while_one_is_merged(kind, way, base, device):
    """peft takes the merged one out first."""
    with patches.applied():
        answers = []
        for model in (lora(offloaded(base, kind, way, device)), lora(whole(base, kind, device))):
            torch.manual_seed(2)
            model.add_adapter("other", model.peft_config["default"])
            seen = [logits(model)]
            model.merge_adapter()
            model.set_adapter("other")
            answers.append([*seen, logits(model)])
        assert all(map(torch.equal, *answers))
        assert not torch.equal(*answers[0]), "the adapters answer alike"


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_a_copy_that_was_merged_leaves_the_original(use_dora, base, device):
    import copy

    with patches.applied():
        model = lora(offloaded(base, "plain", "from_pretrained", device), target_modules=["q_proj"], use_dora=use_dora)
        before, copied = logits(model), copy.deepcopy(model)
        assert torch.equal(logits(copied), before)
        copied.merge_and_unload()
        assert torch.equal(logits(model), before)
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(whole(base, "plain", device)))


@pytest.mark.parametrize("way", ways("int8"))
def test_a_merge_that_changes_no_code(way, base, device):
    """A magnitude of DoRA alone scales whole rows: all of it is in the row scales of INT8."""
    with patches.applied(), torch.no_grad():
        models = [
            lora(model, target_modules=["down_proj"], use_dora=True, init_lora_weights=True)
            for model in (offloaded(base, "int8", way, device), whole(base, "int8", device))
        ]
        for model in models:
            for name, p in model.named_parameters():
                if "magnitude" in name:
                    p.mul_(2)
        got, expected = (logits(model.merge_and_unload()) for model in models)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind, base, device):
    with patches.applied():
        models = lora(offloaded(base, kind, "disk_offload", device)), lora(whole(base, kind, device))
        got, expected = (
            model.eval().generate(input_ids=IDS.to(device), max_new_tokens=4, do_sample=False) for model in models
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("place", ["disk", "cpu"])
@pytest.mark.parametrize("way", ["from_pretrained", "dispatch_model", "cpu_offload", "disk_offload"])
def test_tied_weights(way, place, tmp_path, device):
    """They stay tied; where nothing tells that they were, one is not changed without the other."""
    from transformers import LlamaForCausalLM

    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    options = {"target_modules": ["q_proj", "embed_tokens"]}
    with patches.applied():
        got = lora(offloaded(base, "plain", way, device, {"model.embed_tokens": place, "lm_head": place}), **options)
        expected = lora(LlamaForCausalLM.from_pretrained(base).to(device), **options)
        # accelerate writes a file for each, and copies each from an accelerator.
        if (
            way == "disk_offload"
            or (way == "dispatch_model" and place == "disk")
            or (way == "cpu_offload" and device != "cpu")
        ):
            with pytest.raises(ValueError, match="The two may be tied weights"):
                got.merge_and_unload()
        else:
            assert torch.equal(logits(got.merge_and_unload()), logits(expected.merge_and_unload()))


def test_a_plain_weight_in_an_int8_head(tmp_path, device):
    """Not in the list of skipped modules, the head is quantized, and tied to an embedding that is not."""
    import accelerate
    from transformers import AutoModelForCausalLM

    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    options = quantization("int8", llm_int8_skip_modules=["none"])
    # That patch leaves such a head in floating point; who disables it has this one.
    others = patches.REGISTRY.patches.keys() - {"transformers-tied-head-quantized"}
    with patches.applied(*others, strict=False):
        load = AutoModelForCausalLM.from_pretrained
        got, expected = (load(base, device_map={"": device}, **options) for _ in range(2))
        assert type(got.lm_head).__name__ == "Linear8bitLt" and type(got.lm_head.weight) is torch.nn.Parameter
        accelerate.cpu_offload(got, execution_device=torch.device(device))
        got, expected = (lora(model, target_modules=["lm_head"]) for model in (got, expected))
        assert torch.equal(logits(got), logits(expected))
        assert got.base_model.model.lm_head.base_layer.weight.is_meta


@pytest.mark.parametrize("kind, way", [pair for pair in ALL if pair[0] != "plain"])
def test_unmerged_is_the_base(kind, way, base, device):
    """Bit for bit, over cycles in which the adapter moves; what is kept meanwhile is freed."""
    with patches.applied(), torch.no_grad():
        expected = logits(whole(base, kind, device))
        model = lora(offloaded(base, kind, way, device))
        for scale in (1.0, 1e-3, 1e-5):  # of the smallest only the statistics feel something
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.mul_(scale)
            model.merge_adapter()
            logits(model)
            assert any("_patches_merge_snapshot" in vars(module) for module in model.modules())
            model.unmerge_adapter()
            assert not any("_patches_merge_snapshot" in vars(module) for module in model.modules())
            with model.disable_adapter():
                assert torch.equal(logits(model), expected)
