"""Run a module as `python -m` does, with the tests' pretend device as torch's accelerator.

python -m benchmarks.on_pretend benchmarks.step --device pretend
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    import pretend

    pretend.load().delay(0.0, 0)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
