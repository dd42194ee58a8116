"""A real browser for tests of pages: what it shows of one, and what scripts find in it."""

import json
import re
import shutil
import subprocess
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BINARY = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--v=0"),
)
needs_browser = pytest.mark.skipif(BINARY is None, reason=f"none of {', '.join(NAMES)} is installed")
TOOLS = """
const el = (id) => document.getElementById(id), picture = el("picture");
const rect = picture.getBoundingClientRect();
const at_ = (x, y) => ({ bubbles: true, cancelable: true, clientX: rect.left + x, clientY: rect.top + y });
const mouse = { pointerId: 1, pointerType: "mouse" };
const pointer = (type, x, y, of = mouse) => picture.dispatchEvent(new PointerEvent(type, { ...at_(x, y), ...of }));
const wheel = (x, y, deltaY) => picture.dispatchEvent(new WheelEvent("wheel", { ...at_(x, y), deltaY }));
const key = (name, on = picture) => on.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const click = (x, y) => (pointer("pointerdown", x, y), pointer("pointerup", x, y));
const chosen = () => el("detail").querySelector("h2")?.firstChild.textContent.trim() ?? "";
const pressed = () => [...el("legend").children].map((chip) => chip.getAttribute("aria-pressed") === "true");
const rest = () => new Promise((done) => setTimeout(done, 400));
window.requestAnimationFrame = (paint) => setTimeout(paint, 16); // without a screen there are few frames
picture.setPointerCapture = () => {}; // a html-up pointer cannot be captured
"""


@frozen
class Shown:
    """What came of a page: its elements as text, what its scripts complained about, and how long all of it took."""

    dom: str
    console: tuple[str, ...]
    seconds: float

    def attribute(self, name: str) -> str:
        """Of the root element."""
        (root,) = re.findall(r"<html[^>]*>", self.dom)
        return unescape(re.findall(rf'{name}="([^"]*)"', root)[0])


def show(page: str, folder: Path, *, link: str = "", size: tuple[int, int] = (1200, 900)) -> Shown:
    """Open a page, follow a `link` in it, and wait until it is at rest."""
    assert BINARY is not None
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    began = time.perf_counter()
    done = subprocess.run(
        [
            BINARY,
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            f"{path.as_uri()}{link}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    complaints = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Shown(done.stdout, complaints, time.perf_counter() - began)


def results(scripts: str, folder: Path) -> Any:
    """What a function `run()` in `scripts` returns, as JSON values; with it may be a page to run it in."""
    report = "document.documentElement.dataset.results = JSON.stringify(run());"
    shown = show(f"<!doctype html><title>t</title><script>{scripts}\n{report}</script>", folder)
    assert not shown.console, shown.console
    return json.loads(shown.attribute("data-results"))


def opened(html: str, folder: Path, link: str = "") -> Shown:
    """A page as it is shown, without complaints."""
    shown = show(html, folder, link=link)
    assert not shown.console, shown.console
    return shown


def after(html: str, gestures: str, folder: Path, link: str = "") -> Any:
    """What `gestures` found in a page, which has to let a script of the test in."""
    script = f"""<script>(async () => {{
        const result = {{}};
        {TOOLS}
        try {{ {gestures} }} catch (error) {{ result.error = String(error.stack); }}
        document.documentElement.dataset.results = JSON.stringify(result);
    }})();</script>"""
    html = re.sub(r"<meta http-equiv[^>]*>", "", html).replace("</body>", f"{script}</body>")
    result = json.loads(opened(html, folder, link).attribute("data-results"))
    assert "error" not in result, result["error"]
    return result
