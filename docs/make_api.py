"""Write build/docs, the API reference as a site, with pdoc: `python docs/make_api.py`."""

from pathlib import Path

import pdoc

import zfunc

FOLDER = Path(__file__).parents[1] / "build" / "docs"


def main() -> None:
    """Import the names that zfunc looks up when they are first used: pdoc sees only what is there."""
    vars(zfunc).update({name: getattr(zfunc, name) for name in zfunc.__all__})
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"zfunc {zfunc.__version__}")
    pdoc.pdoc("zfunc", output_directory=FOLDER)
    print(f"written: {FOLDER / 'index.html'}")


if __name__ == "__main__":
    main()
