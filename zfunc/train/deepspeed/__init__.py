"""DeepSpeed's configuration files, read as they are: what every key means there, and what becomes of it here.

No torch here, so that a file is refused before anything is loaded. `zfunc.from_deepspeed` makes of it what
`zfunc.compile` and `zfunc.init` take. What is said of the other system is of its version 0.19.
"""

from zfunc.train.deepspeed.reading import Source as Source
from zfunc.train.deepspeed.reading import read as read
from zfunc.train.deepspeed.table import KEYS as KEYS
from zfunc.train.deepspeed.values import Values as Values
from zfunc.train.deepspeed.values import check as check
