"""The command `python -m amp_lab audit package.module:factory --input 8x3x224x224`."""

import argparse
import json
import re
import sys
from importlib import import_module

import torch
from torch import nn

from .audit import Audit, AuditError, audit

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class _BadInput(ValueError):
    """The command line asks for something that does not exist."""


def add_command(subparsers: argparse._SubParsersAction) -> None:
    """Add `audit` to the command line."""
    parser = subparsers.add_parser(
        "audit",
        help="what CUDA autocast does to your model, without a GPU",
        description="What CUDA autocast does to your model, without a GPU and without its memory.",
    )
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a callable without arguments that returns an nn.Module",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="such as 8x3x224x224; once for each input of the model",
    )
    parser.add_argument(
        "--input-dtype",
        action="append",
        default=[],
        metavar="DTYPE",
        help="such as int64; one for all inputs, or one for each (default: float32)",
    )
    parser.add_argument(
        "--dtype", default="float16", metavar="float16|bfloat16", help="autocast's dtype"
    )
    parser.add_argument("--gpu", help="estimate the speed-up on this GPU, such as H100")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="MODULE", help="leave this module out"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the audit. Exit code 1: the dry run cannot follow the model; 2: bad input."""
    try:
        report = _audit(options)
    except AuditError as error:
        return _fail(1, error)
    except _BadInput as error:
        return _fail(2, error)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0


def _fail(code: int, error: Exception) -> int:
    print(f"amp_lab audit: {error}", file=sys.stderr)
    return code


def _audit(options: argparse.Namespace) -> Audit:
    if options.dtype not in DTYPES:
        raise _BadInput(f"--dtype is {options.dtype!r}; expected {' or '.join(DTYPES)}")
    inputs = _inputs(options.input, options.input_dtype)
    model = _build(options.factory)
    try:
        return audit(
            model, *inputs, dtype=DTYPES[options.dtype], gpu=options.gpu, skip=options.skip
        )
    except (TypeError, ValueError) as error:
        raise _BadInput(error) from error


def _inputs(shapes: list[str], dtypes: list[str]) -> list[torch.Tensor]:
    if not shapes:
        raise _BadInput("no --input; give the shape of each input, such as --input 8x3x224x224")
    if len(dtypes) not in (0, 1, len(shapes)):
        raise _BadInput(
            f"{len(dtypes)} --input-dtype for {len(shapes)} --input: give one, or one for each"
        )
    if len(dtypes) < 2:
        dtypes = (dtypes or ["float32"]) * len(shapes)
    return [_input(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _input(shape: str, name: str) -> torch.Tensor:
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise _BadInput(
            f"--input {shape!r} is no shape; write sizes with an x, such as 8x3x224x224"
        )
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # qint8: quantized
        raise _BadInput(
            f"--input-dtype {name!r} is no plain dtype of PyTorch, such as float32 or int64"
        )
    try:
        return torch.empty([int(size) for size in shape.split("x")], dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:  # an overflow
        raise _BadInput(f"no input of shape {shape} in {name}: {_line(error)}") from error


def _build(spec: str) -> nn.Module:
    """Call the factory, on the meta device if it can be built there: that takes no memory."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise _BadInput(f"{spec!r} is no package.module:factory")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise _BadInput(f"cannot import {module_name!r}: {_line(error)}") from error
    factory = module
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise _BadInput(f"{module_name!r} has no callable named {name!r}")
    try:
        try:
            with torch.device("meta"):
                model = factory()
        except (RuntimeError, NotImplementedError):
            model = factory()
    except Exception as error:
        raise _BadInput(f"{spec}() raises {_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise _BadInput(f"{spec}() returns {type(model).__name__}, not an nn.Module")
    return model


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
