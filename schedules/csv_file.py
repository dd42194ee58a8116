"""Orders in the CSV files of torch.distributed.pipelining: a row for each device, a cell for each pass.

A cell is the stage, the way and the micro-batch, such as 2F0. Sends, receives and what shards or reduces are left
out, as they follow from the passes.
"""

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path

from attrs import field, frozen

from zfunc.core.pipeline import F
from zfunc.errors import PlanError, refuse

from .stages import Passes, cut_in_stages, of_segments

PASS = r"(\d+)([FBIWR])(\d+)"
DERIVED = r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]\d+)"
CELL = re.compile(rf"|{PASS}|\({PASS}(;{PASS})*\)OVERLAP_F_B|{DERIVED}")


@frozen
class FromCSV:
    """The order of pipeline passes in the CSV file `path`, in the format of torch.distributed.pipelining's
    `_dump_csv`.

    `cut` has the number of segments of each stage; without it, stages are as equal as possible.
    """

    path: str = field(converter=os.fspath)
    cut: Sequence[int] = field(default=(), converter=tuple[int, ...])

    def __call__(self, _devices: int, segments: int, _micro_batches: int) -> list[Passes]:
        """Each device's passes in the file's order, as (kind such as "F" or "B", micro-batch, segment)."""
        try:
            rows = [*csv.reader(Path(self.path).read_text().splitlines())]
        except (OSError, UnicodeDecodeError) as error:
            got = f"{self.path!r}, which cannot be read ({getattr(error, 'strerror', error)})"
            expected = "a CSV file with a row for each device"
            do = "write one with zfunc.schedules.csv_file.write_csv, or pass a name such as 'OneFOneB'"
            refuse("order", got, expected, do, PlanError, cause=error)
        order = [[x for cell in row for x in self._passes(cell.strip())] for row in rows]
        stages = 1 + max((k for own in order for _, _, k in own), default=0)
        return of_segments(order, cut_in_stages(segments, stages, self.cut))

    def _passes(self, cell: str) -> Passes:
        if not CELL.fullmatch(cell):
            expected = "a stage, F, B, I, W or R, and a micro-batch, such as 2F0"
            expected += ", or what torch.distributed.pipelining writes beside these"
            refuse("order", f"the cell {cell!r} in {self.path}", expected, kind=PlanError)
        return [(way, int(m), int(k)) for k, way, m in re.findall(PASS, cell)]


def write_csv(path: str | os.PathLike[str], order: Sequence[Passes], stages: Sequence[range] = ()) -> None:
    """Write a pipeline's `order`, each device's passes as (kind, micro-batch, segment), to the CSV file
    `path`. `stages` are ranges of segments; by default each segment is a stage."""
    stages = stages or [range(s, s + 1) for s in range(1 + max(s for own in order for _, _, s in own))]
    begin = {F: {own[0]: k for k, own in enumerate(stages)}}
    last = {own[-1]: k for k, own in enumerate(stages)}
    with Path(path).open("w", newline="") as file:
        rows = ([(begin.get(way, last).get(s), way, m) for way, m, s in own] for own in order)
        csv.writer(file).writerows([f"{k}{way}{m}" for k, way, m in row if k is not None] for row in rows)
