"""A headless Chromium, where there is one: what a page is after its scripts ran."""

import html
import json
import re
import shutil
import subprocess
import time
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


@frozen
class Shown:
    """What came of a page: its elements as text, what its scripts complained about, and how long all of it took."""

    dom: str
    console: tuple[str, ...]
    seconds: float

    def attribute(self, name: str) -> str:
        """Of the root element."""
        (root,) = re.findall(r"<html[^>]*>", self.dom)
        return html.unescape(re.findall(rf'{name}="([^"]*)"', root)[0])


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
