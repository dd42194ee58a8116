"""docs/scale.md has what docs/scale.py prints: a few quick cells of it, and how its network is derived."""

import math
import sys
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import scale  # noqa: E402

from zfunc.core.graph import Op  # noqa: E402
from zfunc.planner.profile import load_profile  # noqa: E402

PAGE = (DOCS / "scale.md").read_text()
GATHERED = Op("all_gather", (), "network", nbytes=10**12)
SMALL = evolve(scale.H100, num_layers=2, hidden_size=512, num_heads=8, rows=1)


def cells(row: str, *, after: str) -> list[str]:
    """The row of the page that begins so, of the first table after a heading."""
    lines = PAGE[PAGE.index(after) :].splitlines()
    return [cell.strip() for cell in next(x for x in lines if x.startswith(f"| {row} |")).split("|")[2:-1]]


def test_cells_of_the_page_are_what_the_script_prints() -> None:
    """Of one model, so that one is traced; where they are not, run it and take over what it prints."""
    printed = scale.gains({"Serial": scale.CHANGES["Serial"]}, [(scale.H100, 8)]).splitlines()
    for row, name in zip(printed[2:], ("*tokens/s a GPU, Overlapped*", "Serial"), strict=True):
        assert row == f"| {name} | {cells(name, after='## What schedules')[1]} |"


def test_every_table_and_row_is_on_the_page() -> None:
    for world in scale.WORLDS:
        assert PAGE.count(f"\n| {world:,} |") >= 2
    updates = (", ".join(filter(None, x)) for x in product(scale.UPDATES, scale.UPDATED))
    for name in (*scale.CHANGES, *scale.NETWORKS, *scale.ZERO_3, *updates):
        assert f"\n| {name} |" in PAGE


def test_long_rows_of_the_script_are_on_the_page() -> None:
    for flags in scale.LONG:
        if "seq_length" in flags:
            start = f"| {flags['hardware'].upper()} | {flags['seq_length']:,} | {flags['tiles']} |"
            places = flags.get("activations_on", "host"), flags.get("keys_on", "device")
            assert f"{start} {' | '.join(places)} |" in PAGE


@pytest.mark.slow
def test_the_rows_of_encoded_bases_are_what_the_script_prints() -> None:
    assert scale.encoded_bases() in PAGE


def test_ports_of_a_node_carry_a_collective_together_and_never_faster_than_inside() -> None:
    h100 = load_profile("h100")
    port = h100.reached("bytes_per_s", "network_between_nodes")
    inside = h100.reached("bytes_per_s", "network_in_node")
    rate = {n: scale.hardware(scale.H100, 16, n).rates["network"] for n in ("all ports", "one port")}
    assert rate == {"all ports": min(8 * port, inside), "one port": port}
    assert scale.hardware(scale.H100, 8).rates["network"] == inside
    few, many = (scale.hardware(scale.H100, 64, n).seconds(GATHERED) for n in ("all ports", "one port"))
    assert many == pytest.approx(few * 360e9 / port, rel=0.01)
    alone = [scale.hardware(scale.GH200, 16, n).rates["network"] for n in ("all ports", "one port")]
    assert alone[0] == alone[1]


def test_sums_of_squares_apart_are_no_slower() -> None:
    plain, apart = scale.planned(SMALL, 16), scale.planned(SMALL, 16, schedule=scale.NormsApart())
    assert apart.step_seconds <= plain.step_seconds * 1.001
    assert set(apart.lanes) - set(plain.lanes) == {"norms"}


@pytest.mark.slow
def test_updates_are_never_slower_than_in_the_better_place() -> None:
    for line in scale.updates().splitlines()[2:]:
        assert line in PAGE
        host, device, chosen = (float(x.split()[0]) for x in line.split("|")[2:-1])
        assert chosen <= 1.01 * min(host, device)


@pytest.mark.slow
def test_what_does_not_fit_is_in_brackets() -> None:
    now, large = scale.planned(SMALL, 2), scale.planned(SMALL, 2, rows=1 << 18)
    assert scale.gain(now, now) == "0 %"
    assert scale.gain(large, large) == "(0 %)"


BOUNDS = {  # seconds of a step, bytes of the host
    "40 B": (60.0, math.inf),
    "65 B": (16.0, math.inf),
    "70 B": (16.0, math.inf),
    "120 B": (math.inf, math.inf),
    "8 B": (math.inf, 90e9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", scale.STREAMED)
def test_models_larger_than_their_device_fit_in_time(name: str) -> None:
    step, (seconds, nbytes) = scale.streamed(name).planned, BOUNDS[name]
    assert step.fits
    assert step.step.spec.barrier
    assert step.step_seconds <= seconds
    assert step.memory["pinned"] + step.memory["host"] <= nbytes
    assert f"| {step.step_seconds:.1f} | {step.memory['device'] / 2**30:.1f} |" in PAGE
