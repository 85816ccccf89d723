"""The notebooks in a real browser: JupyterLab in Chromium."""

from pathlib import Path

import lab_browser
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(lab_browser.missing()), reason=str(lab_browser.missing())),
]


def write_notebook(path: Path, *sources: str) -> Path:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [new_code_cell(source) for source in sources]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def test_start_here_runs_and_its_chart_is_live():
    with lab_browser.opened(NOTEBOOKS / "00_start_here.ipynb") as lab:
        chart = lab.cell("with lab.LiveChart")
        stored = lab.images(chart)
        assert len(stored) == 1, "the stored picture shows when the notebook is opened"
        lab.start_running()
        frames = set()
        while not lab.page.evaluate("window.ampDone"):
            frames |= set(lab.images(chart))
            lab.page.wait_for_timeout(100)
        lab.wait_until_done()
        assert len(frames - set(stored)) >= 5, "the chart changes while the loop runs"
        assert lab.page.locator(".jp-RenderedText[data-mime-type*=error]").count() == 0
        assert lab.errors == []


def test_the_stop_button_leaves_a_run_that_can_go_on(tmp_path):
    start = """
import time
import torch
import amp_lab as lab

torch.manual_seed(0)
model = lab.SmallCNN()
optimizer = torch.optim.AdamW(model.parameters())
data = lab.fashion_mnist()
batches = lab.batches(data.train, steps=100_000)
seen = []
for step in lab.train(model, batches, lab.RECIPES["fp16 + GradScaler"], optimizer):
    seen.append(step)
"""
    go_on = """
for _, step in zip(range(3), lab.train(model, batches, lab.RECIPES["bf16"], optimizer)):
    pass
steps = {int(state["step"]) for state in optimizer.state.values()}
skipped = sum(s.skipped for s in seen)
print("consistent:", steps == {len(seen) - skipped + 3} and step.loss < 3)
"""
    path = write_notebook(tmp_path / "stop.ipynb", start, go_on)
    with lab_browser.opened(path) as lab:
        page = lab.page
        page.locator(".jp-CodeCell").first.click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(6000)
        page.locator(
            "[data-command='notebook:interrupt-kernel'], [title*='Interrupt']"
        ).first.click()
        page.wait_for_selector(".jp-CodeCell >> nth=0 >> text=KeyboardInterrupt", timeout=60_000)
        page.locator(".jp-CodeCell").nth(1).click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_selector(".jp-CodeCell >> nth=1 >> .jp-OutputArea >> text=consistent: True")


def test_explorers_follow_mouse_and_keyboard(tmp_path):
    setup = "import torch\nimport amp_lab as lab\n\ntorch.manual_seed(0)"
    scale = "lab.ScaleExplorer(lab.ExponentHistogram.of(1e-6 * torch.randn(10_000)))"
    with lab_browser.opened(
        write_notebook(tmp_path / "panels.ipynb", setup, scale, "lab.FormatExplorer('1')")
    ) as lab:
        lab.run_all()
        page = lab.page

        cell = lab.cell("ScaleExplorer")
        before, text = lab.images(cell), cell.locator(".jp-OutputArea").inner_text()
        cell.get_by_role("slider").first.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(1000)
        assert lab.images(cell) != before
        assert cell.locator(".jp-OutputArea").inner_text() != text

        cell = lab.cell("FormatExplorer")
        number = cell.get_by_label("number")
        bits = cell.locator(".jupyter-widgets.widget-toggle-button")
        bits.nth(0).click()
        page.wait_for_timeout(1000)
        assert number.input_value() == "-1.0", "the sign bit, by mouse"
        bits.nth(15).focus()
        page.keyboard.press("Space")
        page.wait_for_timeout(1000)
        assert number.input_value() == "-1.0009765625", "the last mantissa bit, by keyboard"
        before = lab.images(cell)
        number.fill("banana")
        number.press("Enter")
        page.wait_for_timeout(1000)
        assert "Nothing changed" in cell.locator(".jp-OutputArea").inner_text()
        assert lab.images(cell) == before
        assert lab.errors == []


def test_the_race_leaves_the_notebook_free(tmp_path):
    race = "import amp_lab as lab\n\nrace = lab.PrecisionRace()\nrace"
    with lab_browser.opened(
        write_notebook(tmp_path / "race.ipynb", race, "print('steps so far', 6 * 7)")
    ) as lab:
        lab.run_all()
        cell, page = lab.cell("PrecisionRace"), lab.page
        before = lab.images(cell)
        cell.get_by_role("button", name="play").first.click()
        page.wait_for_timeout(5000)
        running = lab.images(cell)
        assert running != before, "it plays"

        other = page.locator(".jp-CodeCell").nth(1)
        other.click()
        page.keyboard.press("Shift+Enter")
        other.locator(".jp-InputPrompt", has_text="[3]").wait_for(timeout=20_000)
        page.wait_for_timeout(3000)
        assert lab.images(cell) != running, "it plays on while another cell ran"

        cell.get_by_role("button", name="pause").first.click()
        page.wait_for_timeout(2000)
        paused = lab.images(cell)
        page.wait_for_timeout(2000)
        assert lab.images(cell) == paused
        assert lab.errors == []
