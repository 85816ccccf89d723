"""Files with the measurements of machines: written whole, checked when read.

Those in `data/measurements/` are shown in the notebooks beside what the reader's own machine does.
"""

import datetime
import json
import math
import os
import tempfile
from pathlib import Path

from .datasets import DATA

FOLDER = DATA / "measurements"
FORMAT = 1


def save(recording: dict, path: Path | str, force: bool = False) -> None:
    """Write a recording: a whole file or none. Refuses to overwrite unless `force`."""
    path = Path(path)
    check(recording, path.name)
    check_path(path, force)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".", suffix=".tmp", encoding="utf-8", delete=False
    ) as file:
        try:
            json.dump(recording, file, indent=1, allow_nan=False)
            file.write("\n")
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def check_path(path: Path, force: bool) -> None:
    """Raise what would be wrong with writing to `path`, before minutes of measuring."""
    if path.suffix != ".json":
        raise ValueError(f"{path.name!r} should end in .json")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; choose the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"the folder {str(path.parent)!r} is write-protected")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; choose another name, or add --force")


def recordings(device: str | None = None) -> list[dict]:
    """The recordings in `data/measurements/`, checked, in the order of their file names.

    `device` "cpu" or "cuda" selects those of that kind. Each is the dictionary that was saved, with
    its file's name, without the ending, as "name". An empty list means that there are none. Raises
    `ValueError` for a damaged file.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"recordings: device is {device!r}, expected 'cpu', 'cuda' or None")
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        try:
            recording = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from error
        check(recording, path.name)
        if device in (None, recording["machine"]["device"]):
            found.append(recording | {"name": path.stem})
    return found


def describe(recording: dict) -> str:
    """Whose numbers these are, in one line: machine, versions, date."""
    machine = recording["machine"]
    if machine["device"] == "cuda":
        hardware = f"{machine['gpu']}, driver {recording['driver'] or 'unknown'}"
        hardware += f", CUDA {machine['cuda_build']}"
    else:
        hardware = f"{machine['cpu']}, {machine['threads']} threads"
    return f"{hardware}, PyTorch {machine['torch']}, {recording['date'][:10]}"


_ROWS = {
    "matmul": {"n": int, "dtype": str, "tflops": float},
    "steps": {
        "model": str,
        "width": int | None,
        "batch": int,
        "precision": str,
        "emulated": bool,
        "ms": float,
        "peak_bytes": int,
        "saved_bytes": int,
    },
}


def check(recording: dict, name: str = "the recording") -> None:
    """Raise `ValueError` unless `recording` has the parts and types of a recording."""

    def insist(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{name}: {what}")

    insist(isinstance(recording, dict), f"expected a dictionary, got {type(recording).__name__}")
    insist(
        recording.get("format") == FORMAT,
        f"format is {recording.get('format')!r}, expected {FORMAT}; record it anew",
    )
    for key, kind in {"date": str, "machine": dict, "complete": bool}.items():
        insist(isinstance(recording.get(key), kind), f"{key!r} is missing or no {kind.__name__}")
    insist("driver" in recording, "'driver' is missing")
    try:
        datetime.datetime.fromisoformat(recording["date"])
    except ValueError:
        insist(False, f"the date {recording['date']!r} is no ISO date")
    for key in ("device", "torch", "python", "cpu", "threads", "gpu", "cuda_build"):
        insist(key in recording["machine"], f"the machine lacks {key!r}")
    for part, columns in _ROWS.items():
        insist(isinstance(recording.get(part), list), f"{part!r} is missing or no list")
        for row in recording[part]:
            insist(isinstance(row, dict) and set(row) == set(columns), f"{part}: odd row {row}")
            for key, kind in columns.items():
                insist(isinstance(row[key], kind), f"{part}: {key} is {row[key]!r}")
            positive = row["tflops"] if part == "matmul" else row["ms"]
            insist(math.isfinite(positive) and positive > 0, f"{part}: not above 0 in {row}")
