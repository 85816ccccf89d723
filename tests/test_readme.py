"""What the tables of the course promise is what the notebooks say."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def header_minutes(path: Path) -> int:
    """Reading and exercise minutes, added up, from a notebook's first cell."""
    header = nbformat.read(path, as_version=4).cells[0].source
    time = header.split("**Time:**")[1].split("**Needs:**")[0]
    return sum(map(int, re.findall(r"\d+", time)))


def test_there_are_eleven_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n:02d}" for n in range(11)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_tables_tell_the_minutes_of_the_header(path):
    minutes = header_minutes(path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.splitlines() if f"(notebooks/{path.name})" in line]
    assert f"| {minutes} |" in row
    start = nbformat.read(NOTEBOOKS[0], as_version=4)
    table = "\n".join(cell.source for cell in start.cells if "## The map" in cell.source)
    assert re.search(rf"^\| {path.name[:2]} .*\| {minutes} \|$", table, re.MULTILINE)


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "data" / "README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_test_command_of_ci_is_that_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (install,) = re.findall(r'pip install (-r requirements.txt -e "[^"]+") && pytest', readme)
    assert install in ci and ci.rstrip().endswith("pytest")
