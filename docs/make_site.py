"""Write build/docs, the same names as a site to browse and search, with pdoc: `python docs/make_site.py`.

Unlike docs/api, which is read where the sources are, it has all of a module and imports it. The invariant: what
zfunc looks up when it is first used has been looked up, because pdoc sees only what is there.
"""

import pdoc
from api_pages import PAGES
from api_source import ROOT
from make_api import directives

import zfunc

FOLDER = ROOT / "build" / "docs"


def main() -> None:
    """Import what the pages name, and write a page of each module, with an index."""
    vars(zfunc).update({name: getattr(zfunc, name) for name in zfunc.__all__})
    homes = {path.rpartition(".")[0] for text in PAGES.values() for path, _ in directives(text)}
    inside = {f"zfunc.{name}" for name in zfunc.__all__}  # pdoc finds these by itself
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"zfunc {zfunc.__version__}")
    pdoc.pdoc(*sorted(homes - inside), output_directory=FOLDER)
    print(f"written: {FOLDER.relative_to(ROOT) / 'index.html'}")


if __name__ == "__main__":
    main()
