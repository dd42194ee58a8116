"""Write build/docs/api, the API reference, with pdoc, and build/docs/live.html: `python docs/make_api.py`."""

from pathlib import Path
from types import ModuleType

import pdoc

import zfunc
from zfunc.cli.commands.draw import DrawSettings, live_step

# The job that README.md plans first.
JOB = DrawSettings(
    num_layers=50,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=1024,
    vocab_size=50257,
    batch_size=10,
    hardware="v100-32gb",
)
FOLDER = Path(__file__).parents[1] / "build" / "docs"


def main() -> None:
    """Import the names that zfunc looks up when they are first used: pdoc sees only what is there."""
    names = {name: getattr(zfunc, name) for name in zfunc.__all__}
    modules = {name: x.__name__ for name, x in names.items() if isinstance(x, ModuleType)}
    vars(zfunc).update({**names, "__all__": [name for name in names if name not in modules]})
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"zfunc {zfunc.__version__}")
    pdoc.pdoc("zfunc", *modules.values(), output_directory=FOLDER / "api")
    (FOLDER / "live.html").write_text(live_step(JOB), encoding="utf-8")
    print(f"written: {FOLDER / 'api' / 'index.html'}, live.html")


if __name__ == "__main__":
    main()
