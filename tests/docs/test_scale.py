"""docs/scale.md says what its command gives now: a few of its quick cells, and how it words and draws them."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from attrs import evolve

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import make_scale  # noqa: E402
import scale_charts  # noqa: E402
import scale_prose  # noqa: E402
import scale_steps  # noqa: E402
import scale_tables  # noqa: E402

from zfunc.planner.profile_toml import load_profile  # noqa: E402

PAGE = (DOCS / "scale.md").read_text()
SMALL = evolve(scale_tables.H100, num_layers=2, hidden_size=512, num_attention_heads=8, rows=1)


def cells(first: str, *, after: str) -> list[str]:
    """The row of the page that begins so, of the first table after a heading."""
    lines = PAGE[PAGE.index(after) :].splitlines()
    return [cell.strip() for cell in next(x for x in lines if x.startswith(f"| {first} |")).split("|")[1:-1]]


def test_the_page_says_what_wrote_it() -> None:
    assert PAGE.splitlines()[0] == make_scale.MARK


def test_cells_of_the_page_are_what_the_command_gives_now() -> None:
    """Of one model, so that one is traced; `make scale` writes the page anew where they are not."""
    case, heading = scale_tables.H100, "## The same work for every rank"
    for world in (8, 1024):
        now, one = scale_steps.simulated(case, world), scale_steps.simulated(case, 1)
        told = f"{now.per_gpu:,.0f} · {100 * now.per_gpu / one.per_gpu:.0f} %"
        assert cells(f"{world:,}", after=heading)[1] == told
    serial = scale_steps.simulated(case, 8, schedule="Serial")
    told = scale_tables.gain(serial, scale_steps.simulated(case, 8))
    assert cells("Serial", after="## What schedules")[2] == told
    one_port = scale_steps.simulated(case, 1024, "one port")
    told = scale_tables.gain(one_port, scale_steps.simulated(case, 1024))
    assert cells("a rank's own port alone", after="## What depends on the network")[3] == told


def test_all_tables_and_worlds_are_on_the_page() -> None:
    for world in scale_steps.WORLDS:
        assert PAGE.count(f"\n| {world:,} |") >= 2
    for name in (*scale_tables.SCHEDULES, *scale_tables.RECIPES, *scale_tables.NETWORKS):
        assert f"\n| {name} |" in PAGE


def test_charts_are_there_and_are_pictures() -> None:
    for name in ("scale-compute.svg", "scale-bound.svg", "scale-memory.svg"):
        assert f"]({name})" in PAGE
        assert ElementTree.parse(DOCS / name).getroot().tag.endswith("svg")


def test_ports_of_a_node_carry_a_collective_together_and_never_faster_than_inside() -> None:
    h100, gh200 = load_profile("h100"), load_profile("gh200")
    port = h100.reached("bytes_per_s", "network_between_nodes")
    inside = h100.reached("bytes_per_s", "network_in_node")
    rate = {n: scale_steps.hardware(h100, "bf16", 16, n).rates["network"] for n in ("all ports", "one port")}
    assert rate == {"all ports": min(8 * port, inside), "one port": port}
    assert scale_steps.hardware(h100, "bf16", 8).rates["network"] == inside
    alone = [scale_steps.hardware(gh200, "bf16", 16, n).rates["network"] for n in ("all ports", "one port")]
    assert alone[0] == alone[1]


@pytest.mark.parametrize("profile", ["h100", "gh200"])
def test_a_ring_passes_every_rank(profile: str) -> None:
    on = load_profile(profile)
    hops, shallow = (
        scale_steps.hardware(on, "bf16", 64, n).latencies["network"] for n in ("every hop", "all ports")
    )
    assert shallow == 6 * on.value("seconds", "network_between_nodes")
    assert hops > 64 * 10e-6 > shallow


def test_sums_of_squares_apart_are_a_plan_like_any_other_and_no_slower() -> None:
    """`simulated` verifies it."""
    plain = scale_steps.simulated(SMALL, 16)
    apart = scale_steps.simulated(SMALL, 16, schedule=scale_steps.NormsApart())
    assert apart.seconds <= plain.seconds * 1.001
    assert set(apart.busy) - set(plain.busy) == {"norms"}


def test_what_does_not_fit_is_in_brackets() -> None:
    now = scale_steps.simulated(SMALL, 2)
    assert scale_tables._if_fits(now, "+5 %") == "+5 %"
    assert scale_tables._if_fits(evolve(now, lacking={"device": 1}), "+5 %") == "(+5 %)"
    assert scale_tables.gain(now, now) == "0 %"
    assert scale_tables.gain(evolve(now, seconds=now.seconds / 2), now) == "+100 %"


def test_prose_is_wrapped_anew_and_nothing_else_is() -> None:
    text = "# a\n\none\ntwo\n- three\n  four\n1. five\n\n| a | b |\n| - | - |\n![x](y)\n"
    assert scale_prose.reflowed(text) == (
        "# a\n\none two\n- three four\n1. five\n\n| a | b |\n| - | - |\n![x](y)\n"
    )
    assert scale_prose.reflowed("- aa bb cc", width=7) == "- aa bb\n  cc"
    assert max(len(x) for x in PAGE.splitlines() if x and x[0] not in "|<!") <= 112


def test_a_sentence_that_is_no_longer_so_stops_the_page() -> None:
    with pytest.raises(ValueError, match="rewrite what it says"):
        scale_prose._hold(False, "the network")


def test_names_of_curves_do_not_overlap() -> None:
    drawn = scale_charts.lines({"a": {1: 1.0, 2: 0.5}, "b": {1: 0.2, 2: 0.5}}, "", {0: "0", 1: "1"})
    root = ElementTree.fromstring(drawn)
    places = {e.text: float(e.get("y", "0")) for e in root.iter() if e.text in ("a", "b")}
    assert abs(places["a"] - places["b"]) >= 15
