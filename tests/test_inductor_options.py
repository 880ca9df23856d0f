"""``patches.compile_options``: what is refused, and that what is accepted reaches forward and backward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import patches

torch = pytest.importorskip("torch")

from patches.inductor_options import ALLOWED  # noqa: E402

UNUSUAL = {"coordinate_descent_tuning": True, "epilogue_fusion": False}
"""The opposite of torch's defaults."""


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple]]:
    """What Inductor sees when it generates a graph: (backward or forward, thread, the two options of UNUSUAL)."""
    import torch._inductor.config as config
    from torch._inductor.graph import GraphLowering

    seen: list[tuple] = []
    codegen = GraphLowering.codegen

    def spy(self, *args, **kwargs):
        values = {name: getattr(config, name) for name in UNUSUAL}
        seen.append(("backward" if self.is_backward else "forward", threading.current_thread().name, values))
        return codegen(self, *args, **kwargs)

    monkeypatch.setattr(GraphLowering, "codegen", spy)
    # a cache of its own: what is found in one is not generated (and turning caches off is per thread)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch.compiler.reset()
    yield seen
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """No test may leave torch or accelerate changed, whatever it raised."""
    before = torch.compile, torch.compile.__code__, set(vars(torch))
    yield
    assert (torch.compile, torch.compile.__code__) == before[:2]
    assert not [name for name in set(vars(torch)) - before[2] if name.startswith("_patches")]


def elsewhere(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, run in another thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(work).result()


def train(compiled) -> None:
    """One forward here, its backward in another thread, as autograd does on CUDA."""
    y = compiled(torch.randn(8, 8, requires_grad=True))
    elsewhere(lambda: y.sum().backward())


def function(x):
    return x @ x  # products alone need no C++ compiler, which would take most of the time


def config_of(compiled) -> dict:
    """The options that a compiled module carries, as torch keeps them."""
    backend = compiled.dynamo_ctx.callback
    while not isinstance(backend, torch._TorchCompileInductorWrapper):
        backend = backend._torchdynamo_orig_backend
    return backend.config


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nope", "max_autotune", "max-autotune-gemm", "trace.enabled"])
def test_an_option_that_is_not_allowed_lists_those_that_are(name):
    with pytest.raises(ValueError, match=f"{name!r}: unknown; allowed are .*epilogue_fusion \\(bool\\)") as error:
        patches.compile_options({name: True})
    assert all(option in str(error.value) for option in ALLOWED)


@pytest.mark.parametrize("value", ["yes", 1, None, 0.0])
@pytest.mark.parametrize("name", ALLOWED)
def test_a_value_of_another_type_lists_what_is_allowed(name, value):
    with pytest.raises(TypeError, match=f"of type {type(value).__name__}, not bool; allowed are .*shape_padding"):
        patches.compile_options({name: value})


def test_an_unknown_mode_lists_the_modes():
    with pytest.raises(ValueError, match="allowed are .*reduce-overhead.*max-autotune"):
        patches.compile_options({}, mode="fast")


def test_all_ten_are_in_this_torch_and_accepted_by_it():
    assert len(ALLOWED) == 10 and set(ALLOWED) <= set(torch._inductor.list_options())
    torch.compile(function, **patches.compile_options(dict.fromkeys(ALLOWED, False)))


def test_a_with_in_which_nothing_was_compiled_is_an_error():
    with pytest.raises(RuntimeError, match="compiled nothing"), patches.compile_options(UNUSUAL):
        pass
    with pytest.raises(RuntimeError, match="compiled nothing"), patches.compile_options(UNUSUAL):
        torch.compile(function, backend="aot_eager")


def test_an_error_inside_the_with_is_the_one_that_is_seen():
    with pytest.raises(ZeroDivisionError), patches.compile_options(UNUSUAL):
        raise ZeroDivisionError


# -- what is delivered -------------------------------------------------------------------------------


def test_as_arguments_they_reach_a_backward_compiled_in_another_thread(lowered):
    train(torch.compile(function, **patches.compile_options(UNUSUAL)))
    assert lowered == [("forward", "MainThread", UNUSUAL), ("backward", "other_0", UNUSUAL)]


def test_in_a_with_they_reach_a_backward_compiled_after_it_in_another_thread(lowered):
    from torch import compile as alias

    train(torch.compile(lambda x: x @ x @ x))  # another function: the cache would have this one afterwards
    usual = lowered.copy()  # of this process: torchao sets some when it quantizes a model
    assert len(usual) == 2 and UNUSUAL not in [options for _, _, options in usual]
    lowered.clear()
    torch.compiler.reset()
    with patches.compile_options(UNUSUAL):
        compiled = alias(function)
    train(compiled)
    assert lowered == [("forward", "MainThread", UNUSUAL), ("backward", "other_0", UNUSUAL)]
    lowered.clear()
    torch.compiler.reset()
    train(torch.compile(function))
    assert [options for _, _, options in lowered] == [options for _, _, options in usual]


def test_the_mode_is_merged_and_the_options_go_before_it():
    both = patches.compile_options({"coordinate_descent_tuning": False}, mode="max-autotune-no-cudagraphs")
    assert both["options"] == {"max_autotune": True, "coordinate_descent_tuning": False}
    module = torch.compile(torch.nn.Linear(2, 2), **both)
    assert config_of(module) == both["options"]


def test_the_mode_and_the_options_of_a_call_inside_the_with():
    with patches.compile_options({"epilogue_fusion": False}, mode="max-autotune-no-cudagraphs"):
        plain = torch.compile(torch.nn.Linear(2, 2), mode="default")
        named = torch.compile(torch.nn.Linear(2, 2), mode="reduce-overhead")
        own = torch.compile(torch.nn.Linear(2, 2), options={"epilogue_fusion": True})
    mode = {"max_autotune": True, "coordinate_descent_tuning": True}
    assert config_of(plain) == {**mode, "epilogue_fusion": False}
    assert config_of(named) == {"triton.cudagraphs": True, "epilogue_fusion": False}
    assert config_of(own) == {**mode, "epilogue_fusion": True}


def test_an_inner_with_goes_before_an_outer_one():
    outer = patches.compile_options({"epilogue_fusion": False, "shape_padding": False})
    with outer, patches.compile_options({"epilogue_fusion": True}):
        inner = torch.compile(torch.nn.Linear(2, 2))
    assert config_of(inner) == {"epilogue_fusion": True, "shape_padding": False}


def test_another_thread_is_not_in_the_with():
    with patches.compile_options(UNUSUAL):
        theirs = elsewhere(lambda: torch.compile(torch.nn.Linear(2, 2)))
        mine = torch.compile(torch.nn.Linear(2, 2))
    assert config_of(theirs) == {} and config_of(mine) == UNUSUAL


def test_torch_does_not_empty_what_is_used_twice():
    options = patches.compile_options(UNUSUAL, dynamic=True)
    torch.compile(function, **options)
    options["options"].clear()
    assert dict(options) == {"options": UNUSUAL, "dynamic": True}


# -- CUDA graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"dynamic": True}, {"sample_packing": True}])
def test_cuda_graphs_with_changing_shapes_warn(how):
    cause = next(iter(how)).replace("_", " ")
    with pytest.warns(UserWarning, match=f"triton.cudagraphs with {cause}"):
        patches.compile_options({"triton.cudagraphs": True}, **how)
    with pytest.warns(UserWarning, match=f"triton.cudagraphs with {cause}"):
        patches.compile_options({}, mode="reduce-overhead", **how)


def test_cuda_graphs_with_a_dynamic_call_inside_the_with_warn():
    options = patches.compile_options({"triton.cudagraphs": True})
    with options, pytest.warns(UserWarning, match="dynamic shapes"):
        torch.compile(torch.nn.Linear(2, 2), dynamic=True)


def test_no_warning_without_cuda_graphs_or_with_fixed_shapes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patches.compile_options({"triton.cudagraphs": False}, mode="reduce-overhead", dynamic=True)
        patches.compile_options({"triton.cudagraphs": True}, dynamic=False)
        patches.compile_options({"epilogue_fusion": False}, dynamic=True, sample_packing=True)


# -- accelerate and the Trainer ----------------------------------------------------------------------


@pytest.fixture
def accelerate():
    module = pytest.importorskip("accelerate")
    module.state.AcceleratorState._reset_state(True)
    before = vars(module.Accelerator)["prepare_model"]
    yield module
    assert vars(module.Accelerator)["prepare_model"] is before
    module.state.AcceleratorState._reset_state(True)


def test_as_a_plugin_of_accelerate(accelerate, lowered):
    options = patches.compile_options(UNUSUAL, mode="max-autotune-no-cudagraphs")
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=options.plugin(dynamic=False))
    assert config_of(accelerator.prepare(torch.nn.Linear(8, 8))) == {"max_autotune": True, **UNUSUAL}
    with pytest.raises(ValueError, match="mode"):
        options.plugin(mode="max-autotune")
    with pytest.raises(ValueError, match="options of Inductor"):
        options.plugin(backend="aot_eager")


def test_regions_of_accelerate(accelerate):
    from accelerate.utils import compile_regions

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    with patches.compile_options(UNUSUAL):
        model = compile_regions(Model())
    assert [config_of(layer) for layer in model.layers] == [UNUSUAL, UNUSUAL]


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x, labels=None):
        return {"loss": (labels @ self.linear(x).T).view(())}


def trainer(tmp_path, **arguments):
    from transformers import Trainer, TrainingArguments

    rows = [{"x": torch.ones(4), "labels": torch.zeros(4)} for _ in range(4)]
    quiet = dict(
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, max_steps=2, per_device_train_batch_size=1
    )
    return Trainer(Tiny(), TrainingArguments(str(tmp_path), **quiet, **arguments), train_dataset=rows)


MERGED = pytest.mark.release("test_as_a_plugin_of_accelerate, and the tests of the mode that is merged")


@pytest.mark.parametrize("mode", [None, pytest.param("max-autotune-no-cudagraphs", marks=MERGED)])
def test_a_trainer_that_compiles(accelerate, lowered, tmp_path, mode):
    pytest.importorskip("transformers")
    one = trainer(tmp_path, torch_compile=True, torch_compile_mode=mode)
    with patches.compile_options(UNUSUAL):
        one.train()
    assert {(kind, tuple(options.items())) for kind, _, options in lowered} == {
        ("forward", tuple(UNUSUAL.items())),
        ("backward", tuple(UNUSUAL.items())),
    }


def test_a_trainer_that_does_not_compile_is_told_before_the_first_step(accelerate, tmp_path):
    pytest.importorskip("transformers")
    one = trainer(tmp_path)
    with pytest.raises(RuntimeError, match="torch_compile=True"), patches.compile_options(UNUSUAL):
        one.train()
    assert one.state.global_step == 0


def test_a_model_compiled_inside_the_with_may_be_prepared_uncompiled(accelerate):
    with patches.compile_options(UNUSUAL):
        model = accelerate.Accelerator(cpu=True).prepare(torch.compile(torch.nn.Linear(2, 2)))
    assert config_of(model) == UNUSUAL


def test_importing_patches_imports_no_torch(fresh):
    assert fresh("import patches, sys; print('torch' in sys.modules)") == "False\n"
