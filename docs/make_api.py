"""Write docs/api/*.md, the reference of what is public, from signatures and docstrings: `python docs/make_api.py`.

Which names are on which page is in api_pages.py: a line `::: zfunc.compile` there becomes what griffe2md makes
of that name. This file adds what the generator lacks: examples as code, types, and links that a code host resolves.

The invariant: the pages depend on the sources alone. Nothing of zfunc is imported, so no machine, Python or torch
shows in them, and no line number, so that an edit changes what it is about and nothing else.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_source
import griffe
import griffe2md
from api_pages import INDEX, PAGES
from api_source import ROOT, definition
from attrs import frozen
from jinja2 import ChoiceLoader, DictLoader, Environment, FileSystemLoader

FOLDER = ROOT / "docs" / "api"
NOTE = "<!-- Written by docs/make_api.py from docstrings, and from docs/api_pages.py. -->\n\n"
DIRECTIVE = re.compile(r"^::: (\S+)(?: as (\S+))?$", re.MULTILINE)
HEADING = re.compile(r"^(#+) `(.+)`$", re.MULTILINE)
HEAD = re.compile(r"#.*\n\n(?:```python\n(?:(?!```).*\n)*```\n\n)?")  # with the signature
EXAMPLE = re.compile(r"^( *)>>> .*\n(?:.+\n)*", re.MULTILINE)
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<![\[`\w])`([A-Za-z_][\w.]*)`(?![`\]])")
ERROR = re.compile(r"(?<![`\w])[A-Z]\w+(?![`\w])")
BASE = re.compile(r"<code>\[(\w+)\]\(\S+\)</code>")
WIDTH = 100  # of a signature, in columns

CONFIG: griffe2md.ConfigDict = {
    "docstring_style": None,  # they are Markdown
    "heading_level": 3,
    "group_by_category": True,
    "members_order": "source",
    "filters": ["!^_"],
    "inherited_members": False,
    "show_if_no_docstring": False,
    "show_signature_annotations": True,
    "summary": False,
}
# Attributes are short: an item of a list, instead of a heading and a block of code.
ITEM = """\
- `{{ attribute.name }}{% if attribute.annotation %}: {{ attribute.annotation }}{% endif %}`:
  {{ attribute.docstring.value | indent(2) }}

"""
VALUE = """\
### `{{ attribute.path }}`

```python
{{ attribute.source }}
```

{{ attribute.docstring.value }}
"""


@frozen
class Reference:
    """The package, and of each name on the pages, by the path of its definition: page#anchor, and its heading."""

    package: griffe.Module
    places: dict[str, str]
    headings: dict[str, str]


def load() -> Reference:
    """The package, and what the pages have of it."""
    reference = Reference(api_source.load(), {}, {})
    for page, text in PAGES.items():
        seen: Counter[str] = Counter()
        for path, name in directives(text):
            for x, heading in _headings(definition(reference.package, path), name):
                place, again = anchor(heading), seen[anchor(heading)]
                seen[place] += 1
                reference.places[x.canonical_path] = f"{page}#{place}{f'-{again}' if again else ''}"
                reference.headings[x.canonical_path] = heading
    return reference


def directives(text: str) -> list[tuple[str, str]]:
    """The names on a page: the path that griffe knows each by, and the one it is shown with."""
    return [(path, name or path) for path, name in DIRECTIVE.findall(text)]


def anchor(heading: str) -> str:
    """The anchor that code hosts give the first heading of that text."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _headings(x: Any, name: str) -> Iterator[tuple[Any, str]]:
    """An object and its methods, as far as they are documented, with their headings in order."""
    yield x, name
    for y in x.functions.values() if x.is_class else ():
        if y.docstring and not y.inherited and not y.name.startswith("_"):
            yield y, f"{name.rpartition('.')[2]}.{y.name}"


# --- the pages --------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Every page by the name of its file."""
    reference, templates = load(), _templates()
    made = {"README.md": INDEX + "".join(_contents(reference))}
    for page, text in PAGES.items():
        prose = _linked(reference, page, reference.package, text)
        made[page] = DIRECTIVE.sub(lambda m, page=page: _entry(reference, templates, page, m[1]), prose)
    return {page: f"{NOTE}{_spaced(text)}\n" for page, text in made.items()}


def _spaced(text: str) -> str:
    """One empty line where there are several, but in code."""
    parts = FENCED.split(text)
    parts[::2] = (re.sub(r"\n{3,}", "\n\n", part) for part in parts[::2])
    return "".join(parts).rstrip()


def _contents(reference: Reference) -> Iterator[str]:
    """What is on each page, with the first paragraph of it."""
    for page, text in PAGES.items():
        yield f"\n## [{text.partition(chr(10))[0][2:]}]({page})\n\n| | |\n|---|---|\n"
        for path, name in directives(text):
            x = definition(reference.package, path)
            first = " ".join(x.docstring.value.partition("\n\n")[0].split()).replace("|", r"\|")
            yield f"| [`{name}`]({reference.places[x.canonical_path]}) | {first} |\n"


def _templates() -> Environment:
    """griffe2md's, but for attributes and the lines of signatures."""
    theirs = FileSystemLoader(Path(griffe2md.__file__).parent / "templates")
    mine = DictLoader({"attribute.md.jinja": ITEM, "value": VALUE})
    env = griffe2md.prepare_env(Environment(loader=ChoiceLoader([mine, theirs]), autoescape=False))
    env.filters["format_signature"] = _signature
    return env


def _signature(name: str, function: griffe.Function, *_: Any, **__: Any) -> str:
    """On one line, or with a line for each parameter."""
    given = [_parameter(p) for p in function.parameters if p.name not in ("self", "cls")]
    keywords = sum(p.kind is griffe.ParameterKind.keyword_only for p in function.parameters)
    if keywords and not any(x.startswith("*") for x in given):
        given.insert(len(given) - keywords, "*")
    returns = f" -> {function.returns}" if function.returns else ""
    line = f"{name.strip()}({', '.join(given)}){returns}"
    if len(line) <= WIDTH:
        return _tidy(line)
    return _tidy(f"{name.strip()}(\n" + "".join(f"    {x},\n" for x in given) + f"){returns}")


def _parameter(p: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    typed = f": {p.annotation}" if p.annotation else ""
    default = f"{' = ' if typed else '='}{p.default}" if p.default and p.kind not in stars else ""
    return f"{stars.get(p.kind, '')}{p.name}{typed}{default}"


def _tidy(code: str) -> str:
    """Quotes, digits and empty dictionaries as one writes them."""
    code = re.sub(r"= dict(\[.*\])?\(\)", "= {}", code.replace("'", '"'))
    return re.sub(r"(?<=e-)0+|\b\d{5,}\b", lambda m: f"{int(m[0]):_}" if int(m[0]) else "", code)


def _entry(reference: Reference, templates: Environment, page: str, path: str) -> str:
    """One name: heading, signature, where it is defined, docstring, members."""
    x = definition(reference.package, path)
    if not x.docstring:
        raise ValueError(f"{path}: got no docstring, expected one: it is public")
    template = "value" if x.is_attribute else f"{x.kind.value}.md.jinja"
    config = {**CONFIG, "show_bases": "__init__" not in x.members}
    text = templates.get_template(template).render(**griffe2md.prepare_context(x, config))
    text = HEADING.sub(lambda m: f"\n{m[1]} `{reference.headings[m[2]]}`", text).lstrip()
    text = EXAMPLE.sub(lambda m: f"{m[1]}```python-console\n{m[0]}{m[1]}```\n", f"{text}\n")
    text = _linked(reference, page, x, BASE.sub(r"`\1`", text))
    end = HEAD.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
    return f"{text[:end]}{_origin(reference, page, x)}\n\n{text[end:]}"


def _origin(reference: Reference, page: str, x: Any) -> str:
    """The file that defines it, and the types of its signature: links, or what they stand for."""
    file = x.filepath.relative_to(ROOT).as_posix()
    call = x.members.get("__init__") if x.is_class else x if x.is_function else None
    annotations = [*(p.annotation for p in call.parameters), call.returns] if call else []
    found = (n for a in annotations if isinstance(a, griffe.Expr) for n in a.iterate())
    names = [n for n in found if isinstance(n, griffe.ExprName)]
    links, meant = [f"[{file}](../../{file})"], []
    for path in dict.fromkeys(_canonical(reference, n.canonical_path) for n in names):
        name = path.rpartition(".")[2]
        if path in reference.places and path != x.canonical_path:
            links.append(f"[`{name}`]({_href(reference, page, path)})")
        elif path.startswith("zfunc.") and (alias := definition(reference.package, path)).is_attribute:
            meant.append(f"`{name}` is `{_tidy(str(alias.value))}`")
    return " · ".join(links) + ("\\\n" + ", ".join(meant) if meant else "")


def _linked(reference: Reference, page: str, x: Any, text: str) -> str:
    """`text` of `x` with its names as links; not in code, and not in headings."""
    parts = FENCED.split(text)
    for n, part in enumerate(parts[::2]):
        lines = part.split("\n")
        for i, line in enumerate(lines):
            if not line.startswith(("#", ":::")):
                lines[i] = CODE.sub(lambda m: _link(reference, page, x, m), line)
                lines[i] = ERROR.sub(lambda m: _link_error(reference, page, m[0]), lines[i])
        parts[2 * n] = "\n".join(lines)
    return "".join(parts)


def _link(reference: Reference, page: str, x: Any, code: re.Match[str]) -> str:
    """A name in the text of `x`, as a link if it is on a page; what could be a parameter as well is none."""
    first, _, rest = code[1].partition(".")
    path = code[1]
    if first != "zfunc":
        calls = [x] if x.is_function else x.functions.values()
        if any(p.name == first for call in calls for p in call.parameters):
            return code[0]
        try:
            path = f"{x.resolve(first)}{rest and '.' + rest}"
        except griffe.NameResolutionError:
            return code[0]
    path = _canonical(reference, path)
    if path == x.canonical_path or path not in reference.places:
        return code[0]
    return f"[{code[0]}]({_href(reference, page, path)})"


def _link_error(reference: Reference, page: str, word: str) -> str:
    """The name of an error, which stands in prose without backticks."""
    path = next((x for x in ERRORS if x.endswith(f".{word}")), "")
    return f"[{word}]({_href(reference, page, _canonical(reference, path))})" if path else word


def _canonical(reference: Reference, path: str) -> str:
    """The path of a definition, of any path that leads there."""
    if path == "zfunc.plan":
        path = "zfunc.planner.plan"  # the module of that name can be called
    try:
        return definition(reference.package, path).canonical_path
    except (KeyError, griffe.AliasResolutionError):
        return path


def _href(reference: Reference, page: str, path: str) -> str:
    return reference.places[path].removeprefix(page)


ERRORS = [path for path, _ in directives(PAGES["errors.md"])]


def main() -> None:
    """Write every page anew, and delete those that are no more."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for page, text in made.items():
        (FOLDER / page).write_text(text)
    for old in FOLDER.glob("*.md"):
        if old.name not in made:
            old.unlink()
    print(f"written: {len(made)} pages in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
