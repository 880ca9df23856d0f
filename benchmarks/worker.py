"""One configuration of one case in a process of its own, told step by step what to do.

Reads one command a line from standard input and answers each with one line of JSON on what was
standard output when it began; all that libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import cost
from .cases import Case, Job, Size

_MIB = 2**20
_OPAQUE = re.compile(r"aten::(addmm|bmm|mm|_scaled_dot_product_\w+)$|bitsandbytes::|MatMul8bitLt$")
"""Operators that Inductor does not generate code for on a CPU; the last becomes one when it is compiled."""


def save_model(folder: str, size: Size) -> None:
    """Save a Llama of bfloat16 random numbers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=size.sequence,
        use_cache=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Worker:
    """A model that is trained by LoRA, and what is asked about it."""

    _function_of_cpu: Any = None

    def __init__(self, job: Job) -> None:
        self.job = job

    def start(self) -> dict[str, Any]:
        """Import, patch, load. Returns the versions and the patches that are in."""
        import bitsandbytes
        import peft
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        cost.quiet()
        applied, problems = self._patch() if self.job.configuration.patched else ([], {})
        if self.job.case.bits == 8 and self.job.device == "cpu":
            self._as_on_a_gpu()  # after the patches, which look at the function that is replaced here
        torch.manual_seed(0)
        self.model = self._load(self.job.case)
        self.call = self.model
        if self.job.configuration.compiled:
            self.call = torch.compile(self.model, backend=self.job.backend)
        self.ids = torch.randint(
            self.job.size.vocabulary, (self.job.size.batch, self.job.size.sequence), device=self.job.device
        )
        versions = {m.__name__: m.__version__ for m in (torch, bitsandbytes, transformers, peft)}
        return {"versions": versions, "applied": applied, "problems": problems}

    def first(self) -> dict[str, Any]:
        """The first step, which compiles."""
        self._forget_peak()
        seconds, cpu, loss = self._step()
        memory = self._peak()
        return {
            "first_s": seconds,
            "first_cpu_s": cpu,
            "loss": loss,
            "first_peak_mib": memory,
            **self._graphs("first_"),
        }

    def steps(self, count: int) -> dict[str, Any]:
        """``count`` steps: how many seconds each took, and how many of the processor's."""
        seconds, cpu, _ = zip(*(self._step() for _ in range(count)))
        return {"seconds": seconds, "cpu_s": cpu}

    def finish(self) -> dict[str, Any]:
        """Memory and graphs, over the steps since :meth:`settle`; of an eager step on a CPU the ``limit`` too.

        That is the share of its time that goes to operators which a compiler calls as they are, so that no
        compiled step can take less of the eager one. The profiler slows small operators most: a low estimate.
        """
        answer = {"peak_mib": self._peak(), **self._graphs()}
        if self.job.device == "cpu" and not self.job.configuration.compiled:
            answer["limit"] = self._limit()
        return answer

    def settle(self, count: int) -> dict[str, Any]:
        """Untimed steps; the peak of memory counts from their end."""
        self.steps(count)
        self._forget_peak()
        return {}

    def count(self) -> dict[str, int]:
        """Functions and matrix products of a step; then, without checkpointing from now on, bytes that ``save_on_cpu`` carries."""
        from . import counts

        functions = counts.functions(self._step)
        products = counts.products(self._step)
        self.model.gradient_checkpointing_disable()
        carried, weights = counts.carried(self._step)
        return {**functions, "products": products, "carried": carried, "carried_weights": weights}

    def turns(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of the processor of a step in this process, by state, with the patches taken out and put in again."""
        import patches

        found: dict[str, list[float]] = {"unpatched": [], "patched": []}
        changes = [("unpatched", patches.revert), ("patched", patches.apply)]
        for _ in range(rounds):
            for state, change in changes:
                with self._as_on_a_cpu():
                    change()
                self._step()  # Python reads the changed code for the first time
                found[state].append(min(self._step()[1] for _ in range(2)))
        return found

    def calls(self) -> dict[str, dict[str, float]]:
        """Microseconds of small calls, by name and state, with the patches taken out and put in again.

        In one process: of two, one was up to 3 us a call slower than the other, with the patches taken out of it.
        """
        import patches

        found: dict[str, dict[str, float]] = {}
        for state, change in (("unpatched", patches.revert), ("patched", patches.apply)):
            change()
            for name, call in cost.subjects(self.job.device).items():
                microseconds = cost.microseconds(call, self.job.device, budget=0.002, loops=20)
                found.setdefault(name, {})[state] = microseconds
        return found

    def _as_on_a_gpu(self) -> None:
        # On a CPU bitsandbytes takes another function, which knows no outliers; measured is that of a GPU.
        from bitsandbytes.autograd import _functions

        if _functions.MatMul8bitFp is not _functions.MatMul8bitLt:
            Worker._function_of_cpu = _functions.MatMul8bitFp
        _functions.MatMul8bitFp = _functions.MatMul8bitLt

    @contextlib.contextmanager
    def _as_on_a_cpu(self) -> Iterator[None]:
        """With the function that :meth:`_as_on_a_gpu` replaced, which patches look at."""
        from bitsandbytes.autograd import _functions

        now = _functions.MatMul8bitFp
        _functions.MatMul8bitFp = self._function_of_cpu or now
        try:
            yield
        finally:
            _functions.MatMul8bitFp = now

    def _patch(self) -> tuple[list[str], dict[str, str]]:
        import patches

        report = patches.apply()
        bad = report.with_status(patches.Status.CONFLICT, patches.Status.FAILED)
        return [r.id for r in report.with_status(patches.Status.APPLIED)], {r.id: r.reason for r in bad}

    def _load(self, case: Case) -> Any:
        import torch
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        dtype = getattr(torch, self.job.dtype)
        if case.bits == 4:
            config = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
        else:
            config = BitsAndBytesConfig(load_in_8bit=True)  # its threshold is 6
        device_map = {"": self.job.device}
        model = AutoModelForCausalLM.from_pretrained(
            self.job.model, dtype=dtype, device_map=device_map, quantization_config=config
        )
        kind = {"use_reentrant": False}
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=case.checkpointing, gradient_checkpointing_kwargs=kind
        )
        lora = LoraConfig(
            r=8, target_modules=list(case.targets) or "all-linear", use_dora=case.dora, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, lora).train()

    def _step(self) -> tuple[float, float, float]:
        """Forward and backward. Returns seconds, seconds of the processor (compilers it ran too), the loss."""
        self.model.zero_grad(set_to_none=True)
        self._wait()
        begin, cpu = time.perf_counter(), _processor()
        loss = self.call(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self._wait()
        return time.perf_counter() - begin, _processor() - cpu, loss.item()

    def _limit(self) -> float:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.steps(3)
        opaque = whole = 0.0
        for event in profiler.events():
            whole += event.self_cpu_time_total
            above: Any = event
            while above is not None and not _OPAQUE.match(above.name):
                above = above.cpu_parent
            opaque += event.self_cpu_time_total if above is not None else 0
        return opaque / whole

    def _wait(self) -> None:
        if self.job.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def _graphs(self, prefix: str = "") -> dict[str, int]:
        """What Dynamo counted. A frame that is not ``ok`` ran in eager whole, which is no break."""
        from torch._dynamo.utils import counters

        frames = counters["frames"]
        return {
            f"{prefix}graphs": counters["stats"].get("unique_graphs", 0),
            f"{prefix}breaks": sum(counters["graph_break"].values()),
            f"{prefix}eager_frames": frames.get("total", 0) - frames.get("ok", 0),
        }

    def _forget_peak(self) -> None:
        if self.job.device != "cpu":
            import torch

            torch.cuda.reset_peak_memory_stats()
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now

    def _peak(self) -> float:
        """MiB: allocated on the CUDA device, or resident in the process."""
        if self.job.device != "cpu":
            import torch

            return torch.cuda.max_memory_allocated() / _MIB
        try:
            lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            return int(lines["VmHWM"].split()[0]) / 1024
        except (OSError, KeyError):
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _processor() -> float:
    """Seconds that the processor gave this process and what it ran and waited for, such as a compiler."""
    return time.process_time() + sum(os.times()[2:4])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            if verb == "save":
                save_model(arguments[0], Size(**arguments[1]))
                answer: dict[str, Any] = {}
            elif verb == "job":
                worker = Worker(Job.from_dict(arguments[0]))
                answer = {}
            else:
                method: Callable[..., dict[str, Any]] = getattr(worker, verb)
                answer = method(*arguments)
        except Exception as error:  # what crashes in one configuration is a result, not the end of the run
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
