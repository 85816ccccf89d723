import json
import shutil
import subprocess
import sys

import pytest

from amp_lab import datasets, doctor
from amp_lab.__main__ import main


@pytest.fixture
def quick(monkeypatch):
    """Replace the measurement, which takes seconds."""
    speed = {
        "device": "cpu",
        "n": 512,
        "fp32_tflops": 0.2,
        "bf16_over_fp32": 2.0,
        "fp16_over_fp32": 0.01,
    }
    monkeypatch.setattr(doctor, "_speed", lambda seconds: speed)
    return speed


def test_this_machine_is_ready(capsys, quick):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "Ready." in text and "FAIL" not in text
    assert "BF16          2 times FP32's throughput: faster" in text
    assert "FP16          0.01 times FP32's throughput: slower" in text


def test_json(capsys, quick):
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["speed"] == quick
    assert {"machine", "speed", "checks", "ok"} == set(result)


def test_the_measurement_is_real_and_bounded():
    speed = doctor._speed(seconds=1.0)
    assert speed["fp32_tflops"] > 0 and speed["bf16_over_fp32"] > 0 and speed["fp16_over_fp32"] > 0


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the course that a test may damage."""
    shutil.copytree(datasets.DATA, tmp_path / "data")
    shutil.copytree(doctor.NOTEBOOKS, tmp_path / "notebooks")
    monkeypatch.setattr(datasets, "DATA", tmp_path / "data")
    monkeypatch.setattr(doctor, "NOTEBOOKS", tmp_path / "notebooks")
    return tmp_path


def remove_data(folder):
    (folder / "data/fashion_mnist.npz").unlink()


def damage_data(folder):
    (folder / "data/shakespeare.txt.xz").write_bytes(b"not the plays")


def remove_notebook(folder):
    (folder / "notebooks/10_beyond_one_gpu.ipynb").unlink()


def damage_notebook(folder):
    (folder / "notebooks/00_start_here.ipynb").write_text("{")


@pytest.mark.parametrize(
    "damage, name, remedy",
    [
        (remove_data, "data/fashion_mnist.npz", "pip install -e ."),
        (damage_data, "data/shakespeare.txt.xz", "git checkout -- data/shakespeare.txt.xz"),
        (remove_notebook, "notebooks", "git checkout -- notebooks"),
        (damage_notebook, "notebooks", "git checkout -- notebooks"),
    ],
)
def test_what_is_broken_is_named_with_a_remedy(copy, quick, capsys, damage, name, remedy):
    damage(copy)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"FAIL  {name}" in text and remedy in text and "Not ready" in text


def test_an_old_torch_is_not_enough(quick, capsys, monkeypatch):
    monkeypatch.setattr(doctor.torch, "__version__", "2.5.1+cpu")
    assert main(["doctor"]) == 1
    assert "pip install 'torch>=2.6'" in capsys.readouterr().out


def test_missing_widgets_are_found(quick, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "WIDGET_PACKAGES", ("ipywidgets", "no-such-package"))
    assert main(["doctor"]) == 1
    assert "not installed here: no-such-package" in capsys.readouterr().out


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


def test_it_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "amp_lab", "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0 and "doctor" in result.stdout
