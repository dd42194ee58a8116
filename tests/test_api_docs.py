"""docs/api is what its command writes now, has every public name once, and all its links lead somewhere."""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import zfunc

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
GENERATOR = ("griffe2md", "griffelib")
sys.path.append(str(DOCS))

from api_pages import COMPLETE, PAGES  # noqa: E402

SHOWN = [
    shown or path
    for text in PAGES.values()
    for path, shown in re.findall(r"(?m)^::: (\S+)(?: as (\S+))?$", text)
]
WRITTEN = {path.name: path.read_text() for path in (DOCS / "api").glob("*.md")}


def without_code(text: str) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text)


def test_the_pages_are_what_the_command_writes_now() -> None:
    there = {name: installed(name) for name in GENERATOR}
    if None in there.values() or there != {name: PINNED.get(name) for name in GENERATOR}:
        pytest.skip(
            f"the pages are written with the versions of {GENERATOR} in constraints.txt; here are {there}"
        )
    import make_api

    made = make_api.pages()
    assert made.keys() == WRITTEN.keys()
    stale = [page for page, text in made.items() if text != WRITTEN[page]]
    assert not stale, "run python docs/make_api.py"


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def named(path: str) -> Any:
    """What one gets who writes `path` after importing as much of it as can be."""
    first, *rest = path.split(".")
    x = import_module(first)
    for name in rest:
        if inspect.ismodule(x) and not hasattr(x, name):
            import_module(f"{x.__name__}.{name}")
        x = getattr(x, name)
    return x


@pytest.mark.parametrize("name", SHOWN)
def test_a_name_is_what_the_page_says(name: str) -> None:
    """It is there under that name, and its parameters are those of the signature on the page."""
    x = named(name)
    (page,) = (text for text in WRITTEN.values() if f"\n### `{name}`\n" in text)
    entry = page.partition(f"\n### `{name}`\n")[2]
    signature = re.match(r"\n```python\n(.*?)\n```\n", entry, re.DOTALL)
    if not callable(x) or (inspect.isclass(x) and not hasattr(x, "__attrs_attrs__")):
        return
    assert inspect.getdoc(x)
    assert signature, name
    if name == "zfunc.plan":  # the module that passes its arguments on
        x = import_module("zfunc.planner").plan
    assert list(parameters(signature[1])) == [
        ("*" * (p.kind is p.VAR_POSITIONAL)) + p.name for p in inspect.signature(x).parameters.values()
    ]


def parameters(signature: str) -> Iterator[str]:
    """Names of the parameters in the text of a signature: what begins at the depth of its first bracket."""
    depth, begun = 0, 0
    for at, letter in enumerate(signature):
        if letter in ",)" and depth == 1 and signature[begun:at].strip(" \n*"):
            yield re.split(r"[:=]", signature[begun:at])[0].strip()
        if letter in ",(" and depth == (letter == ","):
            begun = at + 1
        depth += (letter in "([{") - (letter in ")]}")
        if not depth and letter == ")":
            return


def test_every_public_name_is_there() -> None:
    modules = {"lr", "schedules"}  # of these the page has the contents
    assert {f"zfunc.{name}" for name in zfunc.__all__ if name not in modules} <= set(SHOWN)
    for module in COMPLETE:
        x = import_module(f"zfunc.{module}")
        own = [
            k
            for k, v in vars(x).items()
            if getattr(v, "__module__", "").startswith(x.__name__) and callable(v)
        ]
        public = {f"zfunc.{module}.{k}" for k in getattr(x, "__all__", own) if not k.startswith("_")}
        assert public
        assert not public - set(SHOWN)
    known = vars(import_module("zfunc.errors")).values()
    errors = {x.__name__ for x in known if inspect.isclass(x) and issubclass(x, Exception)}
    assert errors <= set(re.findall(r"(?m)^### `(?:\w+\.)*(\w+)`$", WRITTEN["errors.md"]))


def test_no_name_is_there_twice() -> None:
    assert [name for name, times in Counter(SHOWN).items() if times > 1] == []
    same = Counter(id(named(name)) for name in SHOWN)
    assert [name for name in SHOWN if same[id(named(name))] > 1] == []


def anchors(text: str) -> set[str]:
    """Those a code host gives the headings of a page: a repeated one is numbered."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", without_code(text)):
        words = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).lower()
        slug = "".join(c for c in words if c.isalnum() or c in "-_ ").replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", WRITTEN)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(WRITTEN[page]))
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        assert (DOCS / "api" / file).exists(), link
        assert not anchor or anchor in anchors(WRITTEN[file or page]), link


@pytest.mark.parametrize("page", WRITTEN)
def test_nothing_of_a_machine_is_in_a_page(page: str) -> None:
    """No path, address or line number, and no example that a reader would see as a quotation."""
    text = WRITTEN[page]
    assert not re.search(rf"{re.escape(str(ROOT))}|0x[0-9a-f]{{6}}|#L\d|/home/|/tmp/|<factory>", text)
    assert not re.search(r"(?m)^ *>>>", without_code(text))
