"""The command `zfunc`, also as `python -m zfunc`. Its imports take a while, in which Ctrl-C is no traceback."""

import atexit
import gc
import signal
import sys


def main() -> int:
    """Run the command that was typed, and return its exit code."""
    # Or Python would end by a search for garbage among all that torch has made, of half a second.
    atexit.register(gc.freeze)
    try:
        from zfunc.cli.main import main as run
    except KeyboardInterrupt:
        print("zfunc: stopped at once", file=sys.stderr)
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
