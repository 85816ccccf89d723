"""Drive JupyterLab in Chromium: for the browser tests, and for looking at a notebook.

    python tests/lab_browser.py notebooks/00_start_here.ipynb FOLDER

opens a copy of the notebook in JupyterLab, runs all cells, and writes screenshots of the whole
notebook, page by page, to FOLDER. Needs `pip install -e ".[browser]"` and Chromium (Debian's package
`chromium`; the path can be given as AMP_LAB_CHROMIUM).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

CHROMIUM = os.environ.get("AMP_LAB_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def missing() -> str | None:
    """Why the browser cannot be driven here, or None if it can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -e '.[browser]'"
    if not Path(CHROMIUM).exists():
        return f"no Chromium at {CHROMIUM}: install it, or set AMP_LAB_CHROMIUM"
    return None


class LabPage:
    """A notebook, opened in JupyterLab. `page` is Playwright's page, `errors` its page errors."""

    def __init__(self, page):
        self.page = page
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status==='idle'",
            timeout=60_000,
        )

    def start_running(self) -> None:
        """Start Run All Cells and return at once."""
        self.page.evaluate(
            "() => { window.ampDone = false;"
            " window.jupyterapp.commands.execute('notebook:run-all-cells')"
            ".then(() => { window.ampDone = true; }); }"
        )

    def wait_until_done(self, seconds: float = 240) -> None:
        self.page.wait_for_function("window.ampDone === true", timeout=seconds * 1000)
        self.page.wait_for_timeout(500)

    def run_all(self, seconds: float = 240) -> None:
        self.start_running()
        self.wait_until_done(seconds)

    def cell(self, text: str):
        """The code cell whose source contains `text`."""
        return self.page.locator(".jp-CodeCell").filter(
            has=self.page.locator(".jp-InputArea", has_text=text)
        )

    def images(self, cell) -> list[str]:
        """The sources of the pictures in a cell's output: they differ when a picture was redrawn."""
        return cell.locator(".jp-OutputArea img").evaluate_all("all => all.map(img => img.src)")

    def screenshots(self, folder: Path, height: int = 1500) -> list[Path]:
        """Screenshots of the whole notebook, from top to bottom, at most `height` pixels each."""
        folder.mkdir(parents=True, exist_ok=True)
        self.page.evaluate("window.jupyterapp.shell.collapseLeft()")
        full = self.page.evaluate(
            "Math.max(...[...document.querySelectorAll('.jp-Notebook, .jp-WindowedPanel-outer')]"
            ".map(part => part.scrollHeight))"
        )
        width = self.page.viewport_size["width"]
        self.page.set_viewport_size({"width": width, "height": int(full) + 200})
        self.page.wait_for_timeout(1500)
        self.page.evaluate(
            "document.querySelectorAll('.jp-Notebook, .jp-WindowedPanel-outer')"
            ".forEach(part => { part.scrollTop = 0; })"
        )
        paths = []
        for number, top in enumerate(range(0, int(full) + 200, height)):
            path = folder / f"{number:02d}.png"
            clip = {"x": 0, "y": top, "width": width, "height": min(height, full + 200 - top)}
            self.page.screenshot(path=path, clip=clip)
            paths.append(path)
        return paths


@contextlib.contextmanager
def jupyter_lab(folder: Path):
    """Serve `folder` with JupyterLab on a free local port; yields the address of its file tree."""
    with tempfile.TemporaryDirectory() as home:
        for name, setting in SETTINGS.items():
            path = Path(home, "settings", f"{name}.jupyterlab-settings")
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(setting))
        environment = os.environ | {
            "JUPYTERLAB_SETTINGS_DIR": str(Path(home, "settings")),
            "JUPYTERLAB_WORKSPACES_DIR": str(Path(home, "workspaces")),
            "JUPYTER_RUNTIME_DIR": str(Path(home, "runtime")),
            "JUPYTER_CONFIG_DIR": str(Path(home, "config")),
            "CUDA_VISIBLE_DEVICES": "",
        }
        log = open(Path(home, "log"), "w+")
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser"]
            + ["--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
            + ["--IdentityProvider.token=amp-lab", f"--ServerApp.root_dir={folder}"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _address(server, Path(home, "runtime"), log)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            log.close()


def _address(server, runtime: Path, log, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, OSError):
                url = json.loads(path.read_text())["url"]
                urllib.request.urlopen(f"{url}api/status?token=amp-lab", timeout=5).close()
                return f"{url}lab/tree"
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read()[-3000:]}")


@contextlib.contextmanager
def opened(notebook: Path, width: int = 1200, height: int = 900):
    """Open a copy of `notebook` in JupyterLab in Chromium; yields a `LabPage`."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        shutil.copy(notebook, folder)
        tree = stack.enter_context(jupyter_lab(Path(folder)))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        stack.callback(browser.close)
        lab = LabPage(browser.new_page(viewport={"width": width, "height": height}))
        lab.open(f"{tree}/{notebook.name}?token=amp-lab&reset")
        yield lab


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    with opened(Path(sys.argv[1])) as lab:
        lab.run_all()
        for path in lab.screenshots(Path(sys.argv[2])):
            print(path)
        for error in lab.errors:
            print("page error:", error)
        return 1 if lab.errors else 0


if __name__ == "__main__":
    sys.exit(main())
