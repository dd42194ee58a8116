"""`zfunc.hf`, as a module to import from: `zfunc.models.hf`."""

import sys

from zfunc.models import hf
from zfunc.models.hf import *  # noqa: F403

sys.modules[__name__] = hf
