"""Which machine is this, and what does it accelerate?"""

import os
import platform
import random

import torch


def setup(seed: int = 0) -> torch.device:
    """Choose the device, make runs repeatable, and say in one line what this machine accelerates.

    Seeds Python's and PyTorch's random numbers with `seed` and asks cuDNN for its deterministic
    kernels. Returns `torch.device("cuda")` if there is a GPU that PyTorch can use, else
    `torch.device("cpu")`.

    Source: docs.pytorch.org, "Reproducibility".
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"setup: seed is {seed!r}, expected an integer such as 0")
    random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    facts = capabilities()
    print(summary(facts))
    return torch.device(facts["device"])


def capabilities() -> dict:
    """Describe this machine: versions, GPU, and which number formats its hardware multiplies.

    Returns a plain dictionary that `json.dumps` accepts. `cpu_bf16` and `cpu_fp16` name the
    instructions with which this CPU multiplies 16-bit matrices ("AVX512-BF16", "AMX", "ARM BF16"),
    or are None: PyTorch then computes such products by a detour. `gpu_capability` is CUDA's compute
    capability as [major, minor]; Tensor Cores for FP16 begin at 7.0 (Volta), for BF16 and TF32 at
    8.0 (Ampere).

    Source: CUDA C++ Programming Guide, "Compute Capabilities".
    """
    facts = {
        "device": "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "cpu_bf16": _cpu_bf16(),
        "cpu_fp16": _cpu_fp16(),
        "gpu": None,
        "gpu_capability": None,
        "gpu_memory_gib": None,
        "gpu_fp16": False,
        "gpu_bf16": False,
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts |= {
            "device": "cuda",
            "gpu": gpu.name,
            "gpu_capability": [gpu.major, gpu.minor],
            "gpu_memory_gib": round(gpu.total_memory / 2**30, 1),
            "gpu_fp16": gpu.major >= 7,
            "gpu_bf16": gpu.major >= 8,
        }
    return facts


def summary(facts: dict) -> str:
    """Put `capabilities()` into one line for people."""
    if facts["device"] == "cuda":
        formats = [name for name in ("FP16", "BF16") if facts[f"gpu_{name.lower()}"]]
        fast = " and ".join(formats) or "no 16-bit format"
        return (
            f"cuda: {facts['gpu']}, {facts['gpu_memory_gib']} GiB, Tensor Cores for {fast}, "
            f"PyTorch {facts['torch']}"
        )
    bf16, fp16 = facts["cpu_bf16"], facts["cpu_fp16"]
    return (
        f"cpu: {facts['cores']} cores, "
        + (f"BF16 in hardware ({bf16})" if bf16 else "no BF16 instructions")
        + ", "
        + (f"FP16 in hardware ({fp16})" if fp16 else "FP16 emulated")
        + f", PyTorch {facts['torch']}"
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _torch_says(probe: str) -> bool:
    """Ask one of torch.cpu's private hardware probes; an older PyTorch may not have it."""
    return bool(getattr(torch.cpu, probe, lambda: False)())


def _cpu_bf16() -> str | None:
    if _torch_says("_is_amx_tile_supported"):
        return "AMX"
    if _torch_says("_is_avx512_bf16_supported"):
        return "AVX512-BF16"
    if _arm_has("FEAT_BF16", "bf16"):
        return "ARM BF16"
    return None


def _cpu_fp16() -> str | None:
    if _torch_says("_is_amx_fp16_supported"):
        return "AMX-FP16"
    if _linux_flag("avx512_fp16"):
        return "AVX512-FP16"
    if _arm_has("FEAT_FP16", "fphp"):
        return "ARM FP16"
    return None


def _linux_flag(flag: str) -> bool:
    try:
        with open("/proc/cpuinfo") as text:
            return any(
                flag in line.split()
                for line in text
                if line.lower().startswith(("flags", "features"))
            )
    except OSError:
        return False


def _arm_has(apple_feature: str, linux_flag: str) -> bool:
    if platform.machine() not in ("arm64", "aarch64"):
        return False
    if platform.system() == "Darwin":
        import subprocess

        answer = subprocess.run(
            ["sysctl", "-n", f"hw.optional.arm.{apple_feature}"], capture_output=True, text=True
        )
        return answer.stdout.strip() == "1"
    return _linux_flag(linux_flag)
