"""The notebooks keep the rules, and each rule refuses a notebook that breaks it."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import rules
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOKS = sorted(Path(__file__).parent.parent.joinpath("notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_rule(path, rule):
    assert rule(nbformat.read(path, as_version=4)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_between_notebooks_lead_somewhere(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    for target in re.findall(r"\]\(([\w./-]+\.(?:ipynb|md))(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), target


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def good_notebook():
    """A small notebook that keeps every rule."""
    stub = "def f():\n    raise NotImplementedError\n\n\nlab.checks.f(f)"
    solution = "def f():\n    return 1\n\n\nlab.checks.f(f)"
    code = [
        new_code_cell(
            rules.SETUP, metadata={"tags": ["nbval-ignore-output"]}, outputs=[stream("cpu\n")]
        ),
        new_code_cell("print(1)", outputs=[stream("1\n")]),
        new_code_cell("print(2)", outputs=[stream("2\n")]),
        new_code_cell(
            "canvas",
            outputs=[new_output("display_data", {"image/png": "", "text/plain": "A line."})],
        ),
        new_code_cell(stub, outputs=[stream("TO DO    f: not attempted yet.\n")]),
        new_code_cell(
            solution,
            metadata={"tags": ["solution"], "jupyter": {"source_hidden": True}},
            outputs=[stream("PASSED   f: well done.\n")],
        ),
    ]
    for number, cell in enumerate(code, 1):
        cell.execution_count = number
    first = new_markdown_cell("# Title\n**You will learn** much. **Time:** 5. **Needs:** a CPU.")
    points = "".join(f"{i}. point\n" for i in range(1, 6))
    last = new_markdown_cell(f"## Recap\n{points}\n**Read on:** a paper. **Next:** more.")
    return new_notebook(cells=[first, *code, last])


def test_the_good_sample_keeps_every_rule():
    assert {rule.__name__: rule(good_notebook()) for rule in rules.RULES} == {
        rule.__name__: [] for rule in rules.RULES
    }


def no_title(nb):
    nb.cells[0].source = nb.cells[0].source.replace("# Title", "Title")


def no_needs(nb):
    nb.cells[0].source = nb.cells[0].source.replace("**Needs:**", "")


def other_setup(nb):
    nb.cells[1].source = "import torch"


def no_recap(nb):
    nb.cells[-1].source = nb.cells[-1].source.replace("## Recap", "## End")


def four_points(nb):
    nb.cells[-1].source = nb.cells[-1].source.replace("5. point\n", "")


def never_run(nb):
    nb.cells[2].execution_count = None


def run_twice(nb):
    nb.cells[2].execution_count = 9


def stored_error(nb):
    nb.cells[2].outputs = [new_output("error", ename="E", evalue="", traceback=[])]


def stored_warning(nb):
    nb.cells[2].outputs = [stream("careful", "stderr")]


def stored_widget(nb):
    nb.cells[2].outputs = [new_output("display_data", {rules.WIDGET_VIEW: {}, "text/plain": "w"})]


def widget_state(nb):
    nb.metadata["widgets"] = {}


def too_big(nb):
    nb.cells[2].source = "#" * rules.MAX_BYTES


def open_solution(nb):
    del nb.cells[6].metadata["jupyter"]


def failing_solution(nb):
    nb.cells[6].outputs = [stream("NOT YET  f: no.\n")]


def lost_solution(nb):
    del nb.cells[6]


def other_check(nb):
    nb.cells[6].source = nb.cells[6].source.replace("checks.f", "checks.g")


def lost_stub(nb):
    nb.cells[5].source = "print(3)"


def stub_without_check(nb):
    nb.cells[5].source = "def f():\n    raise NotImplementedError"


def attempted_stub(nb):
    nb.cells[5].outputs = [stream("NOT YET  f: no.\n")]


def uses_interact(nb):
    nb.cells[2].source = "widgets.interact(f, x=3)"


def uses_clear_output(nb):
    nb.cells[2].source = "clear_output(wait=True)"


def uses_output(nb):
    nb.cells[2].source = "with widgets.Output():\n    pass"


def uses_a_magic(nb):
    nb.cells[2].source = "%matplotlib inline"


def path_in_source(nb):
    nb.cells[2].source = 'open("/home/me/data.txt")'


def path_in_output(nb):
    nb.cells[2].outputs = [stream("/tmp/x/y.py:3: careful\n")]


def windows_path(nb):
    nb.cells[2].source = r'open("C:\\data")'


def hardly_compared(nb):
    nb.cells[2].metadata["tags"] = ["nbval-ignore-output"]


def misspelt_tag(nb):
    nb.cells[2].metadata["tags"] = ["nbval-ignore-outputs"]


def comment_marker(nb):
    nb.cells[2].source = "# NBVAL_IGNORE_OUTPUT"


def nameless_picture(nb):
    nb.cells[4].outputs[0]["data"]["text/plain"] = "<Figure size 640x480 with 1 Axes>"


def repeated_id(nb):
    nb.cells[2].id = nb.cells[3].id


@pytest.mark.parametrize(
    "rule, fault",
    [
        (rules.header, no_title),
        (rules.header, no_needs),
        (rules.header, other_setup),
        (rules.ending, no_recap),
        (rules.ending, four_points),
        (rules.counts, never_run),
        (rules.counts, run_twice),
        (rules.errors, stored_error),
        (rules.warnings, stored_warning),
        (rules.widget_views, stored_widget),
        (rules.widget_views, widget_state),
        (rules.size, too_big),
        (rules.exercises, open_solution),
        (rules.exercises, failing_solution),
        (rules.exercises, lost_solution),
        (rules.exercises, other_check),
        (rules.exercises, lost_stub),
        (rules.exercises, stub_without_check),
        (rules.exercises, attempted_stub),
        (rules.forbidden_calls, uses_interact),
        (rules.forbidden_calls, uses_clear_output),
        (rules.forbidden_calls, uses_output),
        (rules.forbidden_calls, uses_a_magic),
        (rules.absolute_paths, path_in_source),
        (rules.absolute_paths, path_in_output),
        (rules.absolute_paths, windows_path),
        (rules.compared, hardly_compared),
        (rules.known_tags, misspelt_tag),
        (rules.known_tags, comment_marker),
        (rules.pictures, nameless_picture),
        (rules.cell_ids, repeated_id),
    ],
    ids=lambda x: x.__name__,
)
def test_a_rule_refuses_a_bad_sample(rule, fault):
    notebook = copy.deepcopy(good_notebook())
    fault(notebook)
    assert rule(notebook)


def test_every_rule_has_a_bad_sample():
    tested = {
        mark.args[1][i][0]
        for mark in test_a_rule_refuses_a_bad_sample.pytestmark
        for i in range(len(mark.args[1]))
    }
    assert tested == set(rules.RULES)


@pytest.mark.parametrize(
    "stored, passes",
    [("[0.49625658988952637]\n", True), ("[0.49625658988952638]\n", False), ("", False)],
    ids=["right", "one digit off", "nothing stored"],
)
def test_nbval_compares_to_the_last_digit(tmp_path, stored, passes):
    cell = new_code_cell(
        "import amp_lab as lab\nimport torch\n\ntorch.manual_seed(0)\nprint(torch.rand(1).tolist())",
        execution_count=1,
        outputs=[stream(stored)] if stored else [],
    )
    path = tmp_path / "sample.ipynb"
    nbformat.write(new_notebook(cells=[cell]), path)
    config = Path(__file__).parent.parent / "pyproject.toml"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", str(config), "--rootdir", str(tmp_path)]
        + ["-p", "no:cacheprovider", str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert (result.returncode == 0) is passes, result.stdout
