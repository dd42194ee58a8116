"""Write build/docs, the API reference as a site, with pdoc, and a live page: `python docs/make_api.py`."""

from pathlib import Path

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
    vars(zfunc).update({name: getattr(zfunc, name) for name in zfunc.__all__})
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"zfunc {zfunc.__version__}")
    pdoc.pdoc("zfunc", output_directory=FOLDER)
    (FOLDER / "live.html").write_text(live_step(JOB), encoding="utf-8")
    print(f"written: {FOLDER / 'index.html'}, live.html")


if __name__ == "__main__":
    main()
