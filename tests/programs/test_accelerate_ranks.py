"""``Accelerator.save_state`` and ``load_state`` of a sharded model and its optimizer, on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from patches.engine import gate
from tests.programs.models import save_llama
from tests.programs.test_fsdp2_trainer import KINDS

pytestmark = pytest.mark.release("tests/distributed loads what other numbers of ranks saved, without accelerate")
WORKER = Path(__file__).with_name("accelerate_ranks.py")


@pytest.mark.parametrize("writers, readers", [(2, 1), (1, 2)])
def test_resumed_on_another_number_of_ranks(writers, readers, two_ranks, tmp_path):
    kinds = [*KINDS, *(f"{kind}-8bit" for kind in KINDS if gate.satisfied("bitsandbytes>=0.50"))]
    save_llama(tmp_path / "model", seed=0)
    run = [str(tmp_path / "model"), *kinds]
    written = two_ranks(WORKER, tmp_path / "written", *run, ranks=writers)
    resume = ["--resume", str(tmp_path / "written")]
    read = two_ranks(WORKER, tmp_path / "read", *run, *resume, ranks=readers)
    assert (len(written), len(read)) == (writers, readers)
    for kind in kinds:
        for state_dict, expected in written[0][kind].items():
            for rank in (answer[kind][state_dict] for answer in read):
                assert rank["ranks"] == readers and rank["parameters"] == ["DTensor"]
                assert rank["8 bits"] == expected["8 bits"] == kind.endswith("-8bit")
                assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-4), (kind, state_dict)
