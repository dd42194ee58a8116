"""How every plot of a benchmark looks. Only plots need matplotlib: it comes with `pip install -e ".[bench]"`."""

from pathlib import Path
from typing import Any

COLORS = {
    "fp32": "#1f4e9c",
    "16bit": "#d1772c",
    "8bit": "#3d8f5f",
    "skeleton": "#888888",
    "torch": "#a33a3a",
    "deepspeed": "#6d4fa3",
}


def figure(columns: int, *, title: str) -> tuple[Any, Any]:
    """A matplotlib figure with `columns` axes side by side, and the axes. Raises ImportError without
    matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "zfunc", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True}
    )  # fmt: skip
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(1, columns, figsize=(4.6 * columns, 3.4), constrained_layout=True)
    fig.suptitle(title, fontsize=10)
    return fig, axes


def save(fig: Any, path: str) -> None:
    """Write the matplotlib figure `fig` to `path`, with equal bytes for equal data."""
    fig.savefig(path, metadata={"Date": None, "Creator": None})
    text = Path(path).read_text()
    Path(path).write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(f"written: {path}")
