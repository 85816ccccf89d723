"""The rules that every notebook of the course keeps. Each returns a list of what is wrong."""

import json
import re

TAGS = {"nbval-ignore-output", "solution", "gpu", "raises-exception"}
SETUP = "import amp_lab as lab\n\ndevice = lab.setup()"
MAX_BYTES = 1_500_000
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
FORBIDDEN_CALLS = {
    r"\binteract(ive)?\(": "interact() redraws everything and cannot be compared: use an explorer",
    r"\bclear_output\(": "clear_output() breaks comparison: update a display instead",
    r"\bwith\s+[\w.]*Output\(\)": "Output() as a context manager breaks comparison",
    r"sys\.path": "amp_lab is installed: no sys.path",
    r"range\(0\)": "a loop that never runs teaches nothing",
    r"^\s*[!%]": "no shell commands and no magics: use Python",
}
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])(/(home|root|tmp|work|usr|Users|mnt|opt)/\w|[A-Z]:\\)")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def outputs(cell):
    return cell.get("outputs", [])


def printed(cell):
    return "".join(o["text"] for o in outputs(cell) if o["output_type"] == "stream")


def header(notebook):
    first, *rest = notebook.cells
    wrong = [
        f"the first cell lacks {part!r}"
        for part in ("# ", "**You will learn**", "**Time:**", "**Needs:**")
        if part not in first.source
    ]
    if first.cell_type != "markdown" or not first.source.startswith("# "):
        wrong.append("the first cell must be markdown and begin with the title")
    code = code_cells(notebook)
    if not code or code[0].source.strip() != SETUP:
        wrong.append("the first code cell must be exactly the setup cell")
    return wrong


def ending(notebook):
    text = "\n".join(c.source for c in notebook.cells[-3:] if c.cell_type == "markdown")
    wrong = [f"the end lacks {part!r}" for part in ("## Recap", "**Read on:**") if part not in text]
    points = re.findall(r"^\d\. ", text.split("## Recap")[-1], re.MULTILINE)
    if len(points) != 5:
        wrong.append(f"the recap has {len(points)} points, not five")
    return wrong


def counts(notebook):
    found = [cell.execution_count for cell in code_cells(notebook)]
    if found != list(range(1, len(found) + 1)):
        return [f"cells not run once each, from top to bottom: {found}"]
    return []


def errors(notebook):
    return [
        f"cell {cell.execution_count} stores the error {output['ename']}"
        for cell in code_cells(notebook)
        for output in outputs(cell)
        if output["output_type"] == "error"
    ]


def warnings(notebook):
    return [
        f"cell {cell.execution_count} stores text on stderr"
        for cell in code_cells(notebook)
        for output in outputs(cell)
        if output.get("name") == "stderr"
    ]


def widget_views(notebook):
    wrong = [
        f"cell {cell.execution_count} stores a widget view, which reopens as an error"
        for cell in code_cells(notebook)
        for output in outputs(cell)
        if WIDGET_VIEW in output.get("data", {})
    ]
    return wrong + (["metadata.widgets is stored"] if "widgets" in notebook.metadata else [])


def size(notebook):
    bytes_ = len(json.dumps(notebook))
    return [f"{bytes_} bytes, more than {MAX_BYTES}"] if bytes_ > MAX_BYTES else []


def exercises(notebook):
    """Each stub ends in a check; the next code cell is its folded solution, with the same check."""
    wrong = []
    code = code_cells(notebook)
    for i, cell in enumerate(code):
        number = cell.execution_count
        checks = re.findall(r"^(lab\.checks\.\w+)\(", cell.source, re.MULTILINE)
        if "solution" in tags(cell):
            if not cell.metadata.get("jupyter", {}).get("source_hidden"):
                wrong.append(f"cell {number}: the solution is not folded")
            before = code[i - 1].source if i else ""
            if "NotImplementedError" not in before or not checks or checks[-1] not in before:
                wrong.append(f"cell {number}: no stub with the same check before the solution")
            if not printed(cell).splitlines()[-1:] or "PASSED" not in printed(cell):
                wrong.append(f"cell {number}: the solution does not pass")
        elif "raise NotImplementedError" in cell.source:
            if not checks or not cell.source.strip().splitlines()[-1].startswith(checks[-1]):
                wrong.append(f"cell {number}: the stub does not end in its check")
            if i + 1 == len(code) or "solution" not in tags(code[i + 1]):
                wrong.append(f"cell {number}: no solution follows the stub")
            if not printed(cell).startswith("TO DO"):
                wrong.append(f"cell {number}: the stored stub was attempted")
    return wrong


def forbidden_calls(notebook):
    return [
        f"cell {cell.execution_count}: {why}"
        for cell in code_cells(notebook)
        for pattern, why in FORBIDDEN_CALLS.items()
        if re.search(pattern, cell.source, re.MULTILINE)
    ]


def absolute_paths(notebook):
    texts = [cell.source for cell in notebook.cells]
    for cell in code_cells(notebook):
        for output in outputs(cell):
            texts.append(output.get("text", ""))
            data = output.get("data", {})
            texts += [data.get("text/plain", ""), data.get("text/html", "")]
    return [
        f"absolute path: ...{text[max(0, m.start() - 20) : m.end() + 20]!r}"
        for text in texts
        for m in ABSOLUTE_PATH.finditer(text)
    ]


def compared(notebook):
    shown = [cell for cell in code_cells(notebook) if outputs(cell)]
    free = [cell for cell in shown if "nbval-ignore-output" in tags(cell)]
    if len(free) > 0.2 * len(shown):
        return [f"{len(free)} of {len(shown)} cells with output are not compared"]
    return []


def known_tags(notebook):
    wrong = [
        f"cell {cell.execution_count} has the unknown tag {tag!r}"
        for cell in code_cells(notebook)
        for tag in tags(cell)
        if tag not in TAGS
    ]
    return wrong + [
        f"cell {cell.execution_count}: tag it nbval-ignore-output, do not write it in a comment"
        for cell in code_cells(notebook)
        if "NBVAL" in cell.source
    ]


def pictures(notebook):
    return [
        f"cell {cell.execution_count}: a picture without a text alternative"
        for cell in code_cells(notebook)
        for output in outputs(cell)
        if "image/png" in output.get("data", {})
        and re.match(r"^(<.*>)?$", output["data"].get("text/plain", "").strip())
    ]


def cell_ids(notebook):
    ids = [cell.get("id") for cell in notebook.cells]
    return (
        []
        if None not in ids and len(set(ids)) == len(ids)
        else ["cell ids are missing or repeated"]
    )


RULES = (
    header,
    ending,
    counts,
    errors,
    warnings,
    widget_views,
    size,
    exercises,
    forbidden_calls,
    absolute_paths,
    compared,
    known_tags,
    pictures,
    cell_ids,
)
