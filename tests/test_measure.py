import time

import pytest
import torch

import amp_lab as lab


def test_median_ms_measures_milliseconds():
    assert 4.5 < lab.median_ms(lambda: time.sleep(0.005), repeats=5, warmup=0) < 50


def test_median_ms_stops_in_time_but_measures_once():
    calls = []
    lab.median_ms(lambda: calls.append(time.sleep(0.02)), repeats=1000, warmup=2, seconds=0.0)
    assert len(calls) == 3


def test_median_ms_is_not_moved_by_an_outlier():
    durations = iter([0.001, 0.001, 0.2, 0.001, 0.001])
    assert lab.median_ms(lambda: time.sleep(next(durations)), repeats=5, warmup=0) < 50


@pytest.mark.parametrize("arguments", [{"repeats": 0}, {"warmup": -1}])
def test_median_ms_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="expected repeats >= 1"):
        lab.median_ms(lambda: None, **arguments)


def test_matmul_tflops_counts_two_operations_a_product(monkeypatch):
    from amp_lab import measure

    monkeypatch.setattr(measure, "median_ms", lambda fn, repeats: (fn(), 2.0)[1])
    assert lab.matmul_tflops(100) == pytest.approx(2 * 100**3 / 2e-3 / 1e12)
    assert lab.matmul_tflops(64, torch.bfloat16) == pytest.approx(2 * 64**3 / 2e-3 / 1e12)
    with pytest.raises(ValueError, match="at least 1"):
        lab.matmul_tflops(0)
