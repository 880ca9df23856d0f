"""``python -m tests.stacks.flows [WORD ...]``: the main flows on the installed stack, unpatched and patched, as JSON.

Each flow is a program of a user on a tiny Llama that lies on disk. It returns how far it is from its reference (0 is
right), or into how many graphs torch.compile cut it (1 is right). Each runs in a fork of a process that has imported
the stack and changed nothing. With words only the flows that have one of them in their names; those of TRL only where it is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence

from tests import processor
from tests.stacks import asking, jobs, mixtures, models, ranks

KINDS = ("4-bit", "INT8")


def main(words: Sequence[str]) -> None:
    processor.pretend("plain")  # where an eval forward packs 4-bit weights, it computes in bfloat16
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        models.save_base(folder)
        found: dict[str, dict[str, str]] = {}
        for name, flow in FLOWS.items():
            if not is_chosen(name, words) or "TRL" in name and not importlib.util.find_spec("trl"):
                continue
            found[name] = {how: _forked(flow, folder, how == "patched") for how in ("unpatched", "patched")}
            print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps({**found, **ranks.said([cell for cell, name in ranks.cells().items() if is_chosen(name, words)])}))


def is_chosen(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


def _forked(flow: Callable[[str], float | str], folder: str, patched: bool) -> str:
    """What ``flow`` gives in a fork of this process: a figure, or the error that it ends with."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            # torch gives up the pool of threads of the process that was forked where it is first asked for, and two threads
            # of autograd that ask at once abort the process ("Invalid thread pool!"; torch 2.11).
            import torch

            torch.set_num_threads(1)
            if patched:
                import patches

                patches.apply()
            answer = flow(folder)
            said = answer if isinstance(answer, str) else f"{answer:.3g}"
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        os.write(send, said.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"the process ended without an answer, exit code {os.waitstatus_to_exitcode(status)}"


FLOWS: dict[str, Callable[[str], float | str]] = {
    **{f"{kind}: loaded": jobs.load(kind) for kind in KINDS},
    **{f"{kind}: saved, loaded again": jobs.saved(kind) for kind in KINDS},
    **{
        f"{kind}: {'DoRA' if dora else 'LoRA'}, {'reentrant' if reentrant else 'non-reentrant'} checkpoints":
        jobs.checkpointed(kind, dora, reentrant)
        for kind in KINDS for dora in (False, True) for reentrant in (False, True)
    },
    **{f"{kind}: adapter saved, loaded again": jobs.adapter_again(kind) for kind in KINDS},
    **{f"{kind}: Trainer, resumed": jobs.trainer(kind) for kind in KINDS},
    **{f"{kind or '16 bits'}: offloaded, LoRA": jobs.offloaded(kind) for kind in (None, *KINDS)},
    **{f"{kind}: offloaded, DoRA": jobs.offloaded(kind, dora=True) for kind in KINDS},
    **{f"{kind or '16 bits'}: offloaded, saved": jobs.offloaded_saved(kind) for kind in (None, *KINDS)},
    **{f"{kind or '16 bits'}: offloaded, merged": jobs.offloaded_merged(kind) for kind in (None, *KINDS)},
    **{f"{kind or '16 bits'}: device map, LoRA": jobs.dispatched(kind) for kind in (None, *KINDS)},
    **{f"{kind}: device map, DoRA": jobs.dispatched(kind, dora=True) for kind in KINDS},
    **{f"{kind or '16 bits'}: device map, adapter loaded": jobs.adapter_dispatched(kind) for kind in (None, *KINDS)},
    **{f"{kind}: device map, quantized checkpoint": jobs.checkpoint_dispatched(kind) for kind in KINDS},
    **{f"{kind}: device map, merged, saved": jobs.dispatched_merged(kind) for kind in KINDS},
    **{f"{kind}: asked for by keyword": asking.by_keyword(kind) for kind in KINDS},
    **{f"{kind}: skipped by a part of a path": asking.skipped(kind) for kind in KINDS},
    **{f"{kind}: tied head, own list": asking.tied(kind) for kind in KINDS},
    **{f"{kind}: checkpoint in another dtype": asking.in_dtype(kind) for kind in KINDS},
    "4-bit: experts, packed": mixtures.packed(),
    "4-bit: experts, outputs": mixtures.outputs(),
    "4-bit: experts, LoRA with checkpoints": mixtures.trained(),
    "4-bit: experts, saved, loaded again": mixtures.saved(),
    **{
        f"{kind}: dequantized{', offloaded' if offload else ''}": jobs.dequantized(kind, offload)
        for kind in KINDS for offload in (False, True)
    },
    **{f"{kind}: TRL, resumed": jobs.trl(kind, dora=False, checkpointing=False) for kind in KINDS},
    **{f"{kind}: TRL, DoRA, checkpoints, resumed": jobs.trl(kind, dora=True, checkpointing=True) for kind in KINDS},
    **{
        f"{kind}: compiled, {'DoRA, checkpoints' if both else 'LoRA'}": jobs.compiled(kind, both, both)
        for kind in KINDS for both in (False, True)
    },
    **{
        f"{kind}: graphs, {'DoRA' if dora else 'LoRA'}{', checkpoints' if checkpointing else ''}":
        jobs.graphs(kind, dora, checkpointing)
        for kind in KINDS for dora in (False, True) for checkpointing in (False, True)
    },
}  # fmt: skip


def is_right(name: str, said: str) -> bool:
    """Whether what a flow said is what it should."""
    return said == ("1" if ": graphs" in name else "0")


if __name__ == "__main__":
    main(sys.argv[1:])
