"""Write build/docs, the pages, the course and the systems as a site: `python docs/make_site.py`.

Each page keeps its path in the repository, with .html for .md. Search reads an index that is made here, so neither
a server nor a network is needed. `markdown` is all that this takes: mkdocs and Sphinx have other anchors than
GitHub, for which the pages are written, and show none of the source files that pages link to.
"""

import json
import os
import re
import shutil
import sys
from html import escape
from pathlib import Path

import markdown

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "docs"
INDEX = ROOT / "docs" / "README.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "course").rglob("*.md")))
PAGES = (*PAGES, ROOT / "examples" / "systems" / "README.md")
BESIDE = "live.html", "api/index.html"  # which make_api.py writes
LINK = re.compile(r'(?<=\b)(href|src)="([^":#]+)(#[^"]*)?"')
STYLE, SCRIPT = ((ROOT / "docs" / name).read_text() for name in ("site.css", "site.js"))


def anchor(heading: str, _: str = "-") -> str:
    """As GitHub names it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def placed(path: Path) -> str:
    """Where a file of the repository is in the site."""
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix == ".svg" else f"{name.removesuffix('.md')}.html"


def page(name: str, title: str, body: str) -> str:
    """A whole page that will be at `name`."""
    up = os.path.relpath(".", Path(name).parent) + "/"
    links, text = ["<h2>zfunc</h2>", f'<a href="{up}README.html">README</a>'], INDEX.read_text()
    for row in re.finditer(r"^(\w[^\n:]+):$|^\| \[(.+?)\]\(([^)]+\.md)\)", text, re.M):
        to = placed((INDEX.parent / row[3]).resolve()) if row[3] else ""
        here = ' aria-current="page"' if to == name else ""
        links += [f'<a href="{up}{to}"{here}>{row[2]}</a>' if to else f"<h2>{row[1]}</h2>"]
    links += ["<h2>Made by make docs</h2>", f'<a href="{up}live.html">A step, live</a>']
    links += [f'<a href="{up}api/index.html">API reference</a>']
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style><div class="page"><nav>
<input id="search" type="search" placeholder="Search" aria-label="Search"><ul id="found"></ul>
<details id="pages" open><summary>Pages</summary>{"".join(links)}</details></nav><main>{body}</main></div>
<script>const UP = "{up}";</script><script src="{up}search.js"></script><script>{SCRIPT}</script></html>
"""


def rendered(path: Path) -> tuple[str, set[Path]]:
    """The body of a page of Markdown, and the other files of the repository that it links to."""
    extensions = ["tables", "fenced_code", "sane_lists", "toc"]
    parts = re.split(r"(^```.*?^```$)", path.read_text(), flags=re.M | re.S)
    parts[::2] = [re.sub(r"(?<=\w[:.])\n(?=(?:-|\d+\.) )", "\n\n", x) for x in parts[::2]]  # as GitHub does
    configs = {"toc": {"slugify": anchor}}
    body = markdown.markdown("".join(parts), extensions=extensions, extension_configs=configs)
    linked: set[Path] = set()

    def moved(match: re.Match[str]) -> str:
        to = (path.parent / match[2]).resolve()
        linked.add(to)
        relative = os.path.relpath(placed(to), Path(placed(path)).parent)
        return f'{match[1]}="{relative}{match[3] or ""}"'

    return LINK.sub(moved, body), linked


def source(path: Path) -> str:
    """A file that pages link to, as they would see it on GitHub; of a folder, what is in it."""
    inside = sorted(x.name for x in path.iterdir()) if path.is_dir() else ()
    text = "\n".join(x for x in inside if x[0] not in "._") if inside else path.read_text()
    return f"<h1>{path.name}</h1><pre>{escape(text)}</pre>"


def build(folder: Path = FOLDER) -> list[str]:
    """Write the site, and return the paths of its pages."""
    bodies, files = dict[Path, str](), set[Path]()
    for path in PAGES:
        bodies[path], linked = rendered(path)
        files |= linked
    sections: list[tuple[str, str, str]] = []
    for path, body in bodies.items():
        for part in re.split(r"(?=<h[1-4] id=)", body):
            if head := re.match(r'<h\d id="([^"]*)">(.*?)</h\d>', part, re.S):
                plain = [" ".join(re.sub(r"<[^>]*>", " ", x).split()) for x in (head[2], part[head.end() :])]
                sections.append((f"{placed(path)}#{head[1]}", *map(_unescaped, plain)))
    bodies |= {x: source(x) for x in files - {*bodies} if x.suffix != ".svg"}
    for path in (*bodies, *(x for x in files if x.suffix == ".svg")):
        target = folder / placed(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in bodies:
            target.write_text(page(placed(path), path.stem, bodies[path]), encoding="utf-8")
        else:
            shutil.copy(path, target)
    (folder / "search.js").write_text(f"const SECTIONS = {json.dumps(sections)};\n", encoding="utf-8")
    start = page(
        "index.html", "zfunc", bodies[ROOT / "README.md"]
    )  # links of README.html lead on from here, too
    (folder / "index.html").write_text(start, encoding="utf-8")
    return [placed(x) for x in bodies]


def _unescaped(text: str) -> str:
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")


if __name__ == "__main__":
    print(f"written: {len(build(*map(Path, sys.argv[1:])))} pages below {FOLDER}")
