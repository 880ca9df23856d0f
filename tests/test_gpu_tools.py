"""What runs on a machine with a GPU, as far as a machine without one can show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.gpu import __main__ as gpu
from tools.gpu import steps, wheels

FILES = [
    "bitsandbytes/__init__.py",
    *(f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda118", "cuda128", "rocm64")),
]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "bitsandbytes-0.0.1-py3-none-any.whl"
    info = "bitsandbytes-0.0.1.dist-info"
    texts = dict.fromkeys(FILES, "")
    texts[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.0.1\n"
    texts[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_with_one_cuda_library_installs(wheel, tmp_path):
    (tmp_path / "slim").mkdir()
    slim = wheels.slim(wheel, tmp_path / "slim", {"cpu", "cuda128"}.__contains__)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(slim)], check=True, capture_output=True)
    assert sorted(path.name for path in (site / "bitsandbytes").glob("*.so")) == [
        "libbitsandbytes_cpu.so",
        "libbitsandbytes_cuda128.so",
    ]
    assert "rocm" not in next(site.glob("*.dist-info/RECORD")).read_text()


def test_a_cuda_version_that_the_wheel_lacks_is_an_error_that_lists_what_it_has(wheel, tmp_path):
    (tmp_path / "slim").mkdir()
    with pytest.raises(ValueError, match="cuda118, cuda128"):
        wheels.slim(wheel, tmp_path / "slim", {"cpu", "cuda999"}.__contains__)
    assert not any((tmp_path / "slim").iterdir())


def test_what_is_missing_is_said_before_anything_is_done(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    output = ["--output", str(tmp_path / "output")]
    assert gpu.main(output) == 2
    assert "make gpu-wheels" in capsys.readouterr().err
    assert gpu.main(["smok", *output]) == 2
    assert "there are smoke, report, does_not_fit" in capsys.readouterr().err
    assert gpu.main(["--minutes", "0", *output]) == 2
    assert "--minutes must be more than 0" in capsys.readouterr().err
    (tmp_path / "bitsandbytes-0.50.2-py3-none-any.whl").touch()
    monkeypatch.setattr(gpu, "no_device", lambda: "torch sees no CUDA device")
    assert gpu.main(output) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_a_folder_with_other_files_is_left_alone(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.txt").touch()
    assert gpu.main(["--rehearse", "--output", str(tmp_path)]) == 2
    assert "mine.txt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_results_fit_into_eight_files_and_limits_into_the_time():
    plan = steps.steps(2)
    assert len({step.file for step in plan}) == len(plan) <= 7, "and run.json"
    fixed = [step.seconds for step in plan if step.seconds < steps.REST]
    assert len(fixed) == len(plan) - 1 and plan[-1].seconds == steps.REST
    assert sum(fixed[:3]) < 60 * steps.MINUTES / 2, "what is worth most is done in half of the time"


def test_tests_with_a_device_are_found():
    found = steps.with_device()
    assert "tests/repairs/torch/test_fsdp_packed_weights_nan.py" in found and "tests/device/cases_moves.py" in found
    assert all((ROOT / file).is_file() for file in found)


def rehearsed(folder: Path, minutes: str, *names: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "tools.gpu", "--rehearse", "--minutes", minutes, "--output", str(folder), *names]
    # The pytest that it starts is no worker of the one that runs here.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert (folder / "run.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "run.json").read_text())["steps"]


def test_a_rehearsal_leaves_a_file_for_each_step_that_began(tmp_path):
    """In less than a minute, which is too short for most: they are cut off, and one that no time is left for does not begin."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    minutes = 0.7
    code, ended = rehearsed(tmp_path, str(minutes), "smoke", "training", "tests")
    assert code == 1 and list(ended) == ["smoke", "training", "tests"]
    for name, step in ended.items():
        began = step["ended"] != "not begun"
        assert (tmp_path / step["file"]).exists() is began, name
        assert not began or step["seconds"] <= step["limit"] + gpu.GRACE + 5, name
    (training,) = (step for step in steps.steps(2) if step.name == "training")
    assert ended["training"]["ended"] == "cut off"
    assert ended["training"]["limit"] <= training.seconds * minutes / steps.MINUTES + 0.1
    assert ended["smoke"]["ended"] == "cut off" or json.loads((tmp_path / "smoke.json").read_text())


@pytest.mark.release("less than a minute of it, in which most steps are cut off")
def test_a_rehearsal_with_time_passes(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    code, ended = rehearsed(tmp_path, "20")
    assert {name: step["ended"] for name, step in ended.items()} == dict.fromkeys(ended, "passed"), ended
    assert code == 0 and len(ended) == len(steps.steps(2))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"run.json", *(step.file for step in steps.steps(2))} and len(written) <= 8
    assert list(json.loads((tmp_path / "training.json").read_text())["cases"]) == ["nf4", "int8"]
    smoke, fit, experts, verify = (
        json.loads((tmp_path / name).read_text())
        for name in ("smoke.json", "does_not_fit.json", "experts_on_device.json", "verify.json")
    )
    assert smoke["statuses"]["applied"] and set(smoke["layers"]) == {"NF4", "NF4, nested", "INT8"}
    assert fit["repeatable"] and all(way.get("same", True) and way["ms"] for way in fit["ways"].values())
    assert set(experts["steps"]) == {"grouped_mm", "eager"} and verify["ok"]
    assert "applied" in (tmp_path / "report.txt").read_text()
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
    assert "passed" in outcomes and "failed" not in outcomes
