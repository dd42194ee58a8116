"""`zfunc plan`, `zfunc calibrate`, and what `zfunc train` asks the planner, as a user meets them."""

import json
import re
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from small_trainings import train
from text_data import save_tokenizer

import zfunc
from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.commands.calibrate import CalibrateSettings
from zfunc.cli.commands.draw import DrawSettings
from zfunc.cli.commands.plan import PlanSettings, plan_model, plan_text
from zfunc.cli.main import main
from zfunc.cli.parser import make_parser
from zfunc.core.bucketing import lay_out
from zfunc.core.settings import StepSettings
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.gpt_costs import gpt_costs, gpt_parameters
from zfunc.options import options_of
from zfunc.planner import traced_costs as room
from zfunc.planner.cost_model import CostModel
from zfunc.planner.plan_step import plan_settings
from zfunc.planner.profile import load_profile, profile_text
from zfunc.planner.search import Watch
from zfunc.train.settings import TrainSettings
from zfunc.train.setup import gpt_config, prepare_job

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32"
TINY = [*MODEL.split(), "--vocab-size", "100", "--batch-size", "4"]
WIDER = ["--hidden-size", "128"]  # does not fit the least memory of a profile
KEYS = {"fits", "step_seconds", "tflops", "tokens_per_second", "memory", "lanes", "bound", "advice"}

Out = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("own_folder")


def with_room(path: Path, **nbytes: float) -> Path:
    """A profile of an H100 with so many bytes on some tiers."""
    profile = load_profile("h100")
    figures = {table: dict(of) for table, of in profile.figures.items()}
    figures["bytes"].pop("context")
    for tier, value in nbytes.items():
        figures["bytes"][tier] = attrs.evolve(figures["bytes"][tier], value=value)
        share = f"{tier}_bytes"
        figures["reached"][share] = attrs.evolve(figures["reached"][share], value=1.0)
    figures["count"]["devices"] = attrs.evolve(figures["count"]["devices"], value=1)
    path.write_text(profile_text(attrs.evolve(profile, figures=figures)))
    return path


def text_of(capsys: Out, *args: object) -> tuple[int, str]:
    code = main(["plan", *TINY, *map(str, args)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def answer(capsys: Out, *args: object) -> tuple[int, dict[str, Any]]:
    code, out = text_of(capsys, "--json", *args)
    return code, json.loads(out)


# --- what it answers ---------------------------------------------------------------------------------------


def test_what_ctrl_c_left_untried_is_not_said_to_gain_nothing(capsys: Out, monkeypatch: Any) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zfunc.planner.plan_step._beyond_settings", interrupted)
    assert main(["plan", *TINY]) == 0
    out, err = capsys.readouterr()
    assert "it fits" in out
    assert "tried" not in out
    assert "to make it faster" not in out
    assert "without advice" in err
    assert main(["plan", *TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] is None


@pytest.mark.parametrize("last", [1, 3, 9])
def test_ctrl_c_ends_the_search_for_the_most_with_the_most_so_far(
    last: int, tmp_path: Path, capsys: Out, monkeypatch: Any
) -> None:
    """While candidates are tried, and while shorter sequences are timed after them; at once before one fits."""
    told: list[str] = []

    def begins(self: Watch, tried: int, about: int, best: str) -> None:
        told.append(best)
        if len(told) == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "begins", begins)
    room = with_room(tmp_path / "small.toml", device=60e6)
    flags = ["--max", "length", "--activations-on", "auto", "--hardware", str(room), "--json"]
    code = main(["plan", *TINY, *flags])
    out, err = capsys.readouterr()
    if last == 1:
        assert (code, out) == (130, "")
        return
    assert code == 0
    answer = json.loads(out)
    assert (answer["fits"], answer["advice"], answer["knee"]) == (True, None, [])
    assert f"{answer['seq_length']:,} tokens" in told
    assert "the best so far" in err


def test_json_has_what_is_promised(capsys: Out) -> None:
    code, result = answer(capsys)
    assert code == 0
    assert result.keys() >= KEYS
    assert result["fits"] is True
    assert result["memory"].keys() == {"device", "pinned", "host", "disk"}
    assert result["tokens_per_second"] == pytest.approx(4 * 32 / result["step_seconds"])
    assert all(0 <= share <= 1 for share in result["lanes"].values())
    assert re.fullmatch(r"(\w+ \d+%(, )?)+", result["bound"])
    for tier, peak in result["peaks"].items():
        assert sum(peak["holds"].values()) == result["memory"][tier]
    assert result["bus_bytes"].keys() == {"d2h", "h2d", "network", "host", "read", "write"}
    gradients_and_squares, parameters = 2 * 108_544, 2 * 108_544
    assert result["bus_bytes"]["d2h"] > gradients_and_squares
    assert result["bus_bytes"]["h2d"] > parameters
    assert result["bus_bytes"]["network"] == 0


@pytest.mark.parametrize(
    ("args", "ranks", "element_bytes"),
    [("--micro-batches 2 --defer", 1, 4), ("--stage 3 --world 2 --hardware h100", 2, 2)],
)
def test_json_of_a_streamed_step_counts_what_crosses_each_bus(
    args: str, ranks: int, element_bytes: int, capsys: Out
) -> None:
    """Parameters to the device, gradients to the host, activations to the host and back."""
    result = answer(capsys, "--params-on", "host", "--activations-on", "host", *args.split())[1]
    pinned, bus = result["peaks"]["pinned"]["holds"], result["bus_bytes"]
    weights = pinned["params"] if ranks == 1 else pinned["master_high"]  # a slice; two segments have room
    inputs_and_targets = 2 * 8 * 4 * 32 // ranks
    assert bus["h2d"] == weights + pinned["host_act"] + inputs_and_targets
    tied = 100 * 64 // ranks
    gradients = element_bytes * (weights // 2 + tied)  # that of the tied embedding comes twice
    # The host takes the squares of sums itself: of all with micro-batches, else of the tied bucket alone.
    squares = 0 if ranks == 1 else pinned["host_squares"] - 168
    assert bus["d2h"] == gradients + pinned["host_act"] + squares
    assert bus["network"] == (0 if ranks == 1 else gradients + weights + 16)  # of the loss and the norm
    assert bus["host"] > gradients
    assert result["memory"]["pinned"] == sum(pinned.values())


def test_text_is_one_screen_and_says_the_same(capsys: Out) -> None:
    code, result = text_of(capsys)
    as_json = answer(capsys)[1]
    assert code == 0
    lines = result.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 130
    for words in (
        "GPT of 2 layers x 64: 108,544 parameters; a step of 4 x 32 tokens on 1 rank",
        "fp16 (chosen of fp32, fp16)",
        "it fits",
        f"bound by {as_json['bound']}",
        "TFLOP/s counts forward with attention, and twice as much for backward",
    ):
        assert words in " ".join(result.split())
    for tier in ("device", "pinned", "host", "disk"):
        assert re.search(rf"^  {tier} ", result, re.MULTILINE)


def test_the_largest_model_of_zero_offloads_paper_has_room_on_one_v100() -> None:
    size = {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 1024, "vocab_size": 50257}
    segments = gpt_segments(gpt_config(PlanSettings(num_layers=65, batch_size=4, **size)))
    tokens = torch.empty(4, 1024, dtype=torch.int64, device="meta")
    planned = zfunc.plan(segments, (tokens, tokens), hardware="v100-32gb", clip_norm=1.0, advice=False)
    assert planned.fits
    assert planned.memory["device"] < planned.profile.value("bytes", "device")


def test_the_tutorials_job_is_answered(capsys: Out) -> None:
    began = time.process_time()
    job = "plan --num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size 50257"
    code = main([*job.split(), "--batch-size", "10", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["fits"]) == (0, True), "as in DeepSpeed's own tutorial"
    assert result["parameters"] == 10_279_047_168
    assert result["settings"]["precision"] == "fp16", "a V100 has no bf16"
    assert 20.5e9 < result["memory"]["device"] < 40e9, "2 bytes a parameter, and activations"
    assert 12 * 10.2e9 < result["memory"]["host"] < 14 * 10.3e9
    assert result["release"].keys() == {"bytes_out", "bytes_back", "seconds_out", "seconds_back"}
    assert 2 * 10.2e9 < result["release"]["bytes_back"] < 2 * 10.3e9, "masters are on the host"
    assert 10 < result["tflops"] < 125
    assert result["advice"]
    assert time.process_time() - began < 30


def test_without_room_it_exits_with_1_and_says_what_would_fit(capsys: Out, tmp_path: Path) -> None:
    needed = answer(capsys, *WIDER, "--hardware", "h100")[1]["memory"]
    tight = with_room(tmp_path / "tight.toml", device=needed["device"] - 5000)
    code, result = answer(capsys, *WIDER, "--hardware", tight)
    assert (code, result["fits"], result["lacking"]) == (1, False, {"device": 5000})
    assert result["advice"]
    code, words = text_of(capsys, *WIDER, "--hardware", tight)
    assert code == 1
    assert "it does not fit: 4.9 KiB of device memory short" in words
    assert "to make it fit, each planned:" in words
    flags = re.match(r"(--\S+ \S+): fits, ", result["advice"][0])
    assert flags
    assert answer(capsys, *WIDER, "--hardware", tight, *flags[1].split())[0] == 0, (
        "what is advised can be typed"
    )


@pytest.mark.parametrize(
    ("figure", "error"),
    [
        ("byts.host=1e11", "v100-32gb: byts: got an unknown name, expected one of count, bytes, "),
        ("bytes.hst=1e11", "bytes.hst: got an unknown name, expected one of device, host, disk, context"),
        ("bytes.host=3", "bytes.host: got 3, expected between"),
        (
            "bytes.host=12GB",
            "bytes.host: got '12GB', expected a number in the unit of its table: write 1.28e11",
        ),
        ("host=1e11", "v100-32gb: a figure without a table: got an unknown name, expected one of count"),
        ("host", "such as bytes.host=1.28e11: host: got '', expected a number in the unit of its table"),
    ],
)
def test_a_figure_that_is_not_there_is_an_error_that_says_what_is(
    figure: str, error: str, capsys: Out
) -> None:
    assert main(["plan", *TINY, "--with", figure]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"zfunc plan: error: --hardware, --with: got v100-32gb {figure}, expected ")
    assert error in lines[0]
    assert main(["draw", "--with", "bytes.host=1e11"]) == 2
    assert "--with: got it without --hardware" in capsys.readouterr().err


def test_a_figure_of_the_profile_is_replaced(capsys: Out) -> None:
    small = ["--with", "bytes.host=1e6", "--with", "reached.host_bytes=1"]
    assert answer(capsys)[1]["lacking"] == {}
    code, result = answer(capsys, *small)
    assert code == 1
    assert result["lacking"] == {"host": result["memory"]["host"] + result["memory"]["pinned"] - 10**6}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--schedule", "auto", "--hidden-size", "256"], "found by search:"),
        (["--defer"], "updates deferred"),
        (["--state-on", "device:0.5,host"], "50% of the state on the host"),
        (["--world", "4", "--hardware", "h100"], "on 4 ranks"),
        (["--world", "2", "--micro-batches", "2"], "2 micro-batches"),
        (["--hardware", "gh200", "--precision", "fp32"], "GH200"),
        (["--clip", "0", "--moments", "8bit", "--schedule", "Serial"], "Serial, "),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
@pytest.mark.usefixtures("without_advice")
def test_what_is_asked_for_is_planned_and_told(args: list[str], words: str, capsys: Out) -> None:
    code, result = text_of(capsys, *args)
    assert code == 0
    assert words in " ".join(result.split())


@pytest.mark.parametrize(
    ("args", "room_for"),
    [
        ("", {"host": 12e6}),
        (
            "--params-on auto --activations-on host --recompute all,min-cut --optimizer muon",
            {"device": 2e6, "host": 12e6},
        ),
    ],
    ids=["on the device", "anywhere"],
)
@pytest.mark.usefixtures("without_advice")
def test_the_most_layers_fit_and_one_more_does_not(
    args: str, room_for: dict[str, float], capsys: Out, tmp_path: Path
) -> None:
    given = [*args.split(), "--hardware", with_room(tmp_path / "small.toml", **room_for)]
    code, result = answer(capsys, *given, "--max")
    assert code == 0
    assert result["fits"]
    most = result["num_layers"]
    assert most > 2
    assert answer(capsys, *given, "--num-layers", most + 1)[0] == 1
    if args:
        assert result["settings"]["params_on"] == "host", "on the device fewer fit"
    else:
        words = text_of(capsys, *given, "--max")[1]
        assert f"the most that fits with these settings: {most} layers" in words


@pytest.mark.usefixtures("without_advice")
def test_where_not_even_one_layer_fits_that_is_the_answer(capsys: Out, tmp_path: Path) -> None:
    code, result = answer(
        capsys, *WIDER, "--hardware", with_room(tmp_path / "none.toml", device=1e6, host=1e6), "--max"
    )
    assert (code, result["fits"], result["num_layers"]) == (1, False, 1)


def test_a_family_without_end_has_one(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.cli.commands.plan.MOST_LAYERS", 3)
    assert answer(capsys, "--max")[1]["limit"] == "3 layers, beyond which none are tried"


@pytest.mark.parametrize("schedule", ["Interleaved", "CriticalPath"])
def test_what_was_found_can_be_typed_wherever_a_line_ends(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plan_model(PlanSettings(num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=100))
    step = model.planned.step
    best = attrs.evolve(step.settings, schedule=schedule, state_on="device", defer=True)
    spec = attrs.evolve(step.spec, settings=best)
    planned = attrs.evolve(model.planned, step=attrs.evolve(step, spec=spec))
    searched = attrs.evolve(model, settings=attrs.evolve(model.settings, schedule="auto"), planned=planned)
    parser = make_parser(COMMANDS)[1]["train"]
    for width in range(40, 130):
        monkeypatch.setattr("zfunc.planner.planned.WIDTH", width)
        paragraph = next(x for x in plan_text(searched).split("\n\n") if x.startswith("as options of"))
        lead, _, options = paragraph.partition(":")
        typed = parser.parse_args(options.split())
        assert (typed.schedule, typed.slots, typed.state_on) == (schedule, 2, "device")
        assert (typed.defer, typed.bucket_size) == (True, 50_000_000)
        assert ("which orders for round numbers" in " ".join(lead.split())) == (schedule == "CriticalPath")


# --- the same model and step everywhere ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PlanSettings, DrawSettings, CalibrateSettings])
def test_without_options_the_model_and_the_step_are_those_of_zfunc_train(kind: Any) -> None:
    """What is chosen for a GPU is that of a GPU; the vocabulary follows from the data, as below."""
    groups, theirs = ("model", "step", "offload", "buffers", "how it runs"), options_of(TrainSettings)
    same = {name for name in attrs.fields_dict(kind) if name in theirs and theirs[name].group in groups}
    assert {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "batch_size", "clip"} <= same
    for name in same - {"precision"}:
        assert getattr(kind(), name) == getattr(TrainSettings(), name), name


PRESETS = {  # profile, layers, hidden size, ranks
    "10 B, one V100": ("v100-32gb", 50, 4096, 1),
    "10 B, 1,024 H100": ("h100", 50, 4096, 1024),
    "0.1 B, one 4090": ("rtx4090", 12, 768, 1),
}


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (not n)) for n, x in enumerate(PRESETS)]
)
def test_the_command_and_the_function_answer_alike(name: str) -> None:
    """Whose optimizers differ in what decays: `zfunc.AdamW()` has one group, that of the command two."""
    hardware, layers, hidden, world = PRESETS[name]
    settings = PlanSettings(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        seq_length=1024,
        vocab_size=50257,
        batch_size=2 * world,
        hardware=hardware,
        world=world,
    )
    told, tokens = plan_model(settings).planned, torch.empty((2, 1024), dtype=torch.int64, device="meta")
    segments = gpt_segments(gpt_config(settings))
    mine = zfunc.plan(segments, (tokens, tokens), hardware=hardware, world=world, clip_norm=1.0, advice=False)
    assert mine.step_seconds == pytest.approx(told.step_seconds, rel=1e-4)
    assert mine.memory == told.memory
    assert mine.bus_bytes == told.bus_bytes


def test_buckets_follow_the_number_of_ranks() -> None:
    """A collective of many takes long to start: the size that nobody sets is then nearly as fast as the best."""
    config, fixed = GPTConfig(50_257, 1024, 50, 4096, 32), StepSettings(bucket_size=50_000_000)
    for world in (1, 8, 16):
        parameters = gpt_parameters(config)
        assert lay_out(parameters, StepSettings(), world) == lay_out(parameters, fixed, world)
    model = CostModel(gpt_costs(config, 8, zfunc.AdamW(), 1024), load_profile("h100"))
    default, few, *others = (
        plan_settings(
            model, attrs.evolve(fixed, precision="bf16", bucket_size=n), advice=False
        ).tokens_per_second
        for n in (None, 50_000_000, 200_000_000, 800_000_000)
    )
    assert default > 1.3 * few
    assert default > 0.98 * max(others)


@pytest.mark.parametrize(
    ("data", "more"),
    [
        ("texts", {}),
        ("records.jsonl", {}),
        ("texts", {"tokenizer": Path("tokenizer.json")}),
        ("records.jsonl", {"tokenizer": Path("tokenizer.json"), "vocab_size": 64}),
        ("tokens.bin", {}),
        ("tokens.bin", {"vocab_size": 70_000}),
    ],
    ids=str,
)
def test_the_same_flags_mean_the_same_model(data: str, more: dict[str, Any]) -> None:
    save_tokenizer(Path("tokenizer.json"), ["<unk>", "<|endoftext|>", "so", "it", "goes"])
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("so it goes " * 500)
    Path("records.jsonl").write_text('{"text": "so it goes so it goes"}\n' * 300)
    Path("tokens.bin").write_bytes(bytes(4000))
    flags: dict[str, Any] = {**more, "data": Path(data)}
    trained = prepare_job(TrainSettings(**flags, device="cpu"), cache=Path("cache")).program.segments
    for settings in (PlanSettings(**flags), DrawSettings(**flags)):
        assert [s.parameters for s in gpt_segments(gpt_config(settings))] == [s.parameters for s in trained]


# --- zfunc calibrate and zfunc train -------------------------------------------------------------------------


def test_train_refuses_what_does_not_fit_with_the_planners_advice(
    capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_host_bytes", lambda: 3_000_000)
    monkeypatch.setattr(
        "zfunc.engine.state.state.allocate", lambda *_: pytest.fail("allocated"), raising=False
    )
    assert train(*TINY[:8], "--steps", 1, "--out", "run") == 2
    err = capsys.readouterr().err
    assert "a step needs more memory than is free: " in err
    assert "nothing was allocated" in err
    assert re.search(r"--[a-z-]+ \S+( --[a-z-]+ \S+)* would fit", err)
    assert "--slots" not in err, "zfunc train has no such option"
    assert err.count("\n") <= 12
    assert not Path("run").exists()


def test_asking_for_room_takes_no_time_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[float] = []
    ask = room.check_fits

    def timed(*args: Any, **given: Any) -> None:
        began = time.process_time()
        ask(*args, **given)
        took.append(time.process_time() - began)

    monkeypatch.setattr("zfunc.train.setup.check_fits", timed)
    prepare_job(TrainSettings(data=Path("data.txt")), cache=Path("cache"))
    assert took
    assert took[0] < 0.5
