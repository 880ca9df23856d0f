"""How long the folder of a quantized model on the disk lives: with its model, whatever ends the load or the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from patches.offload import stale_offload_folders, weight_files
from tests.repairs.patched_once import unpatched  # noqa: F401
from tests.repairs.transformers.on_disk import assert_a_second_try_works, left, load, logits, make

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "plain"
    make().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(plain, tmp_path_factory):
    return logits(load(plain, offload_folder=tmp_path_factory.mktemp("off")))


@pytest.fixture
def off(tmp_path):
    return tmp_path / "off"


def test_two_models_in_one_folder(plain, off, expected):
    one, two = (load(plain, offload_folder=off) for _ in range(2))
    assert len(left(off)) == 2
    assert torch.equal(logits(one), expected)
    del one
    assert len(left(off)) == 1
    assert torch.equal(logits(two), expected)
    del two
    assert left(off) == []


def test_loading_it_where_loading_it_whole_has_failed(plain, off, expected):
    """The error that is handled meanwhile is none of this load."""
    try:
        raise torch.OutOfMemoryError("the model does not fit")
    except torch.OutOfMemoryError:
        model = load(plain, offload_folder=off)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("when", ["the first file", "the last but one"])
def test_an_interrupt(when, plain, off, expected):
    """Ctrl-C while files are written."""
    wanted = 1 if when == "the first file" else 12

    def interrupt():
        late = time.monotonic() + 60
        while len(list(off.glob("*/*.safetensors"))) < wanted and time.monotonic() < late:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(number, frame):
        if frame.f_code.co_filename == torch.storage.__file__:  # a moment later: torch would make a ValueError of it
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    waiting = threading.Thread(target=interrupt)
    waiting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            load(plain, offload_folder=off)
            time.sleep(60)
    finally:
        waiting.join()
        signal.signal(signal.SIGINT, before)
    assert_a_second_try_works(plain, off, expected)


def test_reading_runs_without_a_mode(monkeypatch, plain, off):
    """A mode of torch runs Python for each operation, where torch would make another error of an interrupt."""
    loading = pytest.importorskip("transformers.core_model_loading", reason="transformers 4 has another loader")
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    read, modes = loading._materialize_copy, []
    monkeypatch.setattr(
        loading, "_materialize_copy", lambda *args: (modes.append(_get_current_dispatch_mode()), read(*args))[1]
    )
    load(plain, offload_folder=off)
    assert modes and set(modes) == {None}


PROGRAM = """
    import os, signal, sys
    import torch, transformers, bitsandbytes, patches
    patches.apply()
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.LlamaForCausalLM.from_pretrained(
        sys.argv[1], device_map={"": "cpu", "model.layers": "disk"}, offload_folder=sys.argv[2], quantization_config=how
    )
    assert len(os.listdir(sys.argv[2])) == 1
"""


def test_the_end_of_a_process(forked, plain, off):
    forked(PROGRAM, str(plain), str(off))
    assert os.listdir(off) == []


def test_an_error_at_the_end_of_a_process(forked, plain, off):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        forked(PROGRAM + "\n    1 / 0", str(plain), str(off))
    assert os.listdir(off) == []


def test_a_process_that_is_killed(forked, plain, off, expected):
    """As where memory runs out: the next load removes what it left."""
    with pytest.raises(AssertionError):
        forked(PROGRAM + "\n    os.kill(os.getpid(), signal.SIGKILL)", str(plain), str(off))
    (stays,) = os.listdir(off)
    model = load(plain, offload_folder=off)
    assert len(os.listdir(off)) == 1 and stays not in os.listdir(off)
    assert torch.equal(logits(model), expected)


HOLDS = """
import os, sys
from patches.offload.weight_files import Folder
folder = Folder(sys.argv[1])
child = os.fork()
if child:
    print(folder.path, child, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), 9)
os.setsid()
sys.stdin.close()
import time
time.sleep(600)
"""


def test_a_folder_of_a_process_that_lives_is_left_alone(off):
    """Also of one that was forked and outlives the process that wrote it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(off)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    path, child = process.stdout.readline().decode().split()
    try:
        stale_offload_folders.remove_stale_folders(str(off))
        assert os.path.isdir(path)
        process.stdin.close()
        process.wait(60)
        stale_offload_folders.remove_stale_folders(str(off))
        assert os.path.isdir(path), "the forked process may read it"
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()
    late = time.monotonic() + 60
    while os.path.isdir(path) and time.monotonic() < late:  # the system ends it
        stale_offload_folders.remove_stale_folders(str(off))
    assert not os.path.isdir(path)


def test_a_folder_of_another_machine_is_left_alone(off):
    """Its locks may not be seen here."""
    mine = weight_files.Folder(str(off))
    there = Path(off / f"{stale_offload_folders.FOLDER_PREFIX}there")
    there.mkdir()
    (there / "in-use").write_bytes(b"another boot")
    stale_offload_folders.remove_stale_folders(str(off))
    assert there.is_dir() and os.path.isdir(mine.path)
