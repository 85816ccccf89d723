"""Where in the model's own code? The nearest line outside PyTorch."""

import linecache
import sys
from pathlib import Path
from types import CodeType, TracebackType

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

_TORCH = str(Path(torch.__file__).parent)
_RECORDER = str(Path(__file__).with_name("recorder.py"))
_HERE = {_RECORDER, *(str(Path(__file__).with_name(f"{m}.py")) for m in ("dryrun", "attention"))}


def own_line() -> str:
    """File and line of the model's own code that is running: the nearest frame outside torch."""
    frame = sys._getframe(1)
    while frame is not None and not _starts(frame.f_code):
        if not _is_machinery(frame.f_code.co_filename):
            return f"{_name(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _name(filename: str) -> str:
    """A file's name without its folder; `cell` for the cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    is_cell = shell is not None and shell.compile.format_code_name(filename) is not None
    return "cell" if is_cell else Path(filename).name


def _starts(code: CodeType) -> bool:
    """Here the model's code begins."""
    return code.co_filename == _RECORDER and code.co_name == "run"


def _is_machinery(filename: str) -> bool:
    return filename.startswith((_TORCH, "<")) or filename in _HERE or "contextlib" in filename


def explain(error: Exception, path: str, module: nn.Module | None) -> str:
    """What to tell about an error that a dry run met in `module`, at `path`, and a way out."""
    kind = "" if module is None else f" ({type(module).__name__})"
    told = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    if isinstance(error, DataDependentOutputException) or "tensor subclasses" in told:
        problem = f"{getattr(error, 'func', told)}: it needs the values of a tensor"
        way_out = "compute it from shapes, or pass it in as a Python number"
    elif isinstance(error, DynamicOutputShapeException):
        problem = f"{error.func}: the shape of its result depends on values, as in x[x > 0]"
        way_out = "use torch.where, or a mask of fixed shape"
    elif isinstance(error, UnsupportedOperatorException) or "no fake impl" in told:
        problem = f"{getattr(error, 'func', told)}: the operation has no fake kernel"
        way_out = "give it one with torch.library.register_fake"
    elif "two" in told and "devices" in told:
        problem = told
        way_out = (
            "this fails on a GPU too: register the tensor as a buffer, or create it on the input's "
            "device"
        )
    elif "same dtype" in told:
        problem = told
        way_out = "this fails on a GPU too: cast one to the other's dtype"
    else:
        problem = f"{type(error).__name__}: {told}"
        way_out = "check that the model runs on real inputs of these shapes and dtypes"
    if path and module is not None:
        way_out += f"; or leave the module out: skip=[{path!r}]"
    where = _failing_line(error.__traceback__, type(module))
    return f"in {path or 'the model'}{kind}{where}: {problem}. What to do: {way_out}."


def _failing_line(trace: TracebackType | None, module_class: type) -> str:
    """The innermost line of the failing module's file, or else outside torch."""
    lines = []
    inside = False
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if inside and not _is_machinery(filename):
            lines.append((filename, trace.tb_lineno))
        inside = inside or _starts(trace.tb_frame.f_code)
        trace = trace.tb_next
    home = getattr(sys.modules.get(module_class.__module__), "__file__", None)
    at_home = [line for line in lines if line[0] == home]
    if not lines:
        return ""
    filename, number = (at_home or lines)[-1]
    code = linecache.getline(filename, number).strip()
    return f", {_name(filename)}:{number}" + (f", `{code}`" if code else "")
