"""Quantized experts under FSDP2 on two ranks: packed on each, and the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", minversion="2.7", reason="FSDP2 of torch 2.6 gathers nothing on a CPU")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("transformers", minversion="5", reason="experts are linear layers before 5")

WORKER = """
    import json, sys, torch, torch.distributed as dist
    import bitsandbytes, transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from patches.experts import dense_operations
    from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts
    from patches.experts.tensor import QuantizedExperts, as_parameter

    out, mode = sys.argv[1:]
    hows = {"double": QuantizationConfig("nf4", True, torch.uint8), "int8": QuantizationConfig("int8", False, torch.int8, 6.0)}
    how = hows.get(mode, QuantizationConfig("nf4", False, torch.uint8))

    def model(experts=4):
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=32, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=experts, num_experts_per_tok=2,
        )
        made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
        made.requires_grad_(False)
        for layer in made.model.layers:
            for name, count in (("gate_up_proj", 2), ("down_proj", 1)):
                weight = torch.randn(getattr(layer.mlp.experts, name).shape) / 8
                parameter = as_parameter(split_and_quantize_experts(weight, count, how))
                if mode == "transposed":
                    parameter = as_parameter(split_and_quantize_experts(weight.mT.contiguous(), 1, how), swapped=True)
                setattr(layer.mlp.experts, name, parameter)
            layer.mlp.gate.weight.requires_grad_(True)
        if mode != "lora":
            return made
        import peft

        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
        return peft.get_peft_model(made, lora)

    def step(made):
        ids = torch.arange(24)[None] % 32
        result = made(input_ids=ids, labels=ids)
        result.loss.backward()
        grads = {n: p.grad for n, p in made.named_parameters() if p.grad is not None}
        return result.logits.detach(), {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in grads.items()}

    dist.init_process_group("gloo")
    experts = 3 if mode == "uneven" else 4
    expected, gradients = step(model(experts))
    made, mesh = model(experts), init_device_mesh("cpu", (2,))
    whole = sum(p.nbytes for p in made.parameters() if isinstance(p, QuantizedExperts))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mode == "mixed" else None)
    for layer in made.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(made, mesh=mesh, mp_policy=policy)
    held = [p.to_local() for n, p in made.named_parameters() if "experts" in n and "lora" not in n]
    found = {"whole": whole, "held": sum(p.nbytes for p in held), "kinds": sorted({type(p).__name__ for p in held})}
    for _ in range(2):
        made.zero_grad()
        logits, grads = step(made)
    found["logits"] = float((logits - expected).norm() / expected.norm())
    assert grads.keys() == gradients.keys() and grads
    found["gradients"] = max(float((grads[n] - gradients[n]).norm() / gradients[n].norm()) for n in grads)
    found["trained"] = sum("lora" in n and "experts" in n for n in grads)
    found["dense"] = sum(dense_operations.COUNTS.values())
    with open(f"{out}/{dist.get_rank()}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
"""


def ranks(two_ranks, tmp_path, mode, program=WORKER):
    import textwrap

    worker = Path(tmp_path) / "worker.py"
    worker.write_text(textwrap.dedent(program))
    return two_ranks(worker, tmp_path, mode)


@pytest.mark.parametrize(
    "mode",
    [
        "plain",
        *(pytest.param(m, marks=pytest.mark.release("plain")) for m in ("double", "int8", "mixed", "transposed")),
    ],
)
def test_two_ranks(two_ranks, tmp_path, mode):
    rounds = 2e-2 if mode == "mixed" else 1e-5
    for found in ranks(two_ranks, tmp_path, mode):
        assert found["kinds"] == ["Experts8bit" if mode == "int8" else "Experts4bit"]
        assert found["held"] < 0.6 * found["whole"] and not found["dense"]
        assert found["logits"] < rounds and found["gradients"] < 5 * rounds


@pytest.mark.release("test_two_ranks, and tests/experts/test_lora_factors.py on one rank")
def test_lora_on_experts(two_ranks, tmp_path):
    pytest.importorskip("peft", minversion="0.19", reason="it adapts experts from 0.19 on")
    for found in ranks(two_ranks, tmp_path, "lora"):
        assert found["kinds"] == ["Experts4bit"] and found["held"] < 0.6 * found["whole"] and not found["dense"]
        assert found["trained"] == 2 * 2 * 2
        assert found["logits"] < 1e-5 and found["gradients"] < 5e-5


@pytest.mark.release("test_two_ranks")
def test_three_experts_on_two_ranks(two_ranks, tmp_path):
    """As before: in floating point, and counted."""
    for found in ranks(two_ranks, tmp_path, "uneven"):
        assert found["kinds"] == ["Tensor"] and found["dense"]
        assert found["logits"] < 1e-5 and found["gradients"] < 5e-5


STATES = """
    import json, sys, torch, torch.distributed as dist
    import bitsandbytes, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from patches.experts import dense_operations
    from patches.experts.quantize import QuantizationConfig, split_and_quantize_experts
    from patches.experts.tensor import as_parameter

    out, mode = sys.argv[1:]
    swapped = mode == "transposed"

    def made(seed=0):
        torch.manual_seed(seed)
        module = torch.nn.Module()
        experts = split_and_quantize_experts(torch.randn(4, 32, 64), 1 if swapped else 2, QuantizationConfig("nf4", True, torch.uint8))
        module.w = as_parameter(experts, swapped=swapped)
        return module

    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    sharded = lambda seed, **options: fully_shard(made(seed), mesh=mesh, **options)
    model, expected = sharded(0), made().w.dequantize()
    mine, full, found = expected[2 * rank : 2 * rank + 2], StateDictOptions(full_state_dict=True), {}

    def off(experts, values):
        return [type(experts).__name__, float((experts.dequantize() - values).abs().max())]

    dcp.save({"m": get_model_state_dict(model)}, checkpoint_id=f"{out}/dcp")
    other = sharded(1)
    state = {"m": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=f"{out}/dcp")
    set_model_state_dict(other, state["m"])
    found["dcp"] = off(other.w.to_local(), mine)
    other = made(1)
    dcp.load({"m": other.state_dict()}, checkpoint_id=f"{out}/dcp")
    found["dcp, not sharded"] = off(other.w, expected)
    found["full"] = off(get_model_state_dict(model, options=full)["w"], expected)
    other = sharded(1)
    set_model_state_dict(other, made().state_dict(), options=full)
    found["from a full one"] = off(other.w.to_local(), mine)
    other = sharded(0, offload_policy=CPUOffloadPolicy(pin_memory=False))
    other.unshard()
    found["offloaded"] = off(other.w, expected)
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump([found, sum(dense_operations.COUNTS.values())], file)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("mode", ["", pytest.param("transposed", marks=pytest.mark.release("the other case"))])
def test_state_dicts_and_checkpoints_stay_packed(two_ranks, tmp_path, mode):
    for found, dense in ranks(two_ranks, tmp_path, mode, STATES):
        assert len(found) == 5 and set(map(tuple, found.values())) == {("Experts4bit", 0.0)}, found
        assert not dense
