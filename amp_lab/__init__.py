"""AMP Lab: helpers for a course on PyTorch Automatic Mixed Precision.

    import amp_lab as lab
    device = lab.setup()

Only PyTorch is imported here. The names in `_LAZY` bring in matplotlib or ipywidgets, and are
imported when they are first used.
"""

from importlib import import_module

from .audit import Audit, AuditError, audit
from .datasets import batches, fashion_mnist, shakespeare
from .device import capabilities, setup
from .dryrun import dry_run
from .emulation import tensor_core_emulation
from .formats import BF16, E4M3, E5M2, FP16, FP32, TF32, FloatFormat
from .gradients import ExponentHistogram
from .measure import matmul_tflops, median_ms, peak_memory, saved_bytes
from .measurements import make_step
from .models import CharTransformer, SmallCNN, WordLM
from .policy import Policy, classify, op_table
from .recordings import recordings
from .scaler import LossScaler
from .training import RECIPES, Recipe, Step, accuracy, train
from .watch import watch

_LAZY = {
    "FormatExplorer": "explorers",
    "LiveChart": "live",
    "PrecisionRace": "explorers",
    "OpQuiz": "explorers",
    "ScaleExplorer": "explorers",
    "canvas": "canvas",
    "checks": "checks",
    "distributed": "distributed",
    "explorers": "explorers",
    "live": "live",
    "plots": "plots",
}

__all__ = [
    "Audit",
    "AuditError",
    "BF16",
    "CharTransformer",
    "E4M3",
    "E5M2",
    "ExponentHistogram",
    "FP16",
    "FP32",
    "FloatFormat",
    "LossScaler",
    "Policy",
    "RECIPES",
    "Recipe",
    "SmallCNN",
    "Step",
    "TF32",
    "WordLM",
    "accuracy",
    "audit",
    "batches",
    "capabilities",
    "classify",
    "dry_run",
    "fashion_mnist",
    "make_step",
    "matmul_tflops",
    "median_ms",
    "op_table",
    "peak_memory",
    "recordings",
    "saved_bytes",
    "setup",
    "shakespeare",
    "tensor_core_emulation",
    "train",
    "watch",
    *_LAZY,
]


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module 'amp_lab' has no attribute {name!r}")
    module = import_module(f".{_LAZY[name]}", __name__)
    return module if name == _LAZY[name] else getattr(module, name)


def __dir__():
    return sorted(set(globals()) | set(__all__))
