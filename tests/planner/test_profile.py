"""Profiles: those that come with zfunc hold together, files are read strictly and written as they read."""

import math
import re
import tomllib
from random import Random
from typing import Any

import pytest
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from zfunc.cli.main import main
from zfunc.core.bucketing import default_bucket_size
from zfunc.core.dtypes import DTYPES, PRECISIONS
from zfunc.core.graph import KINDS, Graph, Op
from zfunc.core.hardware import Measured
from zfunc.core.plan import build
from zfunc.core.settings import StepSettings
from zfunc.core.simulator import Speeds, simulate
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.gpt_costs import gpt_costs
from zfunc.optim.adamw import AdamW
from zfunc.planner.profile import (
    BOUNDS,
    NETWORKS,
    NONE_SENT,
    RATES,
    SHARED,
    TABLES,
    Figure,
    Profile,
    load_profile,
    parse_profile,
    profile_names,
    profile_text,
    replace_figures,
)

GB = {  # of each card, as it is sold
    **{"a10": 24, "a100-80gb": 80, "a6000": 48, "gh200": 96, "h100": 80, "h200": 141, "l4": 24, "l40s": 48},
    **{"mi300x": 192, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "t4": 16, "v100-32gb": 32},
    **{
        "a100-40gb": 40,
        "a800": 80,
        "b200": 180,
        "gb200": 186,
        "gb300": 288,
        "h100-96gb": 96,
        "rtx3090x2": 24,
        "rtx3090x4": 24,
        "rtx4090x2": 24,
        "rtx4090x8": 24,
        "rtx5090x2": 32,
    },
}
SHIPPED = tuple(sorted(GB))


# ---- those that come with zfunc --------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    """What is assumed of products is what is said of them; attention, with arithmetic between its products, is
    slower than they are."""
    profile = load_profile(name)
    figures = [(t, k, f) for t, of in profile.figures.items() for k, f in of.items()]
    assert not any(f.measured for _, _, f in figures)
    used = {f.source for _, _, f in figures if f.source}
    assert used == set(profile.sources)  # none is there for nothing
    assert all("https://" in words for words in profile.sources.values())
    assert all(f.source or len(f.assumed.split()) >= 4 for _, _, f in figures)
    reached = profile.figures["reached"]
    for figure in (reached[p] for p in profile.precisions if reached[p].assumed):
        assert [figure.value] == [float(x) for x in re.findall(r"products reach ([\d.]+) of", figure.assumed)]
    assert 0.3 * reached["fp16"].value < reached["attention"].value < reached["fp16"].value
    assert "fp32" in reached


MATMULS = [  # m, k, n; TFLOP/s that others measured for it in bf16: ml-engineering, compute/accelerator, MAMF
    ("a100-80gb", (1024, 5120, 10240), 271.2),
    ("h100", (2048, 13312, 2048), 794.5),
    ("mi300x", (10240, 8192, 15360), 668.4),
]


@pytest.mark.parametrize(("name", "sizes", "tflops"), MATMULS)
def test_a_product_takes_its_arithmetic_and_its_bytes(
    name: str, sizes: tuple[int, int, int], tflops: float
) -> None:
    """The best that others found in a search of sizes is not beaten, and reached but for a quarter; a thin product
    waits for memory."""
    on, (m, k, n) = evolve(load_profile(name).hardware("bf16"), latency=0.0, latencies={}), sizes

    def reached(m: int, k: int, n: int) -> float:
        nbytes = 2 * (m * k + k * n + m * n)
        return 2 * m * k * n / on.seconds(Op("mm", (), "compute", flops=2 * m * k * n, nbytes=nbytes)) / 1e12

    assert 0.75 * tflops < reached(m, k, n) <= tflops
    assert reached(64, 4096, 4096) < 0.4 * reached(4096, 4096, 4096)


@pytest.mark.parametrize("name", SHIPPED)
def test_hardware_follows_from_the_figures_and_a_file_is_written_as_it_reads(name: str) -> None:
    profile = load_profile(name)
    assert parse_profile(profile_text(profile), name) == profile
    for precision in profile.precisions:
        one = profile.hardware(precision)
        assert precision in one.name
        peak = profile.value("flops_per_s", precision)
        assert one.flops == peak * profile.value("reached", precision)
        assert one.attention == peak * profile.value("reached", "attention")
        assert one.rates["d2h"] == profile.value("bytes_per_s", "d2h") * profile.value("reached", "d2h")
        assert one.rates["network"] == NONE_SENT
        assert one.memory["device"] == int(profile.device_bytes)
        assert one.shared["host memory"]["host"] == 1.0
        assert not one.unified
    # Drivers count in powers of 2: 24 GB are from 22.5 GiB, where error correction takes a share, to 24 GiB.
    reported, gib = profile.value("bytes", "device"), GB[name] * 2**30
    assert 0.92 * gib < reported <= gib
    guessed = name in ("gh200", "gb200", "gb300", "h100-96gb")
    assert bool(profile.figures["bytes"]["device"].assumed) == guessed
    margin, context = reported - profile.device_bytes, profile.figures["bytes"]["context"]
    assert 0.02 * reported < margin < 0.09 * reported
    assert margin == pytest.approx(0.02 * reported + context.value)
    assert "context" in context.assumed


@pytest.mark.parametrize(
    ("name", "measured"),
    [("rtx4090", 0.29 * 312e12), ("rtx3090", 0.7421 * 71e12)],  # nanoGPT, issue 182; modula, pull request 1
)
def test_a_geforce_card_trains_as_fast_as_others_saw_it_train(name: str, measured: float) -> None:
    """GPT-2 of 124 M, compiled: 12 rows of 1,024 tokens."""
    config = GPTConfig(
        vocab_size=50304, seq_length=1024, num_layers=12, hidden_size=768, num_attention_heads=12
    )
    settings = StepSettings(precision="bf16", recompute="min-cut", compile_segments=True)
    costs = gpt_costs(config, 12, AdamW()).traced(settings, on_gpu=True).costs
    on = load_profile(name).hardware("bf16")
    passes = [x for c in costs for x in (c.forward, c.backward)]
    seconds = sum(on.seconds(Op("forward", (), "compute", **asdict(x))) for x in passes)
    # Both count as nanoGPT does: attention whole, six FLOPs a parameter.
    counted = 12 * 1024 * (6 * 124e6 + 12 * 12 * 768 * 1024)
    assert counted / seconds == pytest.approx(measured, rel=0.25)


def test_the_ranks_of_a_node_share_its_host() -> None:
    profile = load_profile("v100-32gb")
    one, eight, node, two = (profile.hardware("fp16", world) for world in (1, 8, 16, 32))
    for rate in ("host", "read", "write"):
        assert one.rates[rate] == 8 * eight.rates[rate] == 16 * node.rates[rate] == 16 * two.rates[rate]
    assert one.memory["host"] == pytest.approx(16 * two.memory["host"])
    assert one.rates["d2h"] == two.rates["d2h"]
    assert one.memory["device"] == two.memory["device"]
    assert 8 * one.shared["host memory"]["d2h"] == pytest.approx(eight.shared["host memory"]["d2h"])


def test_devices_of_one_rank_share_what_their_neighbours_use() -> None:
    """An uplink to the host that two of four cards share takes one copy at its speed, the host's memory as well."""
    uplink = {"shared.uplink.d2h": 1.0, "shared.uplink.devices": 2}
    on = replace_figures(load_profile("rtx3090x4"), uplink).hardware("bf16", devices=4)
    assert on.neighbours == {"uplink": 2}
    assert "host memory" in on.shared
    assert Speeds(on).of({("d2h", 0): 1, ("d2h", 1): 1, ("d2h", 2): 1}) == {
        ("d2h", 0): 0.5,
        ("d2h", 1): 0.5,
        ("d2h", 2): 1.0,
    }
    node = load_profile("rtx4090x8")
    assert node.hardware("bf16", 4, 2).rates["host"] == node.hardware("bf16", 4).rates["host"]
    with pytest.raises(ValueError, match="rtx4090x8: devices: got 16, expected at most the 8 of a node"):
        node.hardware("bf16", devices=16)


def test_collectives_go_inside_the_node_or_between_nodes() -> None:
    profile = load_profile("v100-32gb")
    inside, outside = (profile.reached("bytes_per_s", network) for network in NETWORKS)
    assert 16 * outside < inside
    assert [profile.hardware("fp16", world).rates["network"] for world in (2, 16, 17)] == [
        inside,
        inside,
        16 * outside,  # through all ports of a node
    ]
    fast = load_profile("h100")  # its ports together are as fast as what is inside, or nearly
    assert fast.hardware("bf16", 9).rates["network"] <= fast.hardware("bf16", 8).rates["network"]
    assert profile.hardware("fp16", 1024).name.endswith("fp16, one of 1024 ranks")


NCCL = {  # seconds of an empty ring by NCCL's constants: src/graph/tuning.cc, baseLat and hwLat of Ring
    "Simple": (8.4e-6, 3.4e-6, 14e-6),
    "LL128": (14e-6, 1.9e-6, 4e-6),
}
COLLECTIVES = {  # profile, ranks of a node or None for all, ranks, bytes that each sends, seconds published, within
    "all-gather of 1 GB from each of 64 H100, of nccl-tests": ("h100", None, 64, 63e9, 0.179, 0.05),
    "reduce-scatter of 1 GB over 16 H100 nodes, likewise": ("h100", 1, 16, 15e9 / 16, 0.0205, 0.05),
    "the ring of 1,024 in NCCL's model, LL128": ("h100", None, 1024, 0, 2.2e-3, 0.02),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_takes_as_long_as_others_say(name: str) -> None:
    """The first two: autoparallel, tools/overlap_simulator/colls*.table."""
    profile, local, world, nbytes, seconds, within = COLLECTIVES[name]
    machine = replace_figures(load_profile(profile), {"count.devices": local} if local else {})
    on = machine.hardware("bf16", world)
    assert on.seconds(Op("x", (), "network", nbytes=int(nbytes))) == pytest.approx(seconds, rel=within)


@given(nodes=st.integers(1, 200), nbytes=st.integers(0, 10**11))
def test_a_collective_takes_the_faster_protocol_of_a_ring_that_passes_every_rank(
    nodes: int, nbytes: int
) -> None:
    h100 = load_profile("h100")
    on = h100.hardware("bf16", 8 * nodes)
    port = h100.reached("bytes_per_s", NETWORKS[1])
    rate = h100.reached("bytes_per_s", NETWORKS[0]) if nodes == 1 else min(360e9, 8 * port)
    each = {
        protocol: start + 7 * nodes * inside + (nodes - 1) * between
        for protocol, (start, inside, between) in NCCL.items()
    }
    expected = min(each["Simple"] + nbytes / rate, each["LL128"] + nbytes / (0.92 * rate))
    assert on.seconds(Op("x", (), "network", nbytes=nbytes)) == pytest.approx(expected)


def test_trees_need_a_node_for_each_rank_and_do_not_pass_every_one_of_many() -> None:
    alone = load_profile("gh200").hardware("bf16", 1024)
    assert alone.seconds(Op("x", (), "network")) == pytest.approx(8e-6 + 1024 * 2.8e-6 + 10 * 14e-6 / 3.5)
    assert alone.latencies["network"] == pytest.approx(8.4e-6 + 1023 * 14e-6)
    inside = {"bytes_per_s": 4e11, "seconds": 3.4e-6, "reached": 0.8}
    of_four = {"count.devices": 4, **{f"{table}.network_in_node": x for table, x in inside.items()}}
    together = replace_figures(load_profile("gh200"), of_four)
    assert together.hardware("bf16", 1024).collectives == ()


# ---- asking for what is not there ------------------------------------------------------------------


def test_a_precision_or_a_world_that_a_machine_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"v100-32gb: got precision 'bf16', expected .*: use fp32, fp16"):
        load_profile("v100-32gb").hardware("bf16")
    with pytest.raises(ValueError, match="got a world of 0, expected at least 1 rank"):
        load_profile("h100").hardware("bf16", 0)


def test_a_network_that_is_not_known() -> None:
    h100 = load_profile("h100")
    alone = {k: f for k, f in h100.figures["bytes_per_s"].items() if k not in NETWORKS}
    profile = evolve(h100, figures={**h100.figures, "bytes_per_s": alone})
    assert profile.hardware("bf16").rates["network"] == NONE_SENT
    with pytest.raises(ValueError, match=r"bytes_per_s\.network_in_node: got no figure, expected one: add"):
        profile.hardware("bf16", 2)


def test_a_profile_is_loaded_by_its_name_or_the_path_of_its_file(tmp_path: Any) -> None:
    assert profile_names() == SHIPPED
    for name, hint in (("v100", "v100-32gb"), ("rtx-5090", "rtx5090"), ("gh20", "gh200")):
        with pytest.raises(FileNotFoundError, match=f"got '{name}', which is no profile.*mean '{hint}'"):
            load_profile(name)
    path = tmp_path / "mine.toml"
    path.write_text("\n= 5")
    with pytest.raises(ValueError, match=r"mine\.toml: got .*line .*, expected TOML"):
        load_profile(path)
    path.write_text(profile_text(load_profile("h100")))
    assert load_profile(path).figures == load_profile(str(path)).figures == load_profile("h100").figures
    assert load_profile(path).name == str(path)


@pytest.mark.parametrize("name", [*SHIPPED, "benchmarks/results/machine-nvidia-h200-2026-11-26.toml"])
def test_a_bucket_of_the_default_size_outlasts_a_hand_over(name: str) -> None:
    """Its copies take ten times as long or more, so the default need not ask a profile for its hand-over."""
    profile = load_profile(name)
    on = profile.hardware(profile.precisions[-1], 1)
    nbytes = default_bucket_size(1) * DTYPES[profile.precisions[-1]].nbytes
    assert nbytes / on.rates["d2h"] + nbytes / on.rates["h2d"] > 10 * on.handoff > 0


def test_a_drive_that_reads_and_writes_at_once_takes_as_long_as_one_after_the_other() -> None:
    on = evolve(load_profile("h100").hardware("bf16"), handoff=0.0, latencies={}, latency=0.0)
    both = tuple(Op(kind, (), kind, nbytes=int(on.rates[kind])) for kind in ("read", "write"))
    plan = build(Graph(both), {"in": [0], "out": [1]})
    assert simulate(plan, on).seconds == pytest.approx(2.0)


# ---- files that are wrong --------------------------------------------------------------------------


def figure(value: Any, **more: str) -> dict[str, Any]:
    return {"value": value, **(more or {"assumed": "for a test"})}


ORIGINS = "bytes.host: got 'no origin, or several: give it one, source, assumed or"
ENTRY = {"kind": "host", "flops": 0, "nbytes": 8, "attention_flops": 0, "seconds": 1.0}
WRONG: tuple[tuple[str, Any, str], ...] = (  # where, what is there (None: nothing), what is said
    ("bytes_per_s.d2h", None, "bytes_per_s.d2h: got no figure, expected one: add it"),
    ("bytes", None, "bytes.device: got no figure"),
    ("reached.fp16", None, "reached.fp16: got no figure"),
    ("reached.attention", None, "reached.attention: got no figure"),
    ("seconds.network_in_node", None, "seconds.network_in_node: got no figure"),
    ("reached.ll128", None, "reached.ll128: got no figure"),
    ("seconds.ll128_in_node", None, "seconds.ll128_in_node: got no figure"),
    ("flops_per_s", None, "flops_per_s: got nothing, expected at least"),
    ("bytes_per_s.d2hh", figure(1e9), "bytes_per_s.d2hh: got an unknown name|did you mean 'd2h'"),
    ("byte_per_s.d2h", figure(1e9), "got a field 'byte_per_s'|did you mean 'bytes_per_s'"),
    ("bytes_per_s.d2h", figure(-1e9), "bytes_per_s.d2h: got -1e+09, expected between"),
    ("bytes.host", figure(0), "bytes.host: got 0, expected between 1e+06"),
    ("bytes.host", figure(math.nan), "bytes.host: got nan, expected between"),
    ("bytes.host", figure(math.inf), "bytes.host: got inf, expected between"),
    ("flops_per_s.fp16", figure(1e30), "flops_per_s.fp16: got 1e+30, expected between"),
    ("flops_per_s.fp16", figure(125.0), "flops_per_s.fp16: got 125, |(flops_per_s): write it in"),
    ("bytes_per_s.h2d", figure(15.75), "bytes_per_s.h2d: got 15.75, |(bytes_per_s): write it in"),
    ("bytes.device", figure(32), "bytes.device: got 32, expected between"),
    ("seconds.host", figure(20), "seconds.host: got 20, |(seconds): write"),
    ("reached.d2h", figure(80), "reached.d2h: got 80, expected between 0.001 and 1"),
    ("count.devices", figure(1.5), "count.devices: got 1.5, expected a whole number"),
    ("bytes.host", figure("1 TB"), "bytes.host.value: got '1 TB', expected a number"),
    ("bytes.host", figure(True), "bytes.host.value: got True, expected a number"),
    ("bytes.host", 1e12, "bytes.host: got 1000000000000.0, expected an object"),
    ("bytes.host", {"value": 1e12}, ORIGINS),
    ("bytes.host", figure(1e12, assumed="so", source="dgx2"), ORIGINS),
    ("bytes.host", figure(1e12, assumed=5), "bytes.host.assumed: got 5, expected a text"),
    ("bytes.host", figure(1e12, assumed=" "), ORIGINS),
    ("bytes.host", figure(1e12, source="dgx"), "bytes.host: got the source 'dgx', |did you mean 'dg"),
    ("bytes.host", figure(1e12, assumed="so", why="x"), "bytes.host: got a field 'why'"),
    ("bytes", 5, "bytes: got 5, expected an object"),
    ("sources.x", 5, "sources.x: got 5, expected a text"),
    ("unified", "yes", "unified: got 'yes', expected true or false"),
    ("base", "rtx4091", "base: got 'rtx4091', expected one of |did you mean 'rtx4090'"),
    ("shared", {"cores": {"compute": figure(2.0)}}, "shared.cores.compute: got 2, |1e-06 and 1 (shared)"),
    ("shared", {"cores": {"gpu": figure(0.5)}}, "shared.cores.gpu: got an unknown name, expected on"),
    ("bytes.context", figure(3.4e10), "bytes.context: got 3.4e+10, expected less"),
    ("measured", [ENTRY | {"seconds": 0.0}], "measured[0]: got \"got Measured(kind='host', flops=0,"),
    ("measured", [ENTRY | {"seconds": "x"}], "measured[0].seconds: got 'x', expected a number"),
    (
        "measured",
        [ENTRY | {"more": 2}],
        "measured[0]: got a field 'more', expected only kind, flops, nbytes, seconds",
    ),
    ("measured", [ENTRY | {"kind": "gpu"}], "measured[0]: got |'gpu'"),
    ("measured", {"x": 1}, "measured: got {'x': 1}, expected a list"),
)


@pytest.mark.parametrize(("place", "value", "message"), WRONG)
def test_a_file_that_is_wrong_is_refused_by_file_table_and_key(
    place: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content: dict[str, Any] = tomllib.loads(profile_text(load_profile("v100-32gb")))
    monkeypatch.setattr(tomllib, "loads", lambda _: content)
    assert parse_profile("", "mine.toml").figures == load_profile("v100-32gb").figures, "right otherwise"
    *table, key = place.split(".")
    of = content.setdefault(table[0], {}) if table else content
    of |= {key: value}
    if value is None:
        del of[key]
    with pytest.raises(ValueError, match=f"^mine.toml: {'.*'.join(map(re.escape, message.split('|')))}"):
        parse_profile("", "mine.toml")


# ---- any profile -----------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: bool(t.strip()))
NASTY = ["so", 'said "so"', "a\\b", "two\nlines", "\x7f\x00", "größer 🙂", "# no comment", "'"]


def any_figure(unit: str, random: Random) -> Figure:
    low, high = BOUNDS[unit.partition(".")[0]]
    value = (
        random.randint(1, 1000) if unit == "count" else random.uniform(low, high) ** random.choice((1, 0.7))
    )
    origin = {random.choice(("assumed", "measured")): random.choice(NASTY)}
    return Figure(min(high, max(low, value)), **origin, note=random.choice(["", *NASTY]))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    networks = draw(st.sampled_from([(), NETWORKS, NETWORKS[:1]]))
    precisions = draw(st.lists(st.sampled_from(PRECISIONS), min_size=1, unique=True))
    random = Random(draw(st.integers(0, 10**6)))
    more = {"flops_per_s": precisions, "bytes_per_s": networks, "seconds": (*networks, "launch")}
    more["reached"] = (*precisions, *networks)
    keys: dict[str, Any] = {table: (*needed, *more.get(table, ())) for table, (needed, _) in TABLES.items()}
    shared = draw(st.dictionaries(words, st.sets(st.sampled_from(KINDS)), max_size=2))
    keys |= {f"{SHARED}{resource}": sorted(of) for resource, of in shared.items()}
    measured = st.builds(
        Measured, st.sampled_from(KINDS), st.integers(0, 10**18), st.integers(0, 10**15), st.floats(1e-9, 1e6)
    )
    return Profile(
        "made",
        draw(words),
        {table: {k: any_figure(table, random) for k in of} for table, of in keys.items()},
        sources=draw(st.dictionaries(words, words, max_size=2)),
        unified=draw(st.booleans()),
        measured=draw(st.lists(measured, max_size=3)),
    )


@given(profiles(), st.integers(1, 10**4))
def test_any_profile_is_written_as_it_reads_and_makes_hardware(profile: Profile, world: int) -> None:
    """Replacing figures by themselves changes nothing."""
    assert parse_profile(profile_text(profile), "made") == profile
    own = {f"{table}.{key}": f.value for table, of in profile.figures.items() for key, f in of.items()}
    assert replace_figures(profile, own) == profile
    devices = profile.value("count", "devices")
    needed = () if world == 1 else (NETWORKS[world > devices],)
    if any(key not in profile.figures["bytes_per_s"] for key in needed):
        with pytest.raises(ValueError, match="network"):
            profile.hardware(profile.precisions[0], world)
        return
    on = profile.hardware(profile.precisions[0], world)
    assert set(on.rates) == set(KINDS)
    assert len(RATES) == 6
    assert ("device" in on.memory) != profile.unified


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ("rtx4090 --world 2", "nodes      2, of 1 device and all the node's memory each; 1 GB/s between"),
        ("rtx4090x8 --world 2", "nodes      1, of 2 devices and all the node's memory; 2.61 GB/s inside"),
        ("rtx4090 --gpus 2", "nodes      1, of 2 devices and all the node's memory; 5.99 GB/s inside"),
        ("rtx4090 --gpus 2", "planned in one machine, rtx4090x2: that of rtx4090 has 1 device"),
        ("rtx4090 --gpus 4", "planned in one machine, rtx4090x8: that of rtx4090 has 1 device"),
        ("rtx4090x2 --gpus 2", "2 ranks of 1 device: "),
        ("rtx4090 --gpus 4 --world 2 --params-on host --stage 3", "2 ranks of 2 devices: "),
        (
            "rtx4090",
            "nodes      1, of 1 device and all the node's memory; 25.2 GB/s from the host to a device",
        ),
        (
            "rtx4090x2 --devices 2 --params-on host --stage 3 --micro-batches 2",
            "nodes      1, of 2 devices and all the node's memory; 12.6 GB/s from the host to a device",
        ),
        ("t4 --gpus 4", "nodes      1, of 4 devices"),
        ("rtx4090 --gpus 2 --with count.devices=2 --with bytes_per_s.network_in_node=2e10", "got no figure"),
        ("rtx4090 --gpus 4 --world 4 --devices 2", "--gpus: got 4 with --world 4 and --devices 2, expected"),
        ("rtx4090 --devices 2", "at most the 1 of a node: use more ranks, or the profile rtx4090x2"),
    ],
)
def test_a_plan_says_its_nodes_and_link(hardware: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --batch-size 4"
    main(["plan", *flags.split(), "--hardware", *hardware.split()])
    assert said in "".join(capsys.readouterr())


def test_cards_of_one_machine_share_what_it_has() -> None:
    """By the figures of the profile of one card: host, memory of a card, half of its lanes."""
    one, two = load_profile("rtx4090").hardware("bf16"), load_profile("rtx4090x2").hardware("bf16", 2)
    assert (two.memory["device"], two.memory["host"]) == (one.memory["device"], one.memory["host"] // 2)
    halves = [pytest.approx(x / 2) for x in (one.rates["d2h"], one.rates["read"], one.rates["host"])]
    assert [two.rates[kind] for kind in ("d2h", "read", "host")] == halves
    assert (two.flops, two.launch) == (one.flops, one.launch)
