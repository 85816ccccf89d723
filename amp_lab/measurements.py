"""Measure this machine: matrix products, and training steps of the course's models.

    python -m amp_lab measure --save data/measurements/my_machine.json

takes a few minutes, and writes one JSON file: the machine, its driver, versions and date, the
throughput of matrix products, and the time and memory of training steps.
"""

import contextlib
import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from .device import capabilities
from .measure import matmul_tflops, median_ms, peak_memory, saved_bytes
from .models import CharTransformer, SmallCNN, WordLM
from .recordings import FORMAT, check_path, describe, save
from .training import RECIPES, Recipe

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
PRECISIONS = {
    "fp32": RECIPES["fp32"],
    "tf32": RECIPES["fp32"],
    "fp16": RECIPES["fp16 + GradScaler"],
    "bf16": RECIPES["bf16"],
}


@dataclass(frozen=True)
class Grid:
    """What is measured: sizes of square matrices, and for each model (width, batch) pairs.

    `native_fp16_up_to` is the largest matrix multiplied in FP16: on a CPU without FP16 instructions
    one product of 2048 x 2048 matrices takes most of a minute.
    """

    sizes: tuple[int, ...]
    native_fp16_up_to: int
    mlp: tuple[tuple[int, int], ...]
    small_cnn: tuple[int, ...]
    word_lm: tuple[tuple[int, int], ...]
    vocabulary: int
    char_transformer: tuple[tuple[int, int], ...]


GRIDS = {
    "cpu": Grid(
        sizes=(64, 128, 256, 512, 1024, 2048),
        native_fp16_up_to=512,
        mlp=tuple((w, b) for w in (64, 256, 1024) for b in (8, 64, 512)),
        small_cnn=(16, 64, 256),
        word_lm=((64, 256), (64, 1024), (512, 256), (512, 1024)),
        vocabulary=8192,
        char_transformer=((96, 8), (96, 64), (384, 8), (384, 64)),
    ),
    "cuda": Grid(
        sizes=(256, 512, 1024, 2048, 4096, 8192),
        native_fp16_up_to=8192,
        mlp=tuple((w, b) for w in (256, 1024, 4096) for b in (16, 256, 4096)),
        small_cnn=(64, 512, 4096),
        word_lm=((64, 1024), (64, 8192), (1024, 1024), (1024, 8192)),
        vocabulary=16384,
        char_transformer=((96, 64), (96, 1024), (768, 64), (768, 1024)),
    ),
}


def mlp(width: int, depth: int = 4, classes: int = 10) -> nn.Sequential:
    """`depth` linear layers of width x width with ReLU, and a last one to `classes` logits."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def make_step(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, recipe: Recipe
) -> Callable[[], None]:
    """A function of no arguments that trains `model` on this batch for one step, to be measured."""
    device_type = inputs.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device_type, enabled=recipe.scaling)

    def step():
        with recipe.arithmetic(device_type):
            with recipe.forward_context(device_type):
                loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def tf32(enabled: bool):
    """Let FP32 matrix products and convolutions on CUDA use TF32, or forbid it, for a while.

    Source: docs.pytorch.org, "CUDA semantics", TensorFloat-32.
    """
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv


def measure(
    grid: Grid | None = None, limit: float = 240.0, say: Callable[[str], object] = print
) -> dict:
    """Measure this machine, on its GPU if it has one, and return a recording (see `recordings`).

    `say` is told each result. After `limit` seconds nothing new is begun, and the recording is not
    "complete". What does not fit into the GPU's memory is left out.
    """
    start = time.monotonic()
    machine = capabilities()
    grid = grid or GRIDS[machine["device"]]
    recording = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "driver": _driver() if machine["gpu"] else None,
        "complete": True,
        "matmul": [],
        "steps": [],
    }
    for kind, name, take in _points(grid, machine):
        if time.monotonic() - start > limit:
            recording["complete"] = False
            say(f"stopped after {limit:.0f} s")
            break
        try:
            row = take()
        except torch.OutOfMemoryError:
            say(f"{name}: out of memory")
            continue
        recording[kind].append(row)
        result = (
            f"{row['tflops']:.3g} TFLOP/s" if kind == "matmul" else f"{row['ms']:.3g} ms a step"
        )
        if row.get("emulated"):
            result += ", emulated"
        say(f"{name}: {result}")
    return recording


def _points(grid: Grid, machine: dict) -> Iterator[tuple[str, str, Callable[[], dict]]]:
    """Each measurement: its place in the recording, its name, and the function that takes it."""
    device = machine["device"]
    precisions = ["fp32", "fp16", "bf16"]
    if device == "cuda":  # Tensor Cores for BF16 and TF32 came together
        precisions = ["fp32", "tf32", "fp16", "bf16"] if machine["gpu_bf16"] else ["fp32", "fp16"]
    for n in grid.sizes:
        for name in precisions:
            if name != "fp16" or n <= grid.native_fp16_up_to:
                yield (
                    "matmul",
                    f"matmul {n} {name}",
                    lambda n=n, name=name: _matmul(n, name, device),
                )
    for model, width, batch, build in _workloads(grid, device):
        for name in precisions:
            label = f"{model}{f' width {width}' if width else ''} batch {batch} {name}"
            facts = {"model": model, "width": width, "batch": batch}
            yield "steps", label, lambda facts=facts, b=build, name=name: _step(facts, b, name)


def _matmul(n: int, name: str, device: str) -> dict:
    with tf32(name == "tf32"):
        return {"n": n, "dtype": name, "tflops": matmul_tflops(n, DTYPES[name], device)}


def _step(facts: dict, build: Callable, name: str) -> dict:
    torch.manual_seed(0)
    model, inputs, targets = build()
    recipe = PRECISIONS[name]
    device_type = inputs.device.type
    step = make_step(model, inputs, targets, recipe)
    with tf32(name == "tf32"):
        ms = median_ms(step, repeats=20, warmup=2, seconds=1.0)
        peak = peak_memory(step, device_type)
        with recipe.arithmetic(device_type):
            saved = saved_bytes(model, inputs, dtype=recipe.autocast)
    return facts | {
        "precision": name,
        "emulated": name == "fp16" and device_type == "cpu",
        "ms": ms,
        "peak_bytes": peak,
        "saved_bytes": saved.total,
    }


def _workloads(grid: Grid, device: str):
    """Name, width, batch and a function that makes (model, inputs, targets)."""

    def make(model, inputs, classes, each_position=False):
        targets = torch.randint(classes, inputs.shape if each_position else inputs.shape[:1])
        return model.to(device), inputs.to(device), targets.to(device)

    for width, batch in grid.mlp:
        yield (
            "MLP",
            width,
            batch,
            lambda w=width, b=batch: make(mlp(w), torch.randn(b, w), 10),
        )
    for batch in grid.small_cnn:
        yield (
            "SmallCNN",
            None,
            batch,
            lambda b=batch: make(SmallCNN(), torch.randn(b, 1, 28, 28), 10),
        )
    words = grid.vocabulary
    for width, batch in grid.word_lm:
        yield (
            "WordLM",
            width,
            batch,
            lambda w=width, b=batch: make(
                WordLM(words, hidden=w), torch.randint(words, (b, 2)), words
            ),
        )
    characters, context = 64, 64
    for width, batch in grid.char_transformer:
        yield (
            "CharTransformer",
            width,
            batch,
            lambda w=width, b=batch: make(
                CharTransformer(characters, context, width=w, layers=2),
                torch.randint(characters, (b, context)),
                characters,
                each_position=True,
            ),
        )


def _driver() -> str | None:
    """The version of NVIDIA's driver, as nvidia-smi tells it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


# ---- command line -------------------------------------------------------------------------------


def add_command(subparsers) -> None:
    parser = subparsers.add_parser(
        "measure",
        help="measure this machine, and keep the result in a file",
        description="Measure matrix products and training steps of the course's models, on the GPU if "
        "there is one. Takes up to about four minutes, and wants an otherwise idle machine.",
        epilog="example: python -m amp_lab measure --save data/measurements/my_machine.json",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=Path,
        help="write the recording to FILE, which ends in .json; those in data/measurements/ are "
        "shown in notebooks 02 and 07",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    parser.set_defaults(run=run)


def run(options) -> int:
    if options.save is not None:
        try:
            check_path(options.save, options.force)
        except (OSError, ValueError) as error:
            print(f"measure: {error}", file=sys.stderr)
            return 1
    elif options.force:
        print("measure: --force goes with --save FILE", file=sys.stderr)
        return 1
    start = time.monotonic()
    try:
        recording = measure(say=lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("measure: interrupted, nothing was saved", file=sys.stderr)
        return 130
    print(f"{describe(recording)}: measured in {time.monotonic() - start:.0f} s")
    if options.save is not None:
        save(recording, options.save, options.force)
        print(f"saved as {options.save}")
    else:
        print("not saved; --save FILE would keep it")
    return 0
