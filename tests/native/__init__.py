"""The host kernel alone: a C program built in several ways, and its buffers next to the NumPy reference.

The invariant: nothing here needs the extension module; torch, NumPy and a C compiler are enough.
`python -m tests.native` lists the builds, `python -m tests.native sanitize` runs a group of them.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of `numpy_reference`, as pytest has it
