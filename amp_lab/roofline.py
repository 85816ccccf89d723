"""How fast could it be? A roofline: a kernel cannot be faster than its arithmetic at the GPU's peak
rate, nor faster than its traffic at the memory's bandwidth.

Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", Communications of the ACM 52(4), 2009.
"""

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from .datasets import DATA

ASSUMPTIONS = (
    "the forward pass stands for the whole step; the optimizer, which works in FP32 either way, "
    "is left out",
    "every kernel reaches the GPU's peak: the low end lets each one read and write memory, the "
    "high end fuses all but matrix products, convolutions and attention away",
    "FP64 is counted at the FP32 rate",
)


class Work(NamedTuple):
    """What a kernel costs, whatever its name."""

    convolution: bool
    dtype: torch.dtype
    flops: int
    bytes: int


@dataclass(frozen=True)
class GPU:
    """Peak rates from a vendor's data sheet, without sparsity: FLOP/s, and bytes/s.

    None where the GPU has no unit for that format.
    """

    name: str
    fp32: float
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    bandwidth: float
    source: str

    def rate(self, work: Work, tf32: str) -> float:
        """FLOP/s of one kernel; `tf32` says for which FP32 kernels TF32 stands in."""
        if work.dtype in (torch.float16, torch.bfloat16):
            return (self.fp16 if work.dtype == torch.float16 else self.bf16) or self.fp32
        if work.dtype.itemsize == 1 and work.dtype.is_floating_point:
            return self.fp8 or self.fp32
        in_tf32 = tf32 == "everything" or (tf32 == "convolutions" and work.convolution)
        return self.tf32 if work.dtype == torch.float32 and in_tf32 else self.fp32


@dataclass(frozen=True)
class SpeedUp:
    """Estimated time without autocast over time with it, against one baseline."""

    baseline: str
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A roofline estimate for one GPU: no measurement.

    `launch_ratio` is the number of kernels without autocast over the number with it: the speed-up
    that is left where the GPU waits for the CPU to launch kernels, as it does with small batches.
    """

    gpu: GPU
    speed_ups: tuple[SpeedUp, ...]
    launch_ratio: float
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def gpus() -> Mapping[str, GPU]:
    """The GPUs of `data/gpus.csv` by name. Sources: the vendor's data sheets, named in each row."""

    def rate(row: dict[str, str], column: str) -> float | None:
        return float(row[column]) * 1e12 if row[column] else None

    with open(DATA / "gpus.csv", newline="", encoding="utf-8") as file:
        return {
            row["name"]: GPU(
                row["name"],
                *(rate(row, f"{kind}_tflops") for kind in ("fp32", "tf32", "fp16", "bf16", "fp8")),
                rate(row, "bandwidth_tb_s"),
                row["source"],
            )
            for row in csv.DictReader(file)
        }


def find_gpu(name: str, dtype: torch.dtype) -> GPU:
    """The GPU called `name`; `ValueError` if it is unknown, or has no Tensor Cores for `dtype`."""
    known = gpus()
    if name not in known:
        raise ValueError(f"gpu is {name!r}; known are {', '.join(known)} (data/gpus.csv)")
    gpu = known[name]
    if dtype == torch.bfloat16 and gpu.bf16 is None:
        able = ", ".join(g.name for g in known.values() if g.bf16)
        raise ValueError(
            f"{name} has no BF16 Tensor Cores: choose dtype=torch.float16, or one of {able}"
        )
    return gpu


def estimate(gpu: GPU, plain: Counter[Work], autocast: Counter[Work]) -> Estimate:
    """Compare the kernels of a forward pass without and with autocast on `gpu`.

    There is one `SpeedUp` for each baseline that people have: FP32 everywhere, PyTorch's default
    (TF32 for convolutions only), and TF32 everywhere. FP32 islands profit from TF32 as well.
    """
    baselines = {"FP32": "nothing"}
    if gpu.tf32:
        if any(work.convolution for work in plain):
            baselines["FP32, convolutions in TF32 (PyTorch's default)"] = "convolutions"
        baselines["TF32"] = "everything"
    speed_ups = []
    heavy = any(work.flops for work in plain)
    for baseline, tf32 in baselines.items():
        ends = [
            _ratio(*(_seconds(gpu, kernels, tf32, fused) for kernels in (plain, autocast)))
            for fused in ((False, True) if heavy else (False,))
        ]
        speed_ups.append(SpeedUp(baseline, min(ends), max(ends)))
    launch_ratio = _ratio(plain.total(), autocast.total())
    return Estimate(gpu, tuple(speed_ups), launch_ratio, ASSUMPTIONS)


def _ratio(before: float, after: float) -> float:
    return before / after if after else 1.0


def _seconds(gpu: GPU, kernels: Counter[Work], tf32: str, fused: bool) -> float:
    """The sum over kernels of the longer of arithmetic and traffic."""
    return sum(
        count * max(work.flops / gpu.rate(work, tf32), work.bytes / gpu.bandwidth)
        for work, count in kernels.items()
        if work.flops or not fused
    )
