"""The stack with functions of it wrapped by wrapt, and the two programs that show why the plugin does not use wrapt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import patches
from patches import REGISTRY, Status
from patches.engine.targets import holder_of
from tests import releases
from tests.engine.wrappers import Counter
from tests.snapshot import SNAPSHOT

wrapt = pytest.importorskip("wrapt", reason="the wrappers are wrapt's")
bnb = pytest.importorskip("bitsandbytes", reason="its functions are wrapped")
peft = pytest.importorskip("peft", reason="its functions are wrapped")
transformers = pytest.importorskip("transformers", reason="its functions are wrapped")

PROGRAMS = Path(__file__).parent
HOW = (PROGRAMS.parents[1] / "docs" / "how.md").read_text("utf-8")
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


# -- why the plugin does not use wrapt: docs/how.md ---------------------------------------------------------


@releases.of_the_newest
@pytest.mark.parametrize(
    ("whose", "seconds", "said"),
    [
        ("wrapt", "4", "wrapt: 2 of 2 threads still wait, hook called 0 times"),
        ("patches", "120", "patches: 0 of 2 threads still wait, hook called 1 times"),
    ],
)
def test_two_threads_that_import_at_once(fresh, whose, seconds, said):
    """If the threads of wrapt end one day, docs/how.md has to say so."""
    assert fresh(RUN, str(PROGRAMS / "wrapt_imports.py"), whose, seconds).strip() == said
    assert f"\n{said}\n" in HOW


@releases.of_the_newest
def test_a_wrapper_and_a_rewritten_function_under_torch_compile(fresh):
    """If Dynamo calls the wrapper one day, docs/how.md has to say so."""
    said = fresh(RUN, str(PROGRAMS / "wrapt_compiled.py"))
    assert said in HOW and [line.count("compiled 2") for line in said.splitlines()] == [0, 0, 3]
    assert said.count("AssertionError") == 2


# -- all functions that are rewritten ------------------------------------------------------------------------

EVERY_TARGET = """
import json
import wrapt
from patches.engine.edits import Rewrite
from patches.engine.targets import holder_of, unwrapped
load()
sites = {e.target for p in here for e in REGISTRY.edits(p) if isinstance(e, Rewrite) and e.reach is None}
codes, raws = {}, {}
for t in sites:
    owner, name = holder_of(t)
    raws[t] = vars(owner)[name]
    function = unwrapped(raws[t], t)
    codes[t] = function, function.__code__

def call(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)

def wrap():
    for t in sites:
        owner, name = holder_of(t)
        wrapt.wrap_function_wrapper(sys.modules[t.partition(":")[0]], t.partition(":")[2], call)
    return {t: raw(t) for t in sites}

def raw(t):
    owner, name = holder_of(t)
    return vars(owner)[name]

def states():
    return {r.id: str(r.status) for r in patches.report()}

def put_back():
    for t in sites:
        owner, name = holder_of(t)
        setattr(owner, name, raws[t])

patches.apply(strict=True)
expected = states()
assert len(sites) > 100 and list(expected.values()).count("applied") > 50
patches.revert()

before = wrap()
patches.apply(strict=True)
assert states() == expected
assert all(f.__code__ is not c for f, c in codes.values())
patches.revert()
assert all(raw(t) is before[t] for t in sites) and all(f.__code__ is c for f, c in codes.values())
put_back()

patches.apply(strict=True)
after = wrap()
other = {i: s for i, s in states().items() if s != expected[i]}
assert other == dict.fromkeys(json.loads(sys.argv[1]), "shadowed"), other
patches.revert()
assert {r.id for r in patches.report().with_status(Status.APPLIED, Status.SHADOWED)} == set(other)
assert all(raw(t) is after[t] for t in sites) and all(f.__code__ is c for f, c in codes.values())
"""


ATTRIBUTES_TOO = ["bitsandbytes-linear4bit-sharded-state-dict", "peft-modules-to-save-offloaded"]
"""Patches that set an attribute which another patch rewrites: a wrapper that came after stands in the way of a revert."""


@releases.of_the_newest
def test_every_function_that_is_rewritten_may_be_wrapped_before_or_after(forked):
    forked(SNAPSHOT + EVERY_TARGET, json.dumps(ATTRIBUTES_TOO))


# -- some of them at work ------------------------------------------------------------------------------------


@pytest.fixture(params=["wrapped before", "wrapped after"])
def wrapped(request, monkeypatch):
    """Wrap the function that a patch rewrites, apply the patch (in the order of the parameter), and count the calls."""

    def do(patch_id: str, target: str) -> Counter:
        module, _, path = target.partition(":")
        owner, name = holder_of(target)
        monkeypatch.setattr(owner, name, vars(owner)[name])  # so that it is put back
        counter = Counter()
        if request.param == "wrapped after":
            patches.apply(patch_id, strict=True)
        wrapper = wrapt.wrap_function_wrapper(sys.modules[module], path, counter)
        patches.apply(patch_id, strict=True)
        assert patches.report(patch_id)[patch_id].status is Status.APPLIED
        assert vars(owner)[name] is wrapper
        return counter

    return do


@pytest.mark.parametrize(
    ("patch_id", "target"),
    [
        ("bitsandbytes-integer-input", "bitsandbytes.nn.modules:Linear4bit.forward"),
        ("accelerate-dequantized-in-place", "accelerate.hooks:set_module_tensor_to_device"),
        ("bitsandbytes-int8-input-dimensions", "bitsandbytes.autograd._functions:MatMul8bitLt.backward"),
        ("bitsandbytes-absmax-dtype", "bitsandbytes.functional:QuantState.from_dict"),
        ("transformers-load-in-keyword", "transformers.modeling_utils:PreTrainedModel.from_pretrained"),
        ("peft-lora-bias-merge", "peft.tuners.lora.bnb:Linear8bitLt.merge"),
    ],
    ids=["method", "name in another module", "autograd function", "classmethod of bitsandbytes", "classmethod of transformers", "method of peft"],
)  # fmt: skip
def test_the_defect_is_gone_through_the_wrapper(wrapped, patch_id, target):
    patch = REGISTRY.patches[patch_id]
    if not REGISTRY.is_for(patch):
        pytest.skip("the installed release does not have this defect")
    REGISTRY.import_targets(patch)
    assert any(part.defect() for part in patch.parts), "it is there without the patch"
    counter = wrapped(patch_id, target)
    assert not [part.name for part in patch.parts if part.defect().present] and counter.calls
    patches.revert(patch_id)
    assert any(part.defect() for part in patch.parts), "the original code is under the wrapper again"


def test_each_call_is_counted_once(wrapped):
    layer = bnb.nn.Linear8bitLt(32, 16, has_fp16_weights=False).to("cpu").eval()
    forward = wrapped("bitsandbytes-bias-written-in-forward", "bitsandbytes.nn.modules:Linear8bitLt.forward")
    backward = wrapped("bitsandbytes-int8-input-dimensions", "bitsandbytes.autograd._functions:MatMul8bitLt.backward")
    function = wrapped("bitsandbytes-int8-outlier-columns", "bitsandbytes:matmul")
    x = torch.ones(2, 3, 4, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape and forward.instances == [layer]
    assert (backward.calls, function.calls) == (1, 1)


# -- attributes that the patches set over a wrapped original ---------------------------------------------------


def test_a_wrapped_method_of_a_layer_gets_its_instance(monkeypatch):
    target = "bitsandbytes.nn.modules:Linear4bit._save_to_state_dict"
    owner, name = holder_of(target)
    monkeypatch.setattr(owner, name, vars(owner)[name])
    counter = Counter()
    wrapper = wrapt.wrap_function_wrapper(owner, name, counter)
    patches.apply("bitsandbytes-linear4bit-sharded-state-dict", strict=True)
    layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu")
    assert "weight.absmax" in layer.state_dict() and counter.instances == [layer]
    patches.revert()
    assert vars(owner)[name] is wrapper


def test_a_wrapped_method_of_an_adapter_gets_its_instance(monkeypatch):
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    monkeypatch.setattr(TrainableTokensLayer, "update_layer", TrainableTokensLayer.update_layer)
    counter = Counter()
    wrapt.wrap_function_wrapper(TrainableTokensLayer, "update_layer", counter)
    patch = REGISTRY.patches["peft-modules-to-save-offloaded"]
    part = next(part for part in patch.parts if part.name == "trainable_token_indices")
    with patches.applied(patch.id):
        assert not part.defect()
    assert [type(layer) for layer in counter.instances] == [TrainableTokensLayer]


def test_a_wrapped_constructor_of_a_parameter_is_called():
    from patches.repairs.bitsandbytes.layers.constructor_kwargs import make_new

    counter = Counter()
    wrapper = wrapt.FunctionWrapper(staticmethod(lambda cls, data: data), counter)
    assert make_new(wrapper).__func__(object, data=3, _is_hf_initialized=True) == 3 and counter.calls == 1


def test_a_wrapped_method_of_accelerate_gets_its_instance():
    from types import SimpleNamespace

    from patches.inductor_options import _require_inductor_backend

    class Accelerator:
        state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value="NO")))

        def prepare_model(self, model):
            return model

    counter, accelerator = Counter(), Accelerator()
    wrapper = wrapt.wrap_function_wrapper(Accelerator, "prepare_model", counter)
    assert _require_inductor_backend(wrapper)(accelerator, "a model") == "a model"
    assert counter.instances == [accelerator]
