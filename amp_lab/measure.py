"""Time and throughput, measured so that the number means something."""

import statistics
import time
from collections.abc import Callable

import torch


def median_ms(
    fn: Callable[[], object], repeats: int = 20, warmup: int = 3, seconds: float = 2.0
) -> float:
    """Median wall time of `fn()` in milliseconds.

    Runs `warmup` calls first, then up to `repeats` measured ones, and stops early once `seconds`
    have passed (at least one call is measured). Waits for the GPU before it reads the clock: CUDA
    calls return before their work is done.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"median_ms: repeats={repeats}, warmup={warmup}; expected repeats >= 1 and warmup >= 0"
        )
    for _ in range(warmup):
        fn()
    _finish()
    times = []
    deadline = time.perf_counter() + seconds
    while len(times) < repeats and (not times or time.perf_counter() < deadline):
        start = time.perf_counter()
        fn()
        _finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def matmul_tflops(
    n: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 20,
) -> float:
    """Measured throughput of an n x n by n x n matrix product, in TFLOP/s.

    A product of two n x n matrices takes 2 n**3 operations: n**3 multiplications and as many
    additions. The runs stop early after two seconds.
    """
    if n < 1:
        raise ValueError(f"matmul_tflops: n is {n}, expected a matrix size of at least 1")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, n, generator=generator).to(device, dtype)
    b = torch.randn(n, n, generator=generator).to(device, dtype)
    return 2 * n**3 / (median_ms(lambda: a @ b, repeats) * 1e-3) / 1e12


def _finish() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
