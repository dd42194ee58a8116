"""`python -m zfunc` is the command `zfunc`."""

import sys

from zfunc.cli import main

sys.exit(main())
