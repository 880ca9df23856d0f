"""What prepares a run on a machine with a GPU, as far as a machine without one can show it."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

from tools import gpu, gpu_wheels

FILES = [
    "bitsandbytes/__init__.py",
    *(f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda118", "cuda128", "rocm64")),
]


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
    slim = gpu_wheels.slim(wheel, tmp_path / "slim", {"cpu", "cuda128"}.__contains__)
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(slim),
    ]
    subprocess.run(install, check=True, capture_output=True)
    assert sorted(path.name for path in (site / "bitsandbytes").glob("*.so")) == [
        "libbitsandbytes_cpu.so",
        "libbitsandbytes_cuda128.so",
    ]
    assert "rocm" not in next(site.glob("*.dist-info/RECORD")).read_text()


def test_a_cuda_version_that_the_wheel_lacks_is_an_error_that_lists_what_it_has(wheel, tmp_path):
    (tmp_path / "slim").mkdir()
    with pytest.raises(ValueError, match="cuda118, cuda128"):
        gpu_wheels.slim(wheel, tmp_path / "slim", {"cpu", "cuda999"}.__contains__)
    assert not any((tmp_path / "slim").iterdir())


def test_what_is_missing_is_said_before_anything_is_done(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    assert gpu.main([]) == 2
    assert "make gpu-wheels" in capsys.readouterr().err
    assert gpu.main(["suit"]) == 2
    assert "suite, verify, demo, benchmarks" in capsys.readouterr().err
    (tmp_path / "bitsandbytes-0.50.2-py3-none-any.whl").touch()
    monkeypatch.setattr(gpu, "_no_gpu", lambda: "torch sees no CUDA device")
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
