"""axolotl's own module, from its own distribution, in a process where it is all there is of axolotl.

Fetches the distribution; run with ``-m slow``. Without a GPU a stand-in takes the place of the C
functions: it computes what they do, through the pointers that it is given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECK = """
import ctypes, json, sys
import numpy as np, torch
import bitsandbytes as bnb, bitsandbytes.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
CODE = F.get_4bit_type("nf4", device="cpu")

def at(pointer, kind, count):
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (count,))

def blockwise(code, codes, absmax, out, blocksize, count, *stream):
    n, b = count.value, blocksize.value
    scale = np.repeat(at(absmax, ctypes.c_float, -(-n // b)), b)[:n]
    at(out, ctypes.c_float, n)[:] = at(code, ctypes.c_float, 256)[at(codes, ctypes.c_ubyte, n)] * scale

def nf4(_, packed, absmax, out, blocksize, count, *stream):
    n, b = count.value, blocksize.value
    bytes_ = at(packed, ctypes.c_ubyte, n // 2)
    index = torch.from_numpy(np.stack((bytes_ >> 4, bytes_ & 15), -1).reshape(-1).astype(np.int64))
    value = CODE[index] * torch.from_numpy(np.repeat(at(absmax, ctypes.c_float, -(-n // b)), b)[:n].copy())
    at(out, ctypes.c_int16, n)[:] = value.to(torch.bfloat16).view(torch.int16).numpy()

class Library:
    cdequantize_blockwise_fp32 = staticmethod(blockwise)
    cdequantize_blockwise_fp16_nf4 = cdequantize_blockwise_bf16_nf4 = staticmethod(nf4)

if device == "cpu":
    real, F.lib = F.lib, Library()
from axolotl.kernels import quantize
from axolotl.kernels.quantize import dequantize  # a copy of the name, as kernels.lora has
if device == "cpu":
    F.lib = real
    quantize.CUDA_STREAM = 0  # the stream that it would ask a GPU for

import patches
from patches.repairs.reproducers.graphs import count_graphs

torch.manual_seed(0)
weight = torch.randn(48, 64, dtype=torch.bfloat16, device=device)
x = torch.randn(2, 64, dtype=torch.bfloat16, device=device)
packed, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
call = lambda x, packed: x @ dequantize(packed.t(), state)
eager, before = call(x, packed), count_graphs(call, x, packed)
kept = dequantize(packed, state)
with patches.applied("axolotl-nf4-dequantize"):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x, packed)
    traced = torch.compile(dequantize, fullgraph=True, backend="aot_eager")(packed, state)
    print(json.dumps({
        "finding": patches.REGISTRY.patches["axolotl-nf4-dequantize"].parts[0].defect().present,
        "before": before,
        "after": count_graphs(call, x, packed),
        "eager unchanged": torch.equal(dequantize(packed, state), kept),
        "library": torch.equal(kept, F.dequantize_4bit(packed, state)),
        "bits": torch.equal(compiled, eager) and torch.equal(traced, kept),
    }))
"""


@pytest.fixture(scope="module", params=["0.16.1", "0.17.0"])
def axolotl(request, tmp_path_factory) -> Path:
    """A folder with ``axolotl.kernels.quantize`` and the metadata of its distribution, and nothing else."""
    folder = tmp_path_factory.mktemp("axolotl")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, f"axolotl=={request.param}"], capture_output=True, text=True)
    files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    if not files:
        pytest.skip(f"axolotl {request.param} cannot be fetched: {done.stderr[-200:]}")
    if files[0].suffix == ".whl":
        text = zipfile.ZipFile(files[0]).read("axolotl/kernels/quantize.py")
    else:
        archive = tarfile.open(files[0])
        name = next(n for n in archive.getnames() if n.endswith("src/axolotl/kernels/quantize.py"))
        text = archive.extractfile(name).read()
    kernels = folder / "axolotl" / "kernels"
    kernels.mkdir(parents=True)
    for package in (kernels, kernels.parent):
        (package / "__init__.py").touch()
    (kernels / "quantize.py").write_bytes(text)
    metadata = folder / f"axolotl-{request.param}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: axolotl\nVersion: {request.param}\n")
    return folder


def test_one_graph_of_the_same_bits(axolotl, fresh):
    import os

    path = os.pathsep.join(filter(None, [str(axolotl), os.environ.get("PYTHONPATH"), os.getcwd()]))
    found = json.loads(fresh(CHECK, PYTHONPATH=path).splitlines()[-1])
    assert found.pop("before") > 1
    assert found == {"finding": False, "after": 1, "eager unchanged": True, "library": True, "bits": True}
