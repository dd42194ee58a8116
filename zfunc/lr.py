"""`zfunc.lr`, as a module to import from: `zfunc.optim.learning_rate_schedules`."""

import sys

from zfunc.optim import learning_rate_schedules
from zfunc.optim.learning_rate_schedules import *  # noqa: F403

sys.modules[__name__] = learning_rate_schedules
