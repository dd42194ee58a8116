"""`zfunc plan --hf-config`, `draw` and `calibrate`: a Hugging Face model, from its config alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import zfunc
import zfunc.models.hf
from zfunc.cli.commands.calibrate import CalibrateSettings, measure_machine
from zfunc.cli.commands.plan import PlanSettings
from zfunc.cli.main import main
from zfunc.cli.simulated_model import simulated_model
from zfunc.core.hardware import ROUND
from zfunc.core.settings import StepSettings
from zfunc.engine.compile import compile
from zfunc.planner.kept_costs import kept
from zfunc.planner.plan_step import most_that_fit
from zfunc.planner.traced_costs import traced_costs
from zfunc.train.settings import step_settings

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_folder")

LLAMA_3_8B: dict[str, Any] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5},
}
TINY = LLAMA_3_8B | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
SHORT = ["--seq-length", "16", "--batch-size", "4"]
Out = pytest.CaptureFixture[str]


def write(name: str, content: dict[str, Any]) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_backward_of_a_block_does_not_hold_what_its_norms_cast_to_fp32() -> None:
    """At its peak five of the MLP's tensors of 28 KiB a token, and of 4,096 elements what 16 bits hold."""
    _, (embed, block, _, loss) = zfunc.hf.describe(
        write("config.json", LLAMA_3_8B | {"num_hidden_layers": 2})
    )
    x = torch.empty(1, 8192, dtype=torch.int64, device="meta")
    costs = (
        traced_costs((embed, block, loss), (x, x), zfunc.AdamW()).traced(StepSettings(), on_gpu=True).costs
    )
    assert costs[1].backward.workspace < 155 * 1024 * x.numel()


@pytest.mark.usefixtures("without_advice")
def test_llama_3_8b_on_a_4090_is_answered_from_its_config(capsys: Out) -> None:
    write("config.json", LLAMA_3_8B)
    given = "plan --hf-config config.json --hardware rtx4090 --seq-length 2048 --batch-size 1"
    before = anonymous()
    assert main(given.split()) == 1
    out = capsys.readouterr().out
    said = "LlamaForCausalLM of 32 layers x 4,096: 8,030,261,248 parameters; a step of 1 x 2,048 tokens"
    assert said in out
    assert "or train adapters alone (--lora 16)" in out
    assert re.search(r"it does not fit: [0-9.]+ GiB of host memory short", out)
    assert anonymous() - before < 400 << 20, "of 16 GB"


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


def test_a_planned_step_prints_short_and_reads_as_the_report() -> None:
    _, segments = zfunc.hf.describe(write("config.json", TINY))
    tokens = torch.empty(4, 16, dtype=torch.int64, device="meta")
    planned = zfunc.plan(segments, (tokens, tokens), hardware="h100", advice=False)
    assert re.fullmatch(
        r"Planned\(fits on H100 .*; a step takes .*, [0-9,]+ tokens/s; bound by .*\)", repr(planned)
    )
    assert len(repr(planned)) < 300
    assert str(planned).startswith("hardware   H100")
    assert "it fits" in str(planned)
    assert "it fits" in planned.html()


def test_a_folder_needs_no_weights_and_trains_from_drawn_values() -> None:
    write("model/config.json", TINY)
    (config, segments), (_, same) = zfunc.hf.describe("model"), zfunc.hf.describe(Path("model/config.json"))
    assert [s.parameters for s in segments] == [s.parameters for s in same]
    x = torch.randint(0, config.vocab_size, (4, 9))
    program = compile(segments, precision="fp32", device="cpu")
    _, metrics = zfunc.train_step(program, zfunc.init(program), (x[:, :-1], x[:, 1:]))
    assert 3 < metrics.loss < 5


@pytest.mark.slow
@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize("which", ["batch", "length"])
def test_the_largest_batch_and_length_fit_and_one_more_does_not(which: str) -> None:
    """With adapters, and as a page."""
    config = write("config.json", TINY | {"vocab_size": 5000})
    given = ["--hf-config", str(config), "--lora", "4", "--lora-targets", "q_proj", "--hardware", "rtx4090"]
    given += ["--with", "bytes.device=1.1e9", "--seq-length", "256", "--batch-size", "24"]
    assert main(["plan", *given, "--max", which, "--out", "plan.html"]) == 0
    page = Path("plan.html").read_text()
    assert "<svg" in page
    assert "164,176 parameters, 256 of them trained; a step of" in page
    assert "it fits" in page
    rows, tokens = (
        int(x.replace(",", "")) for x in re.findall(r"a step of ([0-9,]+) x ([0-9,]+) tokens", page)[0]
    )
    assert (rows > 24, tokens) == (True, 256) if which == "batch" else (rows, tokens % 128) == (24, 0)
    rows, tokens = (rows + 1, tokens) if which == "batch" else (rows, tokens + 128)
    settings = PlanSettings(hf_config=config, lora=4, lora_targets="q_proj", with_=("bytes.device=1.1e9",))
    machine = evolve(settings, hardware="rtx4090").profile
    assert machine is not None
    costs = simulated_model(settings).cost_model(machine, rows, tokens)
    assert not costs.step(step_settings(settings, precision="bf16", schedule="Overlapped")).fits


@pytest.mark.usefixtures("without_advice")
def test_a_length_says_what_bounds_it_and_goes_on_where_asked(
    capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write("config.json", TINY | {"max_position_embeddings": 256, "vocab_size": 5000})
    given = ["plan", "--hf-config", str(config), "--hardware", "rtx4090", "--with", "bytes.device=7.2e8"]
    given += ["--batch-size", "2"]
    assert main([*given, "--max", "length"]) == 0
    out = capsys.readouterr().out
    assert (
        "256 tokens, bounded by the positions of its config (max_position_embeddings) and not by memory"
        in out
    )
    scaled = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}  # for any length
    write("config.json", TINY | {"max_position_embeddings": 256, "vocab_size": 5000} | scaled)
    assert main([*given, "--max", "length", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seq_length"] > 512
    assert answer["seq_length"] % 128 == 0
    assert answer["limit"] == ""
    monkeypatch.setattr("zfunc.cli.commands.plan.MOST_TOKENS", 1 << 20)
    assert main(["plan", "--max", "length", "--hidden-size", "16", "--num-layers", "1", "--json"]) == 0
    assert "tokens, beyond which none are tried" in json.loads(capsys.readouterr().out)["limit"]


def test_layers_that_are_alike_are_cut_once_each_with_its_own_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    made: list[str] = []
    cut = zfunc.models.hf.cutting.segment
    monkeypatch.setattr(
        "zfunc.models.hf.cutting.segment", lambda name, part: made.append(name) or cut(name, part)
    )
    config = write("config.json", TINY | {"num_hidden_layers": 6})
    model = AutoModelForCausalLM.from_config(zfunc.models.hf.loading.read_config(config))
    for n, layer in enumerate(model.model.layers):
        layer.mlp.register_buffer("shift", torch.tensor(float(n)))
    layers = zfunc.hf.segments(model)[1:-1]
    assert made == ["model.embed_tokens", "model.layers.0", "lm_head"]
    named = dict(model.named_parameters())
    for n, s in enumerate(layers):
        assert s.name == f"model.layers.{n}"
        assert len(s.parameters) == 9
        for full, value in s.initial(0).items():
            assert full.startswith(f"model.layers.{n}.")
            assert torch.equal(value, named[full])
        assert [float(t) for k, t in s.constants.items() if k.endswith("mlp.shift")] == [n]
    model.model.layers[3].input_layernorm.variance_epsilon = 0.5
    zfunc.hf.segments(model)
    assert made[3:] == ["model.embed_tokens", "model.layers.0", "model.layers.3", "lm_head"]


QUANTIZED: tuple[dict[str, Any], ...] = (
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
)


@pytest.mark.usefixtures("without_advice")
def test_quantized_weights_are_planned_as_they_are_trained(capsys: Out) -> None:
    """All of one model have equal segments; so one of them has the answer of all."""
    files = [
        write(f"{n}.json", TINY | more)
        for n, more in enumerate(({}, *({"quantization_config": x} for x in QUANTIZED)))
    ]
    plain, *others = (
        [(s.parameters, s.constants.keys(), [*map(type, s.module.modules())]) for s in segments]
        for _, segments in map(zfunc.hf.describe, files)
    )
    assert all(x == plain for x in others)
    assert [main(["plan", "--hf-config", str(x), "--hardware", "h100", *SHORT]) for x in files[:2]] == [0, 0]
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert "it fits" in out


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of the first model are those of all: for tests of whether a model is read, not of what it costs."""
    found: list[Any] = []

    def priced(*given: Any) -> Any:
        costs = traced_costs(*given)

        def trace(*asked: Any) -> Any:
            if not found:
                found.append(costs.trace(*asked))
            return found[0]

        return evolve(costs, trace=trace)

    monkeypatch.setattr("zfunc.planner.traced_costs.traced_costs", priced)


@pytest.mark.usefixtures("without_advice", "traced_once")
def test_a_second_plan_needs_no_model_and_says_the_same(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_CACHE", "on")
    write("model/config.json", TINY | {"tie_word_embeddings": True})
    given = ["plan", "--hf", "model", *SHORT, "--hardware", "h100", "--lora", "4"]
    opened: list[Any] = []
    read = zfunc.train.pretrained.pretrained_model
    monkeypatch.setattr(
        "zfunc.train.pretrained.pretrained_model", lambda x, **more: opened.append(x) or read(x, **more)
    )

    def answer(*more: str) -> tuple[str, int]:
        assert main([*given, *more]) == 0
        now = len(opened)
        opened.clear()
        return capsys.readouterr().out, now

    first, asked = answer()
    assert asked == 1
    assert answer() == (first, 0)
    assert answer("--moments", "8bit", "--world", "1")[1] == 0
    assert answer("--seq-length", "32")[1] == answer("--lora", "2")[1] == 1
    write("model/config.json", TINY | {"tie_word_embeddings": True, "rope_theta": 1.0})
    assert answer()[1] == 1
    assert main([*given, "--seq-length", "4096"]) == 2
    assert "at most the 1024 positions" in capsys.readouterr().err
    monkeypatch.setenv("ZFUNC_CACHE", "off")
    assert answer()[1] == 1


@pytest.mark.usefixtures("without_advice", "traced_once")
def test_what_takes_long_is_told_on_a_terminal(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    write("config.json", TINY)
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda x=terminal: x)
        assert main(["plan", "--hf-config", "config.json", *SHORT, "--hardware", "h100", "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == "tracing the model once: its costs are kept for the next plan\n" * terminal
        assert json.loads(out)["num_layers"] == 2


def test_what_is_no_kept_answer_is_answered_anew_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFUNC_CACHE", "on")
    monkeypatch.setattr("zfunc.planner.kept_costs.MOST", 3)
    answered: list[int] = []

    def ask(question: int) -> int:
        def answer() -> int:
            answered.append(question)
            return question * 111

        return kept([question], answer, int)

    def hold() -> list[int]:
        """How often three questions are answered, whose answers are right."""
        answered.clear()
        assert [ask(1), ask(2), ask(3)] == [111, 222, 333]
        return answered[:]

    assert (hold(), hold()) == ([1, 2, 3], [])
    folder = Path("cache/zfunc/costs")
    files = sorted(folder.iterdir(), key=lambda x: x.stat().st_mtime_ns)
    good = files[1].read_bytes()
    assert [x.stat().st_mode & 0o777 for x in files] == [0o600] * 3
    bad = [good[:n] for n in (0, 10, 70, len(good) - 1)] + [
        files[0].read_bytes(),
        good + b" ",
        b"\0" * 5_000_000,
    ]
    bad += [good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in range(0, len(good), 7)]
    bad += [good.replace(b"222", b"223"), good.replace(b"222", b'"222"'), b"[" * 100_000]
    for content in bad:
        files[1].write_bytes(content)
        assert hold() == [2], content[:200]
        assert files[1].read_bytes() == good
    files[1].unlink()
    files[1].symlink_to(files[0].name)
    assert (hold(), hold()) == ([2], [])
    for question in range(4, 9):
        ask(question)
    assert len([*folder.iterdir()]) == 3
    folder.chmod(0o500)
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", "file")
    assert hold() == [1, 2, 3]


@pytest.mark.parametrize("capacity", [0, 5, 99, 1000, 4000, 10**6])
def test_few_steps_are_planned_to_find_the_most(capacity: int) -> None:
    """Of memory that grows faster than the count."""

    class Step:
        def __init__(self, count: int) -> None:
            asked.append(count)
            self.hardware = evolve(ROUND, memory={"device": max(1, capacity)})
            self.memory = {"device": 2 * count + count * count // 50}
            self.fits = not self.hardware.lacking(self.memory)  # type: ignore

        def without_operations(self) -> "Step":
            return self

    asked: list[int] = []
    most = most_that_fit(Step, 300)  # type: ignore
    fitting = [n for n in range(1, 301) if 2 * n + n * n // 50 <= max(1, capacity)]
    assert most == max(fitting, default=0)
    assert len(asked) == len(set(asked)) <= 15


def test_draw_and_calibrate_take_the_config(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    write("model/config.json", TINY)
    assert main(["draw", "--hf", "model", *SHORT]) == 0
    assert "one step of a LlamaForCausalLM of 2 layers x 16: 5,520 parameters" in capsys.readouterr().out
    measured: list[Any] = []
    monkeypatch.setattr("zfunc.planner.calibrate.calibrate", lambda *given, **_: measured.append(given))
    measure_machine(CalibrateSettings(hf_config=Path("model/config.json"), seq_length=16, device="cpu"))
    ((program, (tokens, _)),) = measured
    assert program.segments[0].name == "model.embed_tokens"
    assert (tokens.shape, bool((tokens < 50).all())) == ((8, 16), True)


REFUSED = {
    "plan --hf-config nowhere.json": r"--hf-config: nowhere\.json: got no such file, expected the config\.json",
    "plan --hf nowhere": r"--hf: nowhere: got no config\.json in it",
    "plan --hf-config words.json": "--hf-config: words.json: got what transformers does not read as a config",
    "plan --hf-config none.json": "Should have a `model_type` key",
    "plan --hf-config unknown.json": "model type `nope` but Transformers does not recognize",
    "plan --hf-config wrong.json": "Validation error for field 'hidden_size'",
    "draw --hf-config bert.json": "got a BertLMHeadModel, which is not supported",
    "plan --hf-config good.json --hf model": "--hf-config: got it with --hf, expected one of them",
    "plan --hf-config good.json --num-layers 3": "--num-layers: got it with --hf-config, whose config sets it",
    "plan --hf-config good.json --vocab-size 7": "--vocab-size: got 7 for good.json, expected its 50",
    "plan --hf-config good.json --seq-length 4096": "--seq-length: got 4096 .*at most the 1024 positions",
    "plan --hf-config good.json --max": "--max: got layers with a Hugging Face model.*pass --max batch",
    "plan --hf-config good.json --max rows": r"--max: got 'rows', expected one of layers, batch, length",
    "plan --lora 4": "--lora: got it without --hf",
    "plan --out plan.pdf": r"--out: got plan\.pdf, expected a name that ends in \.html or \.txt",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_no_config_is_refused_by_its_flag(command: str, capsys: Out) -> None:
    Path("words.json").write_text("{words")
    write("none.json", {"hidden_size": 4})
    write("unknown.json", {"model_type": "nope"})
    write("wrong.json", TINY | {"hidden_size": "wide"})
    write("bert.json", {"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    write("good.json", TINY)
    write(
        "gpt2.json",
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50} | NO_ENDS,
    )
    assert main(command.split()) == 2
    assert re.search(REFUSED[command], " ".join(capsys.readouterr().err.split()))
