"""An HTML page in one file that needs nothing else, from the parts in `web/`.

Script and style are allowed by their hashes, and nothing else may load or run, so a hostile name in a page is text.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template


def web_page(
    body: str,
    *,
    stylesheets: Sequence[str],
    scripts: Sequence[str] = (),
    title: str,
    styles: Sequence[str] = (),
    refresh: float | None = None,
    **parts: str,
) -> str:
    """An HTML page of the files `body`, `stylesheets` and `scripts` in `web/`; scripts run in order.

    `title` is text; `parts` are HTML by their names in the body. `styles` are the texts of further style elements.
    A browser loads the page anew after `refresh` seconds.
    """
    css, script = ("".join(map(web_file, names)) for names in (stylesheets, scripts))
    run = f"; script-src {_source(script)}" if script else ""
    return Template(web_file("frame.html")).substitute(
        title=escape(title),
        refresh="" if refresh is None else f'<meta http-equiv="refresh" content="{refresh:g}">\n',
        policy=f"default-src 'none'{run}; style-src {' '.join(map(_source, (css, *styles)))}",
        style=css,
        body=Template(web_file(body)).substitute(parts, title=escape(title), script=script),
    )


def web_file(name: str) -> str:
    """The text of file `name` in the folder `web/`, which is installed beside this module."""
    return (files("zfunc.viz") / "web" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """The hash of a script or style, as a source in a Content-Security-Policy."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
