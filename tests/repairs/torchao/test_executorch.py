"""Released ExecuTorch: its own quantizers, a cast, XNNPACK, and the program in its runtime.

``executorch`` pins its own torch; ``pip install --no-deps executorch`` beside torch 2.13 works, its
other requirements (ruamel.yaml, flatbuffers, pytorch-tokenizers, …) by hand.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
utils = pytest.importorskip("torchao.utils", reason="torchao is not installed")
for name in ("exir", "runtime", "export.stages", "examples.models.llama.source_transformation.quantize"):
    pytest.importorskip(f"executorch.{name}", reason="executorch is not installed, or not whole")

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.examples.models.llama.source_transformation.quantize import quantize
from executorch.exir import to_edge_transform_and_lower
from executorch.export.recipe import AOQuantizationConfig, QuantizationRecipe
from executorch.export.stages import PipelineArtifact, SourceTransformStage
from executorch.runtime import Runtime
from torchao.quantization import Int8DynamicActivationIntxWeightConfig
from torchao.quantization.granularity import PerGroup

import patches

X = torch.linspace(-2, 2, 8 * 64).view(8, 64)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)
    return torch.nn.Sequential(*layers).bfloat16().eval()


def quantized() -> torch.nn.Module:
    """By the function behind ``export_llama --qmode 8da4w``."""
    return quantize(model(), "8da4w", group_size=32, quantize_with_hqq=False)


def staged() -> torch.nn.Module:
    """By the stage that export recipes use: it quantizes and unwraps."""
    config = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))
    stage = SourceTransformStage(QuantizationRecipe(ao_quantization_configs=[AOQuantizationConfig(config)]))
    stage.run(PipelineArtifact({"forward": copy.deepcopy(model())}, {}))
    return stage.get_artifacts().data["forward"]


PATHS = {
    "quantize() and float()": ("torchao-cast-drops-dtype", lambda: quantized().float()),
    "quantize(), unwrap and to()": (
        "torchao-unwrap-frozen-dtype",
        lambda: utils.unwrap_tensor_subclass(quantized()).to(torch.float32),
    ),
    "SourceTransformStage and to()": ("torchao-unwrap-frozen-dtype", lambda: staged().to(torch.float32)),
}


@torch.no_grad()
@pytest.mark.parametrize("path", PATHS)
def test_the_program_in_the_runtime_is_eager(path):
    patch, build = PATHS[path]
    expected = quantized().to(torch.float32)(X)  # never unwrapped, cast by its own to()
    with patches.applied(patch):
        program = torch.export.export(build(), (X,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    (out,) = Runtime.get().load_program(lowered.buffer).load_method("forward").execute([X])
    assert out.dtype == torch.float32
    # XNNPACK's integer kernels add up in another order than eager does.
    assert ((out - expected).norm() / expected.norm()).item() < 1e-5
