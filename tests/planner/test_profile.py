"""Profiles: those that come with zfunc hold together, files are read strictly and written as they read."""

import math
import re
import tomllib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from zfunc.core.dtypes import PRECISIONS
from zfunc.core.graph import KINDS, Graph, Op
from zfunc.core.hardware import Measured
from zfunc.core.plan import build
from zfunc.core.simulator import simulate
from zfunc.planner.profile import (
    BOUNDS,
    NETWORKS,
    NONE_SENT,
    ORIGINS,
    RATES,
    TABLES,
    Figure,
    Profile,
    replace_figures,
)
from zfunc.planner.profile_toml import FOLDER, load_profile, parse_profile, profile_names, profile_text

GB = {  # of each card, as it is sold
    **{"a10": 24, "a100-80gb": 80, "a6000": 48, "gh200": 96, "h100": 80, "h200": 141, "l4": 24, "l40s": 48},
    **{"mi300x": 192, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "t4": 16, "v100-32gb": 32},
}
SHIPPED = tuple(sorted(GB))


def toml(name: str = "v100-32gb") -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


# ---- those that come with zfunc --------------------------------------------------------------------


def test_these_come_with_zfunc() -> None:
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    figures = [(t, k, f) for t, of in profile.figures.items() for k, f in of.items()]
    assert {f.origin for _, _, f in figures} == {"source", "assumed"}
    used = {f.words for _, _, f in figures if f.origin == "source"}
    assert used == set(profile.sources)  # none is there for nothing
    assert all("https://" in words for words in profile.sources.values())
    assert all(len(f.words.split()) >= 4 for _, _, f in figures if f.origin == "assumed")
    assert profile.figures["reached"]["fp16"].origin == "assumed"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_assumed_of_flops_follows_from_what_is_said_of_it(name: str) -> None:
    """Products reach the share that the words say; the rest of a block waits for memory as on an A100 at 0.45."""
    profile, a100 = load_profile(name), load_profile("a100-80gb")
    waits = (1 / 0.45 - 1 / 0.65) / a100.value("flops_per_s", "bf16")
    waits *= a100.value("bytes_per_s", "device_memory") / profile.value("bytes_per_s", "device_memory")
    for precision in profile.precisions:
        peak = profile.value("flops_per_s", precision)
        figure, times = profile.figures["reached"][precision], 2 if precision == "fp32" else 1
        product = float(re.findall(r"products reach ([\d.]+) of this peak", figure.words)[0])
        reached = 1 / (peak * (1 / (product * peak) + times * waits))
        assert profile.value("reached", precision) == math.floor(100 * reached + 1e-9) / 100


@pytest.mark.parametrize("name", SHIPPED)
def test_hardware_follows_from_the_figures_and_a_file_is_written_as_it_reads(name: str) -> None:
    profile = load_profile(name)
    assert parse_profile(profile_text(profile), name) == profile
    for precision in profile.precisions:
        one = profile.hardware(precision)
        assert precision in one.name
        assert one.flops == profile.value("flops_per_s", precision) * profile.value("reached", precision)
        assert one.rates["d2h"] == profile.value("bytes_per_s", "d2h") * profile.value("reached", "d2h")
        assert one.rates["network"] == NONE_SENT
        assert one.memory["device"] == int(profile.device_bytes)
        assert one.shared["host memory"]["host"] == 1.0
        assert not one.unified


@pytest.mark.parametrize("name", SHIPPED)
def test_a_device_has_what_its_driver_reports_less_a_margin_that_is_named(name: str) -> None:
    """Drivers count in powers of 2: 24 GB are from 22.5 GiB, where error correction takes a share, to 24 GiB."""
    profile = load_profile(name)
    reported, gib = profile.value("bytes", "device"), GB[name] * 2**30
    assert 0.92 * gib < reported <= gib
    assert profile.figures["bytes"]["device"].origin == ("assumed" if name == "gh200" else "source")
    margin = reported - profile.device_bytes
    assert 0.02 * reported < margin < 0.09 * reported
    context = profile.figures["bytes"]["context"]
    assert margin == pytest.approx(0.02 * reported + context.value)
    assert "context" in context.words


@pytest.mark.parametrize(
    ("name", "measured"),
    [("rtx4090", 0.29 * 312e12), ("rtx3090", 0.7421 * 71e12)],  # nanoGPT, issue 182; modula, pull request 1
)
def test_a_geforce_card_trains_as_fast_as_others_saw_it_train(name: str, measured: float) -> None:
    assert load_profile(name).reached("flops_per_s", "bf16") == pytest.approx(measured, rel=0.07)


def test_a_context_larger_than_the_device_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"\[bytes\] context: got 3\.4e\+10, expected less than the device has"
    ):
        broken(put("bytes", "context", figure(3.4e10)))


def test_the_ranks_of_a_node_share_its_host() -> None:
    profile = load_profile("v100-32gb")
    one, eight, node, two = (profile.hardware("fp16", world) for world in (1, 8, 16, 32))
    for rate in ("host", "read", "write"):
        assert one.rates[rate] == 8 * eight.rates[rate] == 16 * node.rates[rate] == 16 * two.rates[rate]
    assert one.memory["host"] == pytest.approx(16 * two.memory["host"])
    assert one.rates["d2h"] == two.rates["d2h"]
    assert one.memory["device"] == two.memory["device"]
    assert 8 * one.shared["host memory"]["d2h"] == pytest.approx(eight.shared["host memory"]["d2h"])


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
    hop = profile.value("seconds", "network_between_nodes")
    assert profile.hardware("fp16", 17).latencies["network"] == 5 * hop  # log2, rounded up
    assert profile.hardware("fp16", 1024).latencies["network"] == 10 * hop
    assert profile.hardware("fp16", 1024).name.endswith("fp16, one of 1024 ranks")


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
    with pytest.raises(
        ValueError, match=r"\[bytes_per_s\] network_in_node: got no figure, expected one: add"
    ):
        profile.hardware("bf16", 2)


@pytest.mark.parametrize(
    ("name", "hint"), [("v100", "v100-32gb"), ("rtx-5090", "rtx5090"), ("gh20", "gh200")]
)
def test_an_unknown_profile_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"got '{name}', which is no profile.*did you mean '{hint}'"):
        load_profile(name)


def test_a_file_is_loaded_by_its_path(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(profile_text(load_profile("h100")))
    assert load_profile(path).figures == load_profile(str(path)).figures == load_profile("h100").figures
    assert load_profile(path).name == str(path)


def test_a_file_with_one_figure_for_the_disk_has_it_both_ways() -> None:
    known = load_profile("h100")
    one = {table: known.figures[table]["write"] for table in ("bytes_per_s", "seconds", "reached")}
    text = profile_text(evolve(known, shared={"cores": {"write": one["reached"]}}))
    before = "\n".join(
        line.replace("write =", "disk =") for line in text.splitlines() if not line.startswith("read =")
    )
    profile = parse_profile(before, "before")
    assert profile.shared["cores"] == dict.fromkeys(("read", "write"), one["reached"])
    for table, figure in one.items():
        assert profile.figures[table]["read"] == profile.figures[table]["write"] == figure
    assert profile.figures["bytes"] == known.figures["bytes"]


def test_a_drive_that_reads_and_writes_at_once_takes_as_long_as_one_after_the_other() -> None:
    on = evolve(load_profile("h100").hardware("bf16"), handoff=0.0, latencies={}, latency=0.0)
    both = tuple(Op(kind, (), kind, nbytes=int(on.rates[kind])) for kind in ("read", "write"))
    plan = build(Graph(both), {"in": [0], "out": [1]})
    assert simulate(plan, on).seconds == pytest.approx(2.0)


# ---- files that are wrong --------------------------------------------------------------------------


def broken(change: Callable[[dict[str, Any]], Any]) -> Profile:
    """A file, with one thing changed in what it says, read again."""
    content = toml()
    change(content)
    lines: list[str] = []
    for key, value in content.items():
        if not isinstance(value, dict):
            lines.insert(0, f"{key} = {inline(value)}")
        else:
            lines += [f"[{key}]", *(f"{k!r} = {inline(v)}" for k, v in value.items())]
    return parse_profile("\n".join(lines), "mine.toml")


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {inline(v)}" for k, v in value.items()) + "}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def put(table: str, key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content.setdefault(table, {}).__setitem__(key, value)


def drop(table: str, key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content[table].pop(key)


def figure(value: Any, **more: str) -> dict[str, Any]:
    return {"value": value, **(more or {"assumed": "for a test"})}


def shared(kind: str, value: float) -> Callable[[dict[str, Any]], Any]:
    return lambda table: table.__setitem__("shared", {"cores": {kind: figure(value)}})


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (drop("bytes_per_s", "d2h"), r"\[bytes_per_s\] d2h: got no figure, expected one: add it"),
    "missing table": (lambda f: f.pop("bytes"), r"\[bytes\] device: got no figure"),
    "no share of a peak": (drop("reached", "fp16"), r"\[reached\] fp16: got no figure"),
    "no latency": (drop("seconds", "network_in_node"), r"\[seconds\] network_in_node: got no fig"),
    "no precision": (
        lambda f: f.pop("flops_per_s"),
        r"\[flops_per_s\]: got nothing, expected at le",
    ),
    "unknown key": (put("bytes_per_s", "d2hh", figure(1e9)), r"\[bytes_per_s\] d2hh: .*did you mean 'd2h'"),
    "unknown table": (put("byte_per_s", "d2h", figure(1e9)), r"byte_per_s: .*did you mean 'bytes_per_s'"),
    "negative": (put("bytes_per_s", "d2h", figure(-1e9)), r"\[bytes_per_s\] d2h: got -1e\+09, expected betw"),
    "zero": (put("bytes", "host", figure(0)), r"\[bytes\] host: got 0, expected between 1e\+06"),
    "not a number": (put("bytes", "host", figure(math.nan)), r"\[bytes\] host: got nan, expected between"),
    "infinite": (put("bytes", "host", figure(math.inf)), r"\[bytes\] host: got inf, expected between"),
    "absurd": (put("flops_per_s", "fp16", figure(1e30)), r"\[flops_per_s\] fp16: got 1e\+30, expected betw"),
    "in TFLOP/s": (
        put("flops_per_s", "fp16", figure(125.0)),
        r"fp16: got 125, .*\(flops_per_s\): write it in",
    ),
    "in GB/s": (
        put("bytes_per_s", "h2d", figure(15.75)),
        r"h2d: got 15.75, .*\(bytes_per_s\): write it in th",
    ),
    "in GB": (put("bytes", "device", figure(32)), r"\[bytes\] device: got 32, expected between"),
    "in microseconds": (
        put("seconds", "host", figure(20)),
        r"\[seconds\] host: got 20, .*\(seconds\): write",
    ),
    "in percent": (
        put("reached", "d2h", figure(80)),
        r"\[reached\] d2h: got 80, expected between 0.001 and 1",
    ),
    "half a device": (put("count", "devices", figure(1.5)), r"devices: got 1.5, expected a whole number"),
    "a text": (put("bytes", "host", figure("1 TB")), r"\[bytes\] host: got '1 TB', expected a number"),
    "yes": (put("bytes", "host", figure(True)), r"\[bytes\] host: got True, expected a number"),
    "bare": (
        put("bytes", "host", 1e12),
        r"\[bytes\] host: got 1000000000000.0, expected { value = 1e9, sourc",
    ),
    "no origin": (put("bytes", "host", {"value": 1e12}), r"\[bytes\] host: .*expected one origin, a text"),
    "two origins": (
        put("bytes", "host", figure(1e12, assumed="so", source="dgx2")),
        r"\[bytes\] host: .*expected one origin, a text",
    ),
    "no words": (
        put("bytes", "host", figure(1e12, assumed=" ")),
        r"host: got nothing for 'assumed', expected",
    ),
    "unknown source": (
        put("bytes", "host", figure(1e12, source="dgx")),
        r"the source 'dgx', .*did you mean 'dg",
    ),
    "another key": (
        put("bytes", "host", figure(1e12, assumed="so", why="x")),
        r"\[bytes\] host: got {.*'why'",
    ),
    "a table that is none": (lambda f: f.__setitem__("bytes", 5), r"\[bytes\]: got 5, expected a table"),
    "a source that is none": (put("sources", "x", 5), r"\[sources\] x: got 5, expected a text"),
    "unified": (lambda f: f.__setitem__("unified", "yes"), r"unified: got 'yes', expected a bool"),
    "share": (
        shared("compute", 2.0),
        r"\[shared.cores\] compute: got 2, expected between 1e-06 and 1 \(shared\)",
    ),
    "share of no kind": (
        shared("gpu", 0.5),
        r"\[shared.cores\] gpu: got an unknown name, expected on",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_wrong_is_refused_by_file_table_and_key(what: str) -> None:
    change, message = WRONG[what]
    with pytest.raises(ValueError, match=rf"^mine.toml: .*{message}|^mine.toml: {message}"):
        broken(change)


def test_the_file_is_right_otherwise() -> None:
    assert broken(lambda content: None).figures == load_profile("v100-32gb").figures


def test_what_is_not_toml_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mine.toml: got .*line 1.*, expected TOML"):
        parse_profile("= 5", "mine.toml")


MEASURED = "\n[[measured]]\nkind = 'host'\nflops = 0\nnbytes = 8\nseconds = {}\n"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (MEASURED.format("0"), r"\[\[measured\]\] 1: got Measured\(.*expected FLOPs and bytes"),
        (MEASURED.format("'x'"), r"\[\[measured\]\] 1: got 'x', expected a number"),
        (MEASURED.format("1\nmore = 2"), r"\[\[measured\]\] 1: .*expected flops, kind, nbytes, seconds"),
        (MEASURED.format("1").replace("host", "gpu"), r"\[\[measured\]\] 1: .*gpu"),
        ("\n[measured]\nx = 1\n", r"\[\[measured\]\] 1: got 'x'"),
    ],
)
def test_measurements_are_read_strictly(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"mine.toml: {message}"):
        parse_profile(profile_text(load_profile("h100")) + entry, "mine.toml")


# ---- any profile -----------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: bool(t.strip()))
NASTY = ["so", 'said "so"', "a\\b", "two\nlines", "\x7f\x00", "größer 🙂", "# no comment", "'"]


def any_figure(unit: str, random: Random) -> Figure:
    low, high = BOUNDS[unit]
    value = (
        random.randint(1, 1000) if unit == "count" else random.uniform(low, high) ** random.choice((1, 0.7))
    )
    origin = random.choice([o for o in ORIGINS if o != "source"])
    return Figure(min(high, max(low, value)), origin, random.choice(NASTY), random.choice(["", *NASTY]))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    networks = draw(st.sampled_from([(), NETWORKS, NETWORKS[:1]]))
    precisions = draw(st.lists(st.sampled_from(PRECISIONS), min_size=1, unique=True))
    random = Random(draw(st.integers(0, 10**6)))
    more = {"flops_per_s": precisions, "bytes_per_s": networks, "seconds": (*networks, "launch")}
    more["reached"] = (*precisions, *networks)
    keys = {table: (*needed, *more.get(table, ())) for table, (needed, _) in TABLES.items()}
    shared = draw(st.dictionaries(words, st.sets(st.sampled_from(KINDS)), max_size=2))
    measured = st.builds(
        Measured, st.sampled_from(KINDS), st.integers(0, 10**18), st.integers(0, 10**15), st.floats(1e-9, 1e6)
    )
    return Profile(
        "made",
        draw(words),
        {table: {k: any_figure(table, random) for k in of} for table, of in keys.items()},
        sources=draw(st.dictionaries(words, words, max_size=2)),
        unified=draw(st.booleans()),
        shared={name: {k: any_figure("shared", random) for k in sorted(of)} for name, of in shared.items()},
        measured=draw(st.lists(measured, max_size=3)),
    )


@given(profiles())
def test_any_profile_is_written_as_it_reads(profile: Profile) -> None:
    assert parse_profile(profile_text(profile), "made") == profile


@given(profiles())
def test_replacing_figures_by_themselves_changes_nothing(profile: Profile) -> None:
    tables = {**profile.figures, **{f"shared.{name}": of for name, of in profile.shared.items()}}
    own = {f"{table}.{key}": figure.value for table, of in tables.items() for key, figure in of.items()}
    assert replace_figures(profile, own) == profile


@given(profiles(), st.integers(1, 10**4))
def test_any_profile_makes_hardware(profile: Profile, world: int) -> None:
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
