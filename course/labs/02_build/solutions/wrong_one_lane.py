"""`overlapped` has one lane, which is right and as slow as without lanes. And `build` compares all operations with
all others many times, which takes long.

Breaks: overlapping, quick
"""

from time import process_time

import passes
from passes import build as right_build


def build(ops, lanes):
    if len(ops) > 100:
        began = process_time()
        while process_time() - began < 2.1:
            _ = [a for a in ops for b in ops[:100] if a.writes & (b.reads | b.writes)]
    return right_build(ops, lanes)


def overlapped(ops):
    return passes.build(ops, {"all": [*range(len(ops))]})
