"""`python -m zfunc` is the command `zfunc`."""

import sys

from zfunc.cli.main import main

sys.exit(main())
