import copy
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F

import amp_lab as lab
from amp_lab import measurements
from amp_lab.__main__ import main

files = sys.modules["amp_lab.recordings"]  # the module; lab.recordings is its function

TINY = measurements.Grid(
    sizes=(8, 16),
    native_fp16_up_to=8,
    mlp=((8, 4),),
    small_cnn=(2,),
    word_lm=((8, 4),),
    vocabulary=32,
    char_transformer=((6, 2),),
)


@pytest.fixture(scope="module")
def recording():
    return measurements.measure(TINY, say=lambda line: None)


@pytest.fixture
def tiny(monkeypatch):
    device = lab.capabilities()["device"]
    monkeypatch.setattr(measurements, "GRIDS", {device: TINY})


def test_a_recording_holds_every_point(recording):
    files.check(recording)
    assert recording["complete"] and recording["machine"] == lab.capabilities()
    expected = {(8, "fp32"), (8, "fp16"), (8, "bf16"), (16, "fp32"), (16, "bf16")}
    found = {(row["n"], row["dtype"]) for row in recording["matmul"]}
    assert found - {(8, "tf32"), (16, "tf32")} == expected
    steps = {(row["model"], row["precision"]) for row in recording["steps"]}
    for model in ("MLP", "SmallCNN", "WordLM", "CharTransformer"):
        assert {(model, name) for name in ("fp32", "fp16", "bf16")} <= steps
    if recording["machine"]["device"] == "cpu":
        emulated = {row["precision"] for row in recording["steps"] if row["emulated"]}
        assert emulated == {"fp16"} and recording["driver"] is None


def test_bytes_in_a_recording_are_those_of_the_measured_model(recording):
    row = next(r for r in recording["steps"] if (r["model"], r["precision"]) == ("MLP", "fp32"))
    assert row["saved_bytes"] == lab.saved_bytes(measurements.mlp(8), torch.randn(4, 8)).total
    gradients = sum(4 * p.numel() for p in measurements.mlp(8).parameters())
    assert row["peak_bytes"] >= gradients


def test_make_step_trains_as_the_loop_of_the_course_does():
    inputs, targets = torch.randn(16, 8), torch.randint(10, (16,))
    torch.manual_seed(0)
    model, twin = measurements.mlp(8), measurements.mlp(8)
    twin.load_state_dict(model.state_dict())
    step = lab.make_step(model, inputs, targets, lab.RECIPES["bf16"])
    for _ in range(3):
        step()
    for _ in lab.train(twin, [(inputs, targets)] * 3, lab.RECIPES["bf16"]):
        pass
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) and a.grad is None


def test_make_step_takes_one_target_a_position():
    model = torch.nn.Embedding(7, 7)
    words = torch.randint(7, (4, 5))
    before = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
    step = lab.make_step(model, words, words, lab.RECIPES["fp32"])
    for _ in range(20):
        step()
    assert F.cross_entropy(model(words).flatten(0, 1), words.flatten()) < before


def test_tf32_is_set_for_a_while():
    def switches():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = switches()
    with pytest.raises(KeyError), measurements.tf32(True):
        assert switches() == ("high", True) and torch.backends.cuda.matmul.allow_tf32
        raise KeyError
    assert switches() == before
    with measurements.tf32(False):
        assert switches() == ("highest", False)
    assert switches() == before


def test_nothing_is_begun_after_the_limit(monkeypatch):
    lines = []
    recording = measurements.measure(TINY, limit=-1.0, say=lines.append)
    assert not recording["complete"] and not recording["matmul"]
    assert lines == ["stopped after -1 s"]
    files.check(recording)


def test_what_does_not_fit_is_left_out(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measurements, "_step", full)
    lines = []
    recording = measurements.measure(TINY, say=lines.append)
    assert recording["matmul"] and not recording["steps"]
    assert "MLP width 8 batch 4 fp32: out of memory" in lines


def test_saved_and_read_back(recording, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    assert lab.recordings() == []
    files.save(recording, tmp_path / "here.json")
    assert lab.recordings() == [recording | {"name": "here"}]
    device = recording["machine"]["device"]
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    assert len(lab.recordings(device)) == 1 and lab.recordings(other) == []
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_a_file_is_written_whole_or_not_at_all(recording, tmp_path, monkeypatch):
    def broken(*arguments, **keywords):
        arguments[1].write("{")
        raise OSError("disk full")

    monkeypatch.setattr(files.json, "dump", broken)
    with pytest.raises(OSError, match="disk full"):
        files.save(recording, tmp_path / "here.json")
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_overwritten_without_force(recording, tmp_path):
    path = tmp_path / "here.json"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="--force"):
        files.save(recording, path)
    assert path.read_text() == "precious"
    files.save(recording, path, force=True)
    assert json.loads(path.read_text()) == recording


def spoil(recording, change):
    spoiled = copy.deepcopy(recording)
    change(spoiled)
    return spoiled


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda r: r.update(format=0), "format is 0, expected 1"),
        (lambda r: r.pop("format"), "format is None"),
        (lambda r: r.pop("date"), "'date' is missing"),
        (lambda r: r.update(date="yesterday"), "no ISO date"),
        (lambda r: r.pop("driver"), "'driver' is missing"),
        (lambda r: r["machine"].pop("torch"), "lacks 'torch'"),
        (lambda r: r.pop("steps"), "'steps' is missing"),
        (lambda r: r["steps"][0].pop("ms"), "odd row"),
        (lambda r: r["steps"][0].update(ms="fast"), "ms is 'fast'"),
        (lambda r: r["steps"][0].update(ms=math.nan), "not above 0"),
        (lambda r: r["matmul"][0].update(tflops=0.0), "not above 0"),
        (lambda r: r["matmul"][0].update(n=8.5), "n is 8.5"),
    ],
)
def test_a_damaged_recording_is_refused(recording, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        files.check(spoil(recording, change), "x.json")


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="bad.json is not JSON"):
        lab.recordings()
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or None"):
        lab.recordings("gpu")


def test_the_recordings_of_the_course_are_sound():
    for recording in lab.recordings():
        assert recording["complete"], recording["name"]


def test_describe_names_machine_versions_and_date(recording):
    line = files.describe(recording)
    assert recording["machine"]["torch"] in line and recording["date"][:10] in line
    gpu = spoil(recording, lambda r: r.update(driver="570.1"))
    gpu["machine"] |= {"device": "cuda", "gpu": "GPU of a test", "cuda_build": "12.8"}
    assert files.describe(gpu).startswith("GPU of a test, driver 570.1, CUDA 12.8, PyTorch ")


def test_the_command_measures_and_saves(tiny, tmp_path, capsys):
    path = tmp_path / "here.json"
    assert main(["measure", "--save", str(path)]) == 0
    files.check(json.loads(path.read_text()))
    assert f"saved as {path}" in capsys.readouterr().out
    before = path.read_text()
    assert main(["measure", "--save", str(path)]) == 1
    captured = capsys.readouterr()
    assert "exists" in captured.err and captured.out == "" and path.read_text() == before
    assert main(["measure", "--save", str(path), "--force"]) == 0
    assert path.read_text() != before


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("here.txt", "should end in .json"),
        ("missing/here.json", "there is no folder"),
        ("folder.json", "is a folder"),
    ],
)
def test_the_command_refuses_before_it_measures(name, complaint, tiny, tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    assert main(["measure", "--force", "--save", str(tmp_path / name)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("measure: ") and captured.out == ""
    assert complaint in captured.err


def test_the_command_refuses_a_folder_that_it_may_not_write_to(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    assert main(["measure", "--save", str(tmp_path / "here.json")]) == 1
    assert "write-protected" in capsys.readouterr().err


def test_the_command_without_a_file_says_so(tiny, capsys):
    assert main(["measure", "--force"]) == 1
    assert "--save FILE" in capsys.readouterr().err
    assert main(["measure"]) == 0
    assert "not saved" in capsys.readouterr().out


def test_an_interrupted_command_leaves_no_file(tiny, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(measurements, "_step", interrupted)
    assert main(["measure", "--save", str(tmp_path / "here.json")]) == 130
    assert "nothing was saved" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
