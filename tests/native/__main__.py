"""Run builds of the kernel against the reference: `python -m tests.native sanitize aarch64 clang`."""

import sys
import time

from .sets import SETS
from .stream import MismatchError, Program, check
from .variants import GROUPS, VARIANTS, build, missing


def run(name: str) -> str:
    """Build one variant and run its cases; returns the line that says so."""
    variant, start = VARIANTS[name], time.perf_counter()
    program = Program(build(variant), variant)
    isas = list(program.names()["isa"])
    kind = "threads" if variant.threads_only else "full"
    count = check(program, SETS[kind](isas))
    seconds = time.perf_counter() - start
    return f"{name}: {count} cases ({kind}; {', '.join(isas)}): the bits of the reference; {seconds:.0f} s"


def main(words: list[str]) -> int:
    """Run what is named; 1 if anything failed or could not be made."""
    names = [name for word in words for name in GROUPS.get(word, (word,))]
    if not names or not set(names) <= set(VARIANTS):
        print(f"got {words}, expected groups {list(GROUPS)} or builds {list(VARIANTS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names:
        try:
            why = missing(name)
            print(f"not run, {why}" if why else run(name), flush=True)
            failed += bool(why)
        except (MismatchError, RuntimeError) as error:
            print(f"{name}: FAILED\n{error}", flush=True)
            failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
