"""The site of `make docs`: its links lead somewhere, and its search finds what pages say, in a browser."""

import re
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import needs_browser, show

pytest.importorskip("markdown")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import make_site  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = make_site.build(folder)
    assert len(made) > 60
    assert {"README.html", "docs/design.html", "course/README.html", "examples/systems/README.html"} < {*made}
    return folder


def lost(site: Path) -> list[str]:
    """Links of a site that lead to no file, or to no anchor of one; but for what is made beside the pages."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: {*re.findall(r' id="([^"]*)"', text)} for path, text in pages.items()}
    found: list[str] = []
    for path, text in pages.items():
        without_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
        for link in re.findall(r'<[a-z]+ [^>]*?(?:href|src)="([^"]*)"', without_scripts):
            to, _, anchor = unquote(unescape(link)).partition("#")
            target = (path.parent / to).resolve() if to else path
            if "://" in link or target in {(site / name).resolve() for name in make_site.BESIDE}:
                continue
            if not target.is_file() or (anchor and anchor not in anchors[target]):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def test_every_link_leads_somewhere(site: Path) -> None:
    assert lost(site) == []


def test_a_lost_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="x">x</h1><a href="#x"></a><a href="#y"></a><img src="b.svg">')
    assert lost(tmp_path) == ["a.html: #y", "a.html: b.svg"]


def test_pages_show_pictures_and_every_page_is_in_the_index(site: Path) -> None:
    index = (site / "search.js").read_text()
    for page in make_site.PAGES:
        assert f'"{make_site.placed(page)}#' in index
    text = (site / "docs" / "one_bucket.html").read_text()
    assert text.count("<img ") == len(re.findall(r"!\[", (ROOT / "docs" / "one_bucket.md").read_text()))
    assert "://" not in "".join(re.findall(r'(?:src|<link[^>]*href)="([^"]*)"', text))


@needs_browser
def test_the_search_finds_the_page_that_says_a_word(site: Path) -> None:
    page = (site / "docs" / "disk.html").read_text()
    search = 'field.value = "vector clock"; field.dispatchEvent(new Event("input"));'
    shown = show(page.replace("</script></html>", f"{search}</script></html>"), site / "docs")
    found = re.findall(r'<li><a href="([^"]*)"', shown.dom)
    assert "../docs/design.html#interpreters" in found
    assert not shown.console
