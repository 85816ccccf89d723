"""The package as a whole: what imports what, what an import costs, what the texts may say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "amp_lab"

# Imports point downwards only.
FLOORS = {
    "device": 0,
    "datasets": 0,
    "formats": 0,
    "models": 0,
    "nonfinite": 0,
    "tables": 0,
    "where": 0,
    "dryrun": 1,
    "emulation": 1,
    "gradients": 1,
    "measure": 1,
    "recordings": 1,
    "roofline": 1,
    "scaler": 1,
    "zones": 1,
    "attention": 2,
    "canvas": 2,
    "findings": 2,
    "policy": 2,
    "training": 2,
    "listener": 3,
    "measurements": 3,
    "recorder": 3,
    "causes": 4,
    "report": 4,
    "watch": 4,
    "audit": 5,
    "live": 5,
    "plots": 5,
    "checks": 6,
    "explorers": 6,
    "cli_audit": 7,
    "cli_measure": 7,
    "distributed": 7,
    "doctor": 7,
    "__main__": 8,
}


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, other than those of its own folder."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amp_lab."):
            names = [node.module.removeprefix("amp_lab.")]
        else:
            continue
        found |= {name.split(".")[0] for name in names}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    assert module_of(path) in FLOORS, "give the new module its floor"
    floor = FLOORS[module_of(path)]
    for name in imported(path):
        assert FLOORS[name] < floor, f"{path.name} (floor {floor}) imports {name}"


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_no_plotting_and_no_widgets():
    heavy = run(
        "import sys, torch; before = set(sys.modules); import amp_lab; "
        "print(sorted({n.split('.')[0] for n in set(sys.modules) - before}))"
    )
    for name in ("matplotlib", "ipywidgets", "IPython", "PIL", "transformers", "pandas"):
        assert f"'{name}'" not in heavy


def test_every_public_name_can_be_had():
    assert (
        run("import amp_lab as lab; print(all(hasattr(lab, n) for n in lab.__all__))") == "True\n"
    )
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        import amp_lab

        amp_lab.nonsense  # noqa: B018


def test_every_public_name_has_a_docstring():
    import amp_lab

    for name in amp_lab.__all__:
        thing = getattr(amp_lab, name)
        if callable(thing):
            assert thing.__doc__ and not thing.__doc__.startswith("dict("), name


TEXTS = [
    path
    for pattern in (
        "*.md",
        "*.toml",
        "*.txt",
        "amp_lab/**/*.py",
        "tests/*",
        "data/*.*",
        "notebooks/*",
    )
    for path in ROOT.glob(pattern)
    if path.suffix in {".md", ".toml", ".txt", ".py", ".csv", ".cfg", ".ipynb", ".json"}
]
DEPRECATED = r"torch\.cuda\.amp\.(autocast|GradScaler)\("


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_pickles_and_no_network(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py" and path.parent != ROOT / "tests":
        assert not re.search(DEPRECATED, text)
        for word in ("allow_pickle=True", "weights_only=False", "urlopen", "requests.get"):
            assert word not in text
