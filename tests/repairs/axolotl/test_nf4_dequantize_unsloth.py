"""unsloth itself, imported whole, beside all patches. Without a GPU its own variable lets it be imported.

It is large and brings many packages, so it is installed by hand, into a folder that goes on PYTHONPATH:

    pip install --no-deps --target FOLDER unsloth==2026.9.14 unsloth_zoo==2026.9.9 triton==3.7.0 trl datasets pandas \
        pyarrow multiprocess dill xxhash python-dateutil pytz tzdata six pillow requests urllib3 charset_normalizer
"""

from __future__ import annotations

import importlib.util
import json

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed, see above"),
]

CHECK = """
import json, sys
import patches
if sys.argv[1] == "patched first":
    patches.apply()
import unsloth, torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from unsloth.kernels import fast_lora, utils

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
weight = torch.randn(48, 64, dtype=torch.bfloat16, device=device)
packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
dense = dequantize_4bit(packed, state)
defect = patches.REGISTRY.patches["axolotl-nf4-dequantize"].parts[1].defect
answer = {}
if sys.argv[1] == "patched last":
    answer["before"] = defect().present
patches.apply()
answer["after"] = defect().present
answer["rows"] = {r.id: f"{r.status}: {r.reason}" for r in patches.report()}

def whole(function, *inputs):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)

x, y = (torch.randn(2, 3, n, dtype=torch.bfloat16, device=device) for n in (64, 48))
forward = whole(lambda x: utils.matmul_lora(x, packed, state, None, None, 1.0), x)
backward = whole(lambda y: utils.matmul_lora(y, packed.t(), state, None, None, 1.0), y)
answer["bits"] = torch.equal(forward, x @ dense.t()) and torch.equal(backward, y @ dense)

def trained(function):
    torch.manual_seed(1)
    A, B = torch.randn(8, 64, device=device), torch.randn(48, 8, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, A, B)]
    out = function(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]

lora = trained(lambda x, A, B: whole(lambda *t: fast_lora.LoRA_W.apply(t[0], packed, state, t[1], t[2], 0.5), x, A, B))
plain = trained(lambda x, A, B: x @ dense.t() + 0.5 * (x @ A.t().to(x.dtype)) @ B.t().to(x.dtype))
answer["error"] = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(lora, plain))
print(json.dumps(answer))
"""


@pytest.mark.parametrize("order", ["patched first", "patched last"])
def test_its_lora_kernels_are_one_graph_beside_all_patches(fresh, order, tmp_path):
    """Both orders: the entry point patches before unsloth changes bitsandbytes, ``patches.apply()`` after it."""
    environ = {"UNSLOTH_ALLOW_CPU": "1", "PATCHES_AUTOLOAD": "0"}
    found = json.loads(fresh(CHECK, order, cwd=tmp_path, **environ).splitlines()[-1])  # it writes its cache there
    assert found.get("before", True) and not found["after"]
    assert found["bits"]
    assert found["error"] < 0.02, "bfloat16, in another order of operations"
    rows = found["rows"]
    assert rows["axolotl-nf4-dequantize"].startswith("applied")
    assert (
        rows["transformers-input-grads-hook"].startswith("shadowed")
        and "unsloth" in rows["transformers-input-grads-hook"]
    )
    assert rows["bitsandbytes-bias-written-in-forward"].startswith("shadowed")
    assert not any(row.startswith("failed") for row in rows.values())
