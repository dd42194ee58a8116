"""Orders in CSV files of torch.distributed.pipelining, against torch's own schedules."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parity import Row, plain, results
from torch.distributed.pipelining import schedules as torchs
from zfunc.schedules import ORDERS, make_order
from zfunc.schedules.csv_file import FromCSV, write_csv
from zfunc.schedules.stages import cut_in_stages

from zfunc.core.pipeline import passes_in, passes_listed
from zfunc.errors import PlanError


def of_torch(name: str, stages: int, micro_batches: int) -> Any:
    """A schedule of torch on two devices."""
    own = [
        SimpleNamespace(
            **{"num_stages": 2 * stages, "group_size": 2, "group_rank": 0, "stage_index": k, "group": None},
            **{"is_first": not k, "is_last": False, "has_backward": True, "submod": None, "device": "cpu"},
        )
        for k in range(0, 2 * stages, 2)
    ]
    return getattr(torchs, name)(own, micro_batches)


WORK = [{"F": 1, "B": 2}]


def passes(order: Any, segments: int, micro_batches: int) -> Sequence[Any]:
    listed = passes_listed(order, 2, micro_batches, trained := range(segments), segments)
    made = passes_in(listed, trained, WORK * segments, [0] * segments)
    return [x for _, _, x in made]


@pytest.mark.parametrize(("name", "stages"), [("ScheduleInterleaved1F1B", 2), ("ScheduleInterleaved1F1B", 1)])
def test_an_order_of_torchs_trains_to_the_bits_of_one_device(name: str, stages: int, tmp_path: Path) -> None:
    """Written by torch, with its sends and all, and as it is before these."""
    schedule, row = of_torch(name, stages, 6), Row("bf16 in 6", "one slot", "odd sizes")
    schedule._dump_csv(with_sends := str(tmp_path / "with_sends.csv"))
    torchs.PipelineScheduleMulti._dump_csv(schedule, plain_one := str(tmp_path / "plain.csv"))
    assert FromCSV(with_sends)(2, 5, 6) == FromCSV(plain_one)(2, 5, 6)
    (expected,) = plain(row.numbers, row.job)
    for order in (with_sends, FromCSV(plain_one)):
        (got,) = results(row, {**row.given(tmp_path), "devices": 2, "order": order})
        assert got.same(expected)


@pytest.mark.parametrize("name", ORDERS)
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """And it comes back, as stages or segment by segment."""
    order, path = make_order(name), tmp_path / "order.csv"
    whole = order(2, 8, 4)
    write_csv(path, whole)
    assert [[*own] for own in FromCSV(path)(2, 8, 4)] == [[*own] for own in whole]
    if name == "RoundPipe":
        return  # its stages are on any device, and torch's on one
    schedule = of_torch("ScheduleInterleaved1F1B", 4, 4)
    schedule._dump_csv(tmp_path / "torchs.csv")
    torchs.PipelineScheduleMulti._load_csv(schedule, str(path))
    stages = cut_in_stages(8, 2 * getattr(order, "stages", 1 + (name == "DualPipeV")))
    write_csv(path, whole, stages)
    assert [[*own] for own in FromCSV(path)(2, 8, 4)] == [[*own] for own in whole]
    assert len(re.findall(r"0F\d", path.read_text())) == 4


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["0F0,0B0,0X1", "1F0,1B0"], "got the cell '0X1' in"),
        (["0F0,0B0", "1F0,1B0"], "got F[1,0] 0 times, expected it once"),
        (["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1", "2F0"], "got passes for 3 devices, expected 2"),
        (["0F0,0F1,0B1,0B0", "1F0,1F1,1B1,1B0"], "micro-batches ascend"),
        (["0F0,2F0,4F0", "1F0,3F0"], "got 5 stages for 4 segments, expected at most 4"),
    ],
)
def test_a_file_that_is_no_order_is_refused(rows: list[str], says: str, tmp_path: Path) -> None:
    (path := tmp_path / "order.csv").write_text("\n".join(rows))
    with pytest.raises(PlanError, match=re.escape(says)):
        passes(FromCSV(path), 4, 2)


def test_torchs_looped_bfs_sends_micro_batches_back_in_descending_order(tmp_path: Path) -> None:
    """The sums of gradients would depend on the order: it is refused, and LoopedBFS of zfunc ascends."""
    of_torch("ScheduleLoopedBFS", 2, 4)._dump_csv(path := str(tmp_path / "looped.csv"))
    with pytest.raises(
        PlanError, match=r"device 1 has B\[3,3\] next, which follows B\[2,3\].*micro-batches ascend"
    ):
        passes(FromCSV(path), 4, 4)


def test_cells_of_two_passes_are_read_one_after_the_other(tmp_path: Path) -> None:
    (path := tmp_path / "order.csv").write_text("0F0,,0F1,(0B0;0F2)OVERLAP_F_B,0REDUCE_GRAD\n")
    assert FromCSV(path)(1, 1, 3) == [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("F", 2, 0)]]
