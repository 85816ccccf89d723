"""The ratios of the performance table, each side measured against its peer in the same run.

    python tests/benchmark.py                  # all rows, a few minutes
    python tests/benchmark.py slider watch     # the rows whose names contain one of these words
    python tests/benchmark.py --course         # also the time of the course under strict nbval

Prints a table and asserts nothing. A ratio is ours / theirs, medians of runs in turns, so below 1 is
faster. A row that lacks a package says so. Run it on an idle machine.
"""

import argparse
import contextlib
import importlib
import io
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ["KINETO_LOG_LEVEL"] = "6"

import torch
import torch.nn.functional as F

import amp_lab as lab
from amp_lab.measurements import mlp

ROOT = Path(__file__).resolve().parent.parent
ROWS = []


def row(what, against, goal):
    """Register a function that returns (ours, theirs, note), or (ours, None, note) without a peer."""

    def register(function):
        ROWS.append((function.__name__, what, against, goal, function))
        return function

    return register


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def paired(ours, theirs, rounds=7, warmup=1):
    """Median seconds of two functions that are called in turns."""
    for _ in range(warmup):
        ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def steps(model, inputs, targets, *recipes):
    """A training step of a fresh copy of the same model for each recipe."""
    made = []
    for name in recipes:
        torch.manual_seed(0)
        made.append(lab.make_step(model(), inputs, targets, lab.RECIPES[name]))
    return made


def pictures(size=128):
    return torch.randn(size, 1, 28, 28), torch.randint(10, (size,))


def words(vocabulary=8192, size=1024):
    return torch.randint(vocabulary, (size, 2)), torch.randint(vocabulary, (size,))


# ---- arithmetic ----------------------------------------------------------------------------------


@row("FP16 step, emulated on the CPU, SmallCNN", "FP32 step", "1.0x")
def emulated_small_cnn():
    return *paired(*steps(lab.SmallCNN, *pictures(), "fp16 + GradScaler", "fp32")), ""


@row("FP16 step, emulated on the CPU, WordLM", "FP32 step", "1.5x")
def emulated_word_lm():
    build = lambda: lab.WordLM(8192)  # noqa: E731
    return *paired(
        *steps(build, *words(), "fp16 + GradScaler", "fp32")
    ), "vocabulary 8192, batch 1024"


@row("FP16 product 512 cubed, emulated", "native FP16 on the CPU", "1/50")
def emulated_matmul():
    a, b = torch.randn(2, 512, 512).half()

    def emulated():
        with lab.tensor_core_emulation():
            a @ b

    return *paired(emulated, lambda: a @ b), ""


@row("BF16 step on the CPU, SmallCNN", "FP32 step", "0.6x with AVX512-BF16")
def bf16_small_cnn():
    note = f"BF16 hardware: {lab.capabilities()['cpu_bf16']}"
    return *paired(*steps(lab.SmallCNN, *pictures(), "bf16", "fp32")), note


@row("BF16 step on the CPU, WordLM", "FP32 step", "shown")
def bf16_word_lm():
    return *paired(*steps(lambda: lab.WordLM(8192), *words(), "bf16", "fp32")), ""


@row("quantize ten million values", "torch's cast and back", "3x")
def quantize():
    x = torch.randn(10_000_000)
    return *paired(lambda: lab.FP16.quantize(x), lambda: x.half().float()), "FP16"


@row("quantize ten million values to BF16", "torch's cast and back", "3x")
def quantize_bf16():
    x = torch.randn(10_000_000)
    return *paired(lambda: lab.BF16.quantize(x), lambda: x.bfloat16().float()), ""


# ---- asking CUDA's autocast ----------------------------------------------------------------------


AUDIT_MEMORY = """
import resource, torch, amp_lab as lab
from transformers import GPT2Config, GPT2LMHeadModel
with torch.device("meta"):
    ghost, small = GPT2LMHeadModel(GPT2Config()), torch.nn.Linear(2, 2)
lab.audit(small, torch.empty(2, 2, device="meta"))  # what the first audit imports does not count
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lab.audit(ghost, input_ids=torch.empty(8, 512, dtype=torch.int64, device="meta"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@row("audit of GPT-2, 8 x 512", "one FP32 forward on the CPU", "0.1x, no memory")
def audit_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(50257, (8, 512))
    with torch.device("meta"):
        ghost = GPT2LMHeadModel(GPT2Config())
    ours = statistics.median(
        seconds(lambda: lab.audit(ghost, input_ids=tokens.to("meta"))) for _ in range(3)
    )
    real = GPT2LMHeadModel(GPT2Config()).eval()
    size = sum(p.nbytes for p in real.parameters()) / 2**20
    code = AUDIT_MEMORY  # in a process of its own, whose memory nothing else has raised
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    grown = float(result.stdout)

    def forward():
        with torch.no_grad():
            real(input_ids=tokens)

    theirs = statistics.median(seconds(forward) for _ in range(2))
    return ours, theirs, f"the model is {size:.0f} MiB, the audit took {grown:.0f} MiB"


@row("op_table('cuda')", "3 s", "at most 1 s")
def op_table():
    lab.op_table("cuda")
    return statistics.median(seconds(lambda: lab.op_table("cuda")) for _ in range(3)), 3.0, ""


# ---- drawing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def notebook_display():
    """Displays as in a notebook: figures become PNGs in the outputs, which are thrown away."""
    import matplotlib
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from matplotlib_inline.backend_inline import configure_inline_support

    shell = InteractiveShell.instance()
    matplotlib.use("module://matplotlib_inline.backend_inline")
    configure_inline_support(shell, "inline")
    with capture_output():
        yield


@row(
    "slider move to new PNG, ScaleExplorer", "interact, new matplotlib figure", "0.1x, at most 0.2x"
)
def slider():
    import ipywidgets
    import matplotlib.pyplot as plt

    panel = lab.ScaleExplorer(lab.ExponentHistogram.of(torch.randn(100_000) * 1e-5))
    heights = torch.rand(57).tolist()

    def draw(power=0):
        plt.figure(figsize=(8, 4))
        plt.bar([p + power for p in range(-40, 17)], heights)
        plt.xlim(-60, 40)
        plt.show()

    with notebook_display():
        control = ipywidgets.interactive(draw, power=(-20, 20))
        control.update()
        positions = iter(range(-15, 15))

        def move():
            position = next(positions)
            panel.scale.value = position

        others = iter(range(-15, 15))

        def interact():
            control.children[0].value = next(others)

        return *paired(move, interact, rounds=11), ""


@row("training with LiveChart", "the same loop without it", "1.02x")
def live_chart():
    images, labels = pictures(64)
    (step,) = steps(lab.SmallCNN, images, labels, "fp32")
    training = drawing = 0.0
    with notebook_display():
        chart = lab.LiveChart("loss", total=150)
        first = seconds(chart.show)
        for index in range(150):
            training += seconds(step)
            drawing += seconds(lambda x=index: chart.add("fp32", x, 1 / (1 + x)))
        drawing += seconds(chart.redraw)
    return training + drawing, training, f"and {1e3 * first:.0f} ms once, for the first frame"


@row("one update of LiveChart", "one update of livelossplot", "less")
def live_chart_update():
    from livelossplot import PlotLosses
    from livelossplot.outputs import MatplotlibPlot

    with notebook_display():
        chart = lab.LiveChart("loss", total=100).show()
        theirs = PlotLosses(outputs=[MatplotlibPlot()], mode="script")
        counter = iter(range(1, 1000))

        def ours():
            index = next(counter)
            chart.add("fp32", index / 10, 1 / index)
            chart.redraw()

        def livelossplot():
            index = next(counter)
            theirs.update({"loss": 1 / index})
            theirs.send()

        return *paired(ours, livelossplot, rounds=15), "each update draws a frame"


# ---- listening -----------------------------------------------------------------------------------


@row("SmallCNN step under watch", "the same loop without it", "1.05x")
def watch():
    images, labels = pictures(64)

    def loop():
        torch.manual_seed(0)
        model = lab.SmallCNN()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step():
            with lab.tensor_core_emulation():
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return model, optimizer, scaler, step

    model, optimizer, scaler, watched = loop()
    *_, plain = loop()
    times = []
    with lab.watch(model, optimizer, scaler, report=False):
        for _ in range(3):
            watched(), plain()
        for _ in range(15):
            times.append((seconds(watched), seconds(plain)))
    return *(statistics.median(column) for column in zip(*times, strict=True)), ""


# ---- start and course ----------------------------------------------------------------------------


@row("import amp_lab", "import torch", "1.05x")
def imports():
    def load(module):
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    return *paired(lambda: load("amp_lab"), lambda: load("torch"), rounds=5), "whole processes"


@row("saved_bytes of an MLP", "the forward pass", "shown")
def saved_bytes():
    model, x = mlp(512), torch.randn(512, 512)
    return *paired(lambda: lab.saved_bytes(model, x), lambda: model(x)), ""


@row("the course under strict nbval", "6 minutes", "less")
def course():
    command = [sys.executable, "-m", "pytest", "notebooks", "-q", "-p", "no:cacheprovider"]
    passed = []

    def run():
        passed.append(subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0)

    return seconds(run), 360.0, "passed" if passed[0] else "FAILED"


# ---- the table -----------------------------------------------------------------------------------


def duration(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def measure(function) -> tuple[str, str, str, str]:
    """Ours, theirs, the ratio and a note; a row that cannot be measured says why."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            ours, theirs, note = function()
    except (ImportError, AttributeError) as error:
        return "", "", "skipped", str(error)
    ratio = ours / theirs
    text = f"{ratio:.2f}x" if ratio >= 0.1 else f"1/{1 / ratio:.0f}"
    return duration(ours), duration(theirs), text, note


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of row names; none means all")
    parser.add_argument("--course", action="store_true", help="also run the notebooks")
    options = parser.parse_args()
    wanted = [
        entry
        for entry in ROWS
        if (not options.words or any(word in entry[0] + entry[1] for word in options.words))
        and (entry[0] != "course" or options.course)
    ]
    importlib.import_module("amp_lab.live")  # so that no row pays for matplotlib's import
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{lab.capabilities()['cpu']}, load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    header = ("what", "ours", "against", "theirs", "ratio", "goal", "note")
    widths = (41, 9, 31, 9, 8, 21, 0)

    def line(cells):
        text = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print(text.rstrip(), flush=True)

    line(header)
    for _, what, against, goal, function in wanted:
        ours, theirs, ratio, note = measure(function)
        line((what, ours, against, theirs, ratio, goal, note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
