"""The command `zfunc`, also as `python -m zfunc`. Its imports take a while, in which Ctrl-C is no traceback."""

import signal
import sys


def main() -> int:
    """Run the command that was typed, and return its exit code."""
    try:
        from zfunc.cli.main import main as run
    except KeyboardInterrupt:
        print("zfunc: stopped at once", file=sys.stderr)
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
