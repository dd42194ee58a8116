"""Fill in the outputs of docs/one_hour.md: `python docs/make_blocks.py`.

A block of text right below a block of Python has what this prints; the Python of a page is one program, from top to
bottom. tests/docs/test_blocks.py runs it and compares.
"""

import contextlib
import io
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "one_hour.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.M | re.S)


def filled(page: Path = PAGE) -> str:
    """The page with what its Python prints below each block that has an output, run in a clone's folder."""
    names = {"__name__": "__main__"}

    def fill(match: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(match[1], page.name, "exec"), names)
        printed = "\n".join(row.rstrip() for row in out.getvalue().rstrip().splitlines())
        return f"```python\n{match[1]}```" + ("" if match[2] is None else f"\n\n```text\n{printed}\n```")

    with contextlib.chdir(ROOT):
        return PYTHON.sub(fill, page.read_text())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PAGE.write_text(filled())
    print(f"written: {PAGE.name}")
