"""The experiments on two processes, and the launcher: what it returns, and that it leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F

from amp_lab import distributed
from amp_lab.checks.many import ranks_that_skip
from amp_lab.datasets import batches, fashion_mnist

OWN = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def ranks(device):
    return {"rank": dist.get_rank(), "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}


def hang(device):
    dist.barrier()
    Path(f"started{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def fall(device):
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def skips_alone(device):
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    gradients = []
    for step in (0, 1) if dist.get_rank() == 0 else (0, 2):
        model.zero_grad()
        (10**step * model(torch.ones(1, 1))).sum().backward()
        gradients.append(model.module.weight.grad.item())
    return gradients


def tensor(device):
    return torch.ones(2)


def neighbor(device):
    if dist.get_rank() == 1:
        raise ValueError("rank one's own words")
    dist.barrier()
"""


def leftovers():
    """Processes of this test: torchrun and its workers name the experiment, and work in our folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if "-m amp_lab.distributed own_experiments:" in line and process.info["cwd"] == os.getcwd():
            if process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(line)
    return found


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited in vain"
        time.sleep(0.1)


def both_have_started():  # in the working directory, where `hang` says so
    return Path("started0").exists() and Path("started1").exists()


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_experiments.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_example_is_on_exactly_one_rank(monkeypatch):
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed.dist, "get_rank", lambda rank=rank: rank)
        shares.append(distributed.share(torch.arange(6)).tolist())
    assert shares == [[0, 2, 4], [1, 3, 5]]


def test_rows_that_cannot_be_cut_equally_are_refused(monkeypatch):
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match="8 rows cannot be cut into 3 equal pieces"):
        distributed.ShardedLinear(torch.ones(8, 16))


# ---- the experiments -------------------------------------------------------------------------------


def test_an_overflow_on_one_rank_makes_all_skip_and_the_replicas_stay_equal():
    ranks = distributed.launch("overflow")
    zero, one = ranks
    assert [[step["sent finite gradients"] for step in rank] for rank in ranks] == [
        [True] * 5,
        [True, True, False, True, True],
    ]
    for rank in ranks:
        assert [step["got finite gradients"] for step in rank] == [True, True, False, True, True]
        assert [step["skipped"] for step in rank] == [False, False, True, False, False]
        assert [step["scale"] for step in rank] == [2.0**14] * 3 + [2.0**13] * 2
        assert all(step["loss is finite"] for step in rank)
    assert [step["weights"] for step in zero] == [step["weights"] for step in one]
    assert len({step["weights"] for step in zero}) == 4
    assert {rank for rank in (0, 1) if ranks[rank][2]["skipped"]} == ranks_that_skip("DDP", {1}, 2)


def test_a_rank_that_leaves_a_step_alone_mixes_up_the_next_ones(own):
    average_of_step_1_and_step_2 = (10 + 100) / 2
    expected = [1.0, average_of_step_1_and_step_2]
    assert distributed.launch("own_experiments:skips_alone") == [expected, expected]


def test_no_sync_saves_all_reduces_and_changes_nothing_else():
    ranks = distributed.launch("accumulation")
    assert [way["all-reduces"] for way in ranks[0].values()] == [1, 4, 1, 4]
    for way, other in zip(ranks[0].values(), ranks[1].values(), strict=True):
        assert way == other
        assert way["relative difference"] < 2e-3


def test_ddp_and_fsdp2_reach_the_loss_of_one_process():
    ranks = distributed.launch("same_loss")
    assert ranks[0] == ranks[1]
    losses = ranks[0]
    tolerance = {"fp32": 1e-5, "fp16 + GradScaler": 2e-3, "bf16": 1e-2}
    for name, values in losses.items():
        precision = name.split(", ")[1]
        reference = losses[f"one process, {precision}"]
        assert values == pytest.approx(reference, rel=tolerance[precision]), name
        assert values[-1] < 0.8 * values[0]

    # An oracle of our own: plain FP32 training, written once more, in this process.
    model = distributed.network(torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for (images, labels), expected in zip(
        batches(fashion_mnist().train, 128, steps=20), losses["DDP, fp32"], strict=True
    ):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_policies_say_which_dtype_is_where():
    ranks = distributed.launch("policies")
    assert ranks[0] == ranks[1]
    fp32, bf16 = "torch.float32", "torch.bfloat16"
    rows = {
        "all-gather": [fp32, bf16, bf16, bf16],
        "input in the layer": [fp32, bf16, bf16, bf16],
        "weight in the layer": [fp32, bf16, bf16, bf16],
        "output of the model": [fp32, bf16, bf16, fp32],
        "reduce-scatter": [fp32, bf16, fp32, fp32],
        "weight, stored": [fp32] * 4,
        "gradient, stored": [fp32] * 4,
        "share of the weight": ["25088 of 50176"] * 4,
    }
    assert {row: [case[row] for case in ranks[0].values()] for row in rows} == rows


def test_plain_shards_need_the_sharded_scaler_and_fsdp2_does_not():
    ranks = distributed.launch("sharded_scaler")
    for way, setup in (
        ("FSDP2, GradScaler", "FSDP2"),
        ("by hand, GradScaler", "plain shards"),
        ("by hand, ShardedGradScaler", "plain shards, ShardedGradScaler"),
    ):
        skipped = {rank for rank in (0, 1) if not ranks[rank][way][0]["moved"]}
        assert skipped == ranks_that_skip(setup, {0}, 2)
    for rank, history in enumerate(ranks):
        for way, (first, second) in history.items():
            assert first["own gradients are finite"] is (rank == 1)
            assert first["scale"] == 1024
            disagree = way == "by hand, GradScaler"
            assert first["moved"] is (disagree and rank == 1)
            assert second["moved"] and second["own gradients are finite"]
            assert second["scale"] == (1024 if disagree and rank == 1 else 512)
            expected = (1.5, 0.75)[rank] if disagree else 1.0
            assert second["update / right update"] == pytest.approx(expected, rel=1e-3)


# ---- the launcher ----------------------------------------------------------------------------------


def test_own_experiments_and_any_number_of_ranks(own):
    ranks = distributed.launch("own_experiments:ranks", processes=3)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert len({rank["pid"] for rank in ranks} | {os.getpid()}) == 4
    assert {rank["threads"] for rank in ranks} == {"1"}


def test_the_error_of_the_rank_that_failed_is_shown():
    with pytest.raises(RuntimeError) as caught:
        distributed.launch("bad_data")
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "bad_data, rank 1: RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        "(8x900 and 784x64)"
    )
    assert any("in bad_data" in line for line in rest)
    assert not any("torch/nn" in line for line in rest)


def test_the_error_of_a_neighbor_that_waited_is_not(own):
    with pytest.raises(RuntimeError, match="rank 1: ValueError: rank one's own words"):
        distributed.launch("own_experiments:neighbor")
    assert leftovers() == []


def test_a_result_that_cannot_come_back_is_an_error(own):
    with pytest.raises(RuntimeError, match="rank 0: TypeError: Object of type Tensor is not JSON"):
        distributed.launch("own_experiments:tensor", processes=1)


def test_a_rank_that_is_killed_shows_torchruns_log(own):
    with pytest.raises(RuntimeError, match="(?s)fall, rank 0 ended without.*SIGKILL"):
        distributed.launch("own_experiments:fall")
    assert leftovers() == []


def test_too_little_time_ends_the_launch():
    start = time.time()
    with pytest.raises(TimeoutError) as caught:
        distributed.launch("same_loss", seconds=0.2)
    assert str(caught.value).splitlines() == [
        "same_loss took longer than 0.2 s; all its processes were ended",
        "rank 0 had not started",
        "rank 1 had not started",
    ]
    assert time.time() - start < 30  # it would need 60


def test_a_hang_is_ended_and_says_where_each_rank_was(own, monkeypatch):
    class TimeIsUpAtTheHang(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout == 100:
                wait_for(both_have_started)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", TimeIsUpAtTheHang)
    with pytest.raises(TimeoutError) as caught:
        distributed.launch("own_experiments:hang", seconds=100)
    assert leftovers() == []
    zero, one = str(caught.value).split("rank 1 was at")
    assert "own_experiments:hang took longer than 100 s" in zero
    assert "in hang" in zero and "barrier" not in zero
    assert "in barrier" in one and "in hang" in one


def test_an_interrupt_leaves_no_process(own):
    def interrupt():
        wait_for(both_have_started)
        assert len(leftovers()) == 3
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        distributed.launch("own_experiments:hang", seconds=100)
    thread.join()
    assert leftovers() == []


@pytest.mark.parametrize("victim", ["kernel", "torchrun"])
def test_workers_end_themselves_when_nobody_else_can(own, victim):
    code = (
        "from amp_lab import distributed; distributed.launch('own_experiments:hang', seconds=100)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_for(both_have_started)
    assert len(leftovers()) == 3
    if victim == "kernel":
        kernel.kill()
    else:
        psutil.Process(kernel.pid).children()[0].kill()
    assert kernel.wait() != 0
    wait_for(lambda: leftovers() == [], seconds=20)


def test_torchrun_from_a_terminal_prints_the_results(own):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + ["-m", "amp_lab.distributed", "own_experiments:ranks"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert 'rank 0: {\n  "rank": 0' in result.stdout and 'rank 1: {\n  "rank": 1' in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"experiment": "overflw"}, "no experiment 'overflw'; choose from overflow, accumulation"),
        ({"experiment": distributed.overflow}, "no experiment <function overflow"),
        ({"experiment": "overflow", "processes": 0}, "processes is 0, expected 1 or more"),
        ({"experiment": "overflow", "processes": True}, "processes is True"),
        ({"experiment": "overflow", "seconds": 0}, "seconds is 0, expected more than 0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        distributed.launch(**arguments)
