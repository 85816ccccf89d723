"""Is this machine ready for the course?"""

import importlib.metadata
import json
import re
import sys
from dataclasses import asdict, dataclass

import torch

from .datasets import DATA, SHA256, read_verified
from .device import capabilities
from .measure import median_ms

OLDEST_TORCH = (2, 6)
OLDEST_PYTHON = (3, 11)
NOTEBOOKS = DATA.parent / "notebooks"
LAST_NOTEBOOK = 10
WIDGET_PACKAGES = ("ipywidgets", "jupyterlab_widgets")


@dataclass(frozen=True)
class Check:
    """One question, its answer in words, and, where the course would not work, the remedy."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def examine(seconds: float = 8.0) -> dict:
    """Examine this machine, in about `seconds` seconds at most.

    Returns a dictionary that `json.dumps` accepts: "machine" as from `capabilities()`, "speed", the
    measured matmul throughput of each 16-bit dtype divided by FP32's, "checks", a list of questions
    with their answers, and "ok", whether the course will work.
    """
    checks = [_python(), _torch(), *_data(), _notebooks(), _widgets()]
    return {
        "machine": capabilities(),
        "speed": _speed(seconds),
        "checks": [asdict(check) for check in checks],
        "ok": all(check.ok for check in checks),
    }


def report(result: dict) -> str:
    """Put what `examine()` found into lines for people."""
    machine, speed = result["machine"], result["speed"]
    yes_no = {True: "yes", False: "no"}
    lines = [
        "Machine",
        f"  CPU           {machine['cpu']}, {machine['cores']} usable cores",
        f"  in hardware   BF16: {machine['cpu_bf16'] or 'no'}, FP16: {machine['cpu_fp16'] or 'no'}",
        f"  CUDA build    {machine['cuda_build'] or 'no, this PyTorch was built for CPUs'}",
    ]
    if machine["gpu"]:
        major, minor = machine["gpu_capability"]
        lines.append(
            f"  GPU           {machine['gpu']}, {machine['gpu_memory_gib']} GiB, compute capability "
            f"{major}.{minor}; Tensor Cores for FP16: {yes_no[machine['gpu_fp16']]}, "
            f"for BF16: {yes_no[machine['gpu_bf16']]}"
        )
    else:
        lines.append("  GPU           none that PyTorch can use; the course runs without one")
    lines += [
        "",
        f"Measured: {speed['n']} x {speed['n']} matrix product on {speed['device']}, FP32 = 1 "
        f"({speed['fp32_tflops']:.3g} TFLOP/s)",
    ]
    for name in ("bf16", "fp16"):
        ratio = speed[f"{name}_over_fp32"]
        verdict = "faster" if ratio > 1.1 else "slower" if ratio < 0.9 else "about as fast"
        lines.append(f"  {name.upper()}          {ratio:.3g} times FP32's throughput: {verdict}")
    if speed["device"] == "cpu" and speed["fp16_over_fp32"] < 0.5:
        lines.append("  The course emulates FP16 on this CPU, at about the speed of FP32.")
    lines += ["", "Course"]
    for check in result["checks"]:
        lines.append(f"  {'ok  ' if check['ok'] else 'FAIL'}  {check['name']}: {check['found']}")
        if not check["ok"]:
            lines.append(f"        remedy: {check['remedy']}")
    lines += ["", "Ready." if result["ok"] else "Not ready: see the remedies above."]
    return "\n".join(lines)


def add_command(subparsers) -> None:
    parser = subparsers.add_parser("doctor", help="is this machine ready for the course?")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(options) -> int:
    result = examine()
    print(json.dumps(result, indent=2) if options.json else report(result))
    return 0 if result["ok"] else 1


def _speed(seconds: float) -> dict:
    """Throughput against FP32. Native FP16 can be a hundred times slower: it gets a small matrix."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = 4096 if device == "cuda" else 512
    a, b = torch.randn(2, n, n, device=device)

    def milliseconds(dtype):
        x, y = a.to(dtype), b.to(dtype)
        return median_ms(lambda: x @ y, repeats=10, warmup=1, seconds=seconds / 4)

    fp32 = milliseconds(torch.float32)
    return {
        "device": device,
        "n": n,
        "fp32_tflops": 2 * n**3 / (fp32 * 1e-3) / 1e12,
        "bf16_over_fp32": fp32 / milliseconds(torch.bfloat16),
        "fp16_over_fp32": fp32 / milliseconds(torch.float16),
    }


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return Check(
        "Python",
        sys.version_info >= OLDEST_PYTHON,
        found,
        f"install Python {oldest} or newer, and make a new virtual environment with it",
    )


def _torch() -> Check:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Check(
        "PyTorch", version >= OLDEST_TORCH, torch.__version__, f"pip install 'torch>={oldest}'"
    )


def _data() -> list[Check]:
    checks = []
    for name in SHA256:
        try:
            content = read_verified(name)
        except (FileNotFoundError, ValueError) as error:
            checks.append(Check(f"data/{name}", False, "missing or damaged", str(error)))
        else:
            checks.append(Check(f"data/{name}", True, f"{len(content):,} bytes, checksum right"))
    return checks


def _notebooks() -> Check:
    remedy = "take a complete copy of the repository, or: git checkout -- notebooks"
    names = sorted(path.name for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    damaged = []
    for name in names:
        try:
            cells = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))["cells"]
        except (ValueError, KeyError, OSError):
            cells = []
        if not cells:
            damaged.append(name)
    if damaged:
        return Check("notebooks", False, f"cannot be read: {', '.join(damaged)}", remedy)
    there = {name[:2] for name in names}
    lost = [f"{n:02d}" for n in range(LAST_NOTEBOOK + 1) if f"{n:02d}" not in there]
    if lost:
        return Check("notebooks", False, f"missing: {', '.join(lost)}", remedy)
    return Check("notebooks", True, f"{len(names)}, from {names[0]} to {names[-1]}")


def _widgets() -> Check:
    missing = []
    for package in WIDGET_PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check(
            "widgets",
            False,
            f"not installed here: {', '.join(missing)}",
            "pip install ipywidgets, in the environment that JupyterLab runs in; then restart it",
        )
    version = importlib.metadata.version("ipywidgets")
    if int(version.split(".")[0]) < 8:
        return Check("widgets", False, f"ipywidgets {version}", "pip install 'ipywidgets>=8.1'")
    return Check("widgets", True, f"ipywidgets {version}, with its JupyterLab extension")
