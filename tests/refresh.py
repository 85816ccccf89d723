"""Run notebooks in a fresh kernel on the CPU and store their outputs, which are the expected values.

    python tests/refresh.py                    # all notebooks
    python tests/refresh.py 00 05              # those whose names begin so

Afterwards read `git diff notebooks/` as you would read code: what changed must be explained.
Needs what the course needs; stores nothing if a cell fails.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def execute(notebook, folder: Path) -> None:
    """Run all cells of `notebook`, in place, with `folder` as the working directory."""
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        store_widget_state=False,
        record_timing=False,
    ).execute()


def tidy(notebook) -> None:
    """Drop what would show as an error when reopened, and what differs from machine to machine."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        for noise in ("execution", "collapsed", "scrolled"):
            cell.metadata.pop(noise, None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)
            if "transient" in output:
                del output["transient"]


def refresh(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, path.parent)
    tidy(notebook)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of notebook names; none means all")
    names = parser.parse_args().names
    paths = [
        path
        for path in sorted(NOTEBOOKS.glob("*.ipynb"))
        if not names or any(path.name.startswith(name) for name in names)
    ]
    if not paths:
        print(f"no notebook in {NOTEBOOKS} begins with {' or '.join(names)}", file=sys.stderr)
        return 1
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    failed = 0
    for path in paths:
        start = time.perf_counter()
        try:
            refresh(path)
        except CellExecutionError as error:
            failed += 1
            print(f"{path.name}: FAILED, left as it was\n{error}", file=sys.stderr)
        else:
            print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
