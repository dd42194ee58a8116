"""Laws of LoRA by peft: training equals a plain loop over peft's model, and what is written has its logits."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hf_models import CONFIGS, tokens, transformers
from plain import rows_of
from safetensors.torch import load_file
from small_trainings import measured
from text_data import save_tokenizer, write_jsonl
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn

import zfunc
import zfunc.models.hf
from zfunc.cli.main import main
from zfunc.core.regions import Regions
from zfunc.engine.program.specialize import specialize
from zfunc.models.hf.adapters import adapt, adapted_modules, lora_config
from zfunc.models.quantization import FORMATS, decode
from zfunc.train.pretrained import pretrained_model
from zfunc.train.run_history import read_history
from zfunc.train.settings import TrainSettings

peft = pytest.importorskip("peft")
pytestmark = [  # what peft calls, and what it notices
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning"),
]

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the model, and what is set of peft's configuration
    "as peft has it": ("Llama", {}),
    "GPT-2's transposed layers, untied": ("GPT-2 untied", {}),
    "head, embedding and biases": (
        "Llama",
        {"bias": "all", "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ),
    "all linear layers, scaled by rank": ("Llama", {"target_modules": "all-linear", "use_rslora": True}),
    "a whole head beside": ("Llama", {"modules_to_save": ["lm_head"]}),
    "DoRA": ("Llama", {"use_dora": True}),
    "a tied embedding": ("Llama tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "a tied head and its embedding": ("Llama tied", {"target_modules": ["lm_head", "embed_tokens"]}),
    "a whole tied head": ("Llama tied", {"modules_to_save": ["lm_head"]}),
    "a whole tied embedding": ("Llama tied", {"modules_to_save": ["embed_tokens"]}),
    "a norm beside": ("Llama tied", {"modules_to_save": ["norm"]}),
    "tensors of experts": ("Qwen3 MoE", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of transposed tensors, and their router": (
        "GPT-OSS",
        {"target_parameters": [*EXPERTS, "router.weight"], "use_rslora": True},
    ),
    "experts by their names of before, at twice the rank": (
        "Mixtral",
        {"target_modules": ["w1", "w2", "w3"]},
    ),
    "weights of linear layers as tensors": (
        "Llama",
        {"target_modules": ["q_proj"], "target_parameters": ["up_proj.weight"]},
    ),
}
BY_DAY = {
    "as peft has it",
    "GPT-2's transposed layers, untied",
    "a whole tied head",
    "tensors of experts",
}
every_case = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in BY_DAY)) for x in CASES]
)


def base(kind: str = "Llama") -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())


def adapted(name: str) -> tuple[Any, Any]:
    """peft's model of random adapters, and its configuration."""
    kind, given = CASES[name]
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **given)
    model = peft.get_peft_model(base(kind), config)
    with torch.no_grad():
        for full, p in model.named_parameters():
            if p.requires_grad and "magnitude" not in full:
                p.add_(torch.randn_like(p) * 0.05)
    return model, config


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


def reference_loss(model: Any, x: Tensor) -> Tensor:
    """The loss of the model itself: its routers see the tokens that have a label."""
    labels = x[:, 1:].contiguous()
    return model(input_ids=x[:, :-1], labels=labels, shift_labels=labels).loss


SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.1}


@every_case
def test_training_equals_a_plain_loop_and_both_folders_have_its_logits(name: str, tmp_path: Path) -> None:
    model, lora = adapted(name)
    before = {full: p.detach().clone() for full, p in model.named_parameters()}
    reference = copy.deepcopy(model)
    trained = [p for p in reference.parameters() if p.requires_grad]
    plain = torch.optim.AdamW(trained, **SETTINGS)
    segments = zfunc.hf.segments(model)
    given = {"precision": "fp32", "device": "cpu", "bucket_size": 5000, "params_on": "host", "clip_norm": 0.5}
    program = zfunc.compile(segments, optimizer=zfunc.AdamW(**SETTINGS), **given)
    state = zfunc.init(program)
    for n in range(3):
        x = tokens(4, n)
        loss = reference_loss(reference, x)
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        plain.step()
        state, metrics = zfunc.train_step(program, state, (x[:, :-1], x[:, 1:]))
        assert abs(metrics.loss - float(loss.detach())) < 1e-5
    values = zfunc.params(program, state)
    assert values.keys() == before.keys()
    for full, p in reference.named_parameters():
        assert float((values[full] - p.detach()).abs().max()) < 1e-5, full
        assert torch.equal(values[full], before[full]) != p.requires_grad, full

    kind, expected = CASES[name][0], logits(reference)
    base(kind).save_pretrained(tmp_path / "m")
    checkpoint, config = zfunc.save(tmp_path / "run", program, state), tmp_path / "m"
    for adapter_only in (True, False):
        out = tmp_path / f"out {adapter_only}"
        file = out / "model.safetensors"
        given = {"config": config, "lora": lora, "adapter_only": adapter_only}
        if adapter_only == (name == "as peft has it"):
            zfunc.hf.export(checkpoint, out, **given)
        else:
            zfunc.hf.save(out, program, state, **given)
        if adapter_only:
            assert sorted(x.name for x in out.iterdir()) == [
                "adapter_config.json",
                "adapter_model.safetensors",
            ]
            loaded = peft.PeftModel.from_pretrained(base(kind), out)
            own = dict(loaded.named_parameters())
            assert all(torch.equal(own[x], t) for x, t in values.items() if "lora_" in x)
        else:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
            handed, stored = dict(zfunc.hf.weights(program, state, config=config, lora=lora)), load_file(file)
            assert handed.keys() == stored.keys()
            assert all(torch.equal(handed[full], x) for full, x in stored.items())
        assert torch.allclose(logits(loaded), expected, atol=1e-5)
    assert torch.allclose(logits(reference), expected, atol=0), "the state is not changed by merging"


def quantized(model: Any, kind: str) -> tuple[Any, Any]:
    """The segments of a model of peft whose frozen matrices and stacks of them are in `kind`, and the model with
    the weights that they decode to."""
    segments, reference = zfunc.hf.segments(model), copy.deepcopy(model)
    most = 2 if kind == "int8" else 3
    frozen = [p.name for s in segments[1:-1] for p in s.parameters if not p.trainable]
    names = [x for x in frozen if 2 <= reference.get_parameter(x).dim() <= most]
    assert any("experts" in x for x in names) == (kind == "nf4")
    for x in names:
        p = reference.get_parameter(x)
        p.data = decode(FORMATS[kind].encode(p), kind, tuple(p.shape))
    return zfunc.quantized(segments, kind, names), reference


PIPELINE = {"devices": 2, "order": "OneFOneB", "micro_batches": 2}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {  # the format of the base, and settings
    "streamed": ("", {"params_on": "host", "activations_on": "host"}),
    "by groups": ("", {"params_on": "host", "precision": "bf16"}),  # of which alone there are products
    "NF4, streamed": ("nf4", {"params_on": "host"}),
    "int8 beside experts": ("int8", {}),
    "two devices": ("", PIPELINE),
    "NF4 on two devices": ("nf4", {**PIPELINE, "params_on": "host"}),
    "two ranks": ("", {"stage": 3, "params_on": "host"}),
    "NF4 on two ranks": ("nf4", {"stage": 3, "params_on": "host"}),
    "two ranks of a pipeline": ("nf4", {"pp": 2, "order": "OneFOneB", "micro_batches": 2}),
}
WAYS_BY_DAY = {"by groups", "NF4, streamed"}
every_way = pytest.mark.parametrize(
    "way", [pytest.param(x, marks=[pytest.mark.slow] * (x not in WAYS_BY_DAY)) for x in WAYS]
)


@every_way
def test_adapters_of_experts_have_the_gradients_of_peft_wherever_the_model_is(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD of rate 1: what a step subtracts is the gradient."""
    kind, settings = WAYS[way]
    asked = set[torch.dtype]()
    if way == "by groups":
        groups = lambda _, dtype: asked.add(dtype) or dtype == torch.bfloat16  # noqa: E731
        monkeypatch.setattr("zfunc.models.hf.experts.multiplies_groups", groups)
        monkeypatch.setattr("shared_traces.SHARED", ())  # by what another test has traced, nobody would ask
    model, _ = adapted("tensors of experts")
    model.config.output_router_logits = False  # whose loss is of a micro-batch
    segments, reference = quantized(model, kind) if kind else (zfunc.hf.segments(model), copy.deepcopy(model))
    given = {"precision": "fp32", "device": "cpu", "optimizer": zfunc.SGD(lr=1.0), **settings}
    world, pp = 2 if "stage" in settings else 1, settings.get("pp", 1)
    programs = programs_of(world, lambda: zfunc.compile(segments, **given), pp=pp)
    states = on_every(programs, zfunc.init)
    for n in range(2):
        x = tokens(4, n)
        each = [rows_of((x[:, :-1], x[:, 1:]), r % world, world) for r in range(world * pp)]
        if not n:
            for program, batch in zip(programs, each, strict=True):
                specialize(program, batch)
        reference.zero_grad()
        expected = reference_loss(reference, x)
        expected.backward()
        done = on_every(programs, zfunc.train_step, states, each)
        states = [state for state, _ in done]
        losses = [metrics.loss for _, metrics in done]
        off = 1e-6 if given["precision"] == "fp32" else 2e-2
        assert losses == pytest.approx([float(expected.detach())] * len(losses), abs=off)
        values = on_every(programs, zfunc.params, states)[0]
        for full, p in reference.named_parameters():
            if p.requires_grad:
                p.data.sub_(p.grad)
                largest = float(p.grad.abs().max())
                assert largest
                assert float((values[full] - p.data).abs().max()) <= 3 * off * largest + off / 10, full
    assert (torch.bfloat16 in asked) == (way == "by groups")


def test_frozen_parameters_take_2_bytes_each_and_no_operation_but_a_fetch() -> None:
    model, _ = adapted("as peft has it")
    program = zfunc.compile(
        zfunc.hf.segments(model), precision="bf16", device="cpu", bucket_size=5000, params_on="host"
    )
    layout = program.layout
    frozen = {b.index for b in layout.frozen_buckets}
    assert sum(span.stop - span.start for span in layout.spans) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    held = [r for r in Regions(program.spec).state() if r.buffer == "frozen"]
    assert sum(r.nbytes for r in held) == 2 * layout.frozen_buckets[-1].stop
    assert {r.tier for r in held} == {"pinned"}
    touching = {op.verb for op in program.plan.graph for r in (*op.reads, *op.writes) if r.buffer == "frozen"}
    assert touching == {"fetch"}
    delivered = {op.index[1] for op in program.plan.graph if op.verb == "pack"}
    assert delivered == {b.index for b in layout.buckets}
    assert not delivered & frozen
    assert len({id(call.passes) for call in program.calls}) == 4, "layers with adapters share one trace"


def test_a_folder_gets_adapters_as_peft_draws_them(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "m")
    _, segments = zfunc.hf.load(
        tmp_path / "m", lora=lora_config(4, targets="q_proj,v_proj,embed_tokens,lm_head")
    )
    program = zfunc.compile(segments, precision="bf16", device="cpu", params_on="host")
    state = zfunc.init(program)
    first, again = (zfunc.params(program, x) for x in (state, zfunc.init(program)))
    assert all(torch.equal(t, again[x]) for x, t in first.items())
    drawn = [t for x, t in first.items() if "lora_A" in x]
    assert len(drawn) == 7
    assert all(0.5 < float(t.abs().max()) * 32**0.5 <= 1 for t in drawn), "uniform in 1 / sqrt(inputs)"
    assert not torch.equal(drawn[0], drawn[2])
    assert all(not t.any() for x, t in first.items() if "lora_B" in x)
    x = tokens()
    own = float(base()(input_ids=x, labels=x).loss.detach())
    assert abs(zfunc.evaluate(program, state, (x[:, :-1], x[:, 1:])) - own) < 1e-2


def test_modules_that_get_adapters_by_default() -> None:
    both, phi = "q_proj v_proj", "gate_up_proj qkv_proj"
    found = {"Llama": both, "OLMo 2": both, "Mixtral": both, "Phi-3": phi, "GPT-2": "c_attn"}
    for kind, modules in found.items():
        with torch.device("meta"):
            assert adapted_modules(adapt(base(kind), lora_config(4))) == modules.split()
    with torch.device("meta"):
        experts = adapt(base("Mixtral"), lora_config(4, parameters=",".join(EXPERTS)))
    assert adapted_modules(experts) == sorted(EXPERTS)


def said_quantized() -> Any:
    with torch.device("meta"):
        model = base()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return model


def packed() -> Any:
    """As bitsandbytes packs 4-bit weights, whatever the config says."""
    model = base()
    weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight = weight
    return model


def two_adapters() -> Any:
    model, config = adapted("as peft has it")
    model.add_adapter("other", config)
    return model


def merged(case: str = "as peft has it") -> Any:
    model, _ = adapted(case)
    model.merge_adapter()
    return model


def drawn_from_weights() -> object:
    _, segments = zfunc.hf.describe(CONFIGS["Llama"](), lora=peft.LoraConfig(r=4, use_dora=True))
    return [x.initial(0) for x in segments]


def described(kind: str, **given: Any) -> Any:
    return zfunc.hf.describe(CONFIGS[kind](), lora=lora_config(4, **given))


REFUSED: dict[str, Callable[[], Any]] = {
    r"quantized weights \(bitsandbytes, load_in_4bit\): load it without.*quantize='nf4'": lambda: (
        zfunc.hf.segments(said_quantized())
    ),
    r"of torch\.uint8, expected floating point": lambda: zfunc.hf.segments(packed()),
    "got the adapters default, other, expected one": lambda: zfunc.hf.segments(two_adapters()),
    "with ensure_weight_tying, expected each module": lambda: zfunc.hf.segments(
        peft.get_peft_model(
            base("Llama tied"), peft.LoraConfig(modules_to_save=["lm_head"], ensure_weight_tying=True)
        )
    ),
    "with merged or disabled adapters": lambda: zfunc.hf.segments(merged()),
    "with merged or disabled adapters, which": lambda: zfunc.segments(
        merged("tensors of experts"), {"input_ids": tokens(), "labels": tokens()}
    ),
    "got adapters of peft with IA3, expected LoRA alone": lambda: zfunc.hf.segments(
        peft.get_peft_model(base(), peft.IA3Config(task_type="CAUSAL_LM"))
    ),
    "got use_dora for a model without weights yet.*get_peft_model": drawn_from_weights,
    r"lora\.target_modules: got .*nope.*such as down_proj, gate_proj": lambda: (
        base().save_pretrained("m"),
        zfunc.hf.load("m", lora=lora_config(4, targets="nope")),
    ),
    r"'experts\.up' is no parameter, expected ends.*3 dimensions, such as experts\.down_proj, experts\.gate": (
        lambda: described("Mixtral", parameters="experts.down_proj,experts.up")
    ),
    r"lora\.target_parameters: got .*, of which 'norm\.weight' is of shape \(32,\), expected ends": lambda: (
        described("Mixtral", parameters="norm.weight")
    ),
    r"lora\.use_dora: got it with target_parameters, expected adapters of modules: leave one out": (
        lambda: described("Mixtral", parameters="experts.down_proj", use_dora=True)
    ),
    r"'up' is no parameter, expected target_modules, such as down_proj.*no stacked experts": (
        lambda: described("Llama", parameters="up")
    ),
    r"the weight of .*0\.self_attn\.q_proj, whose module has adapters already, .*leave it out": (
        lambda: described("Mixtral", targets="q_proj", parameters="q_proj.weight")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_adapters_need_their_configuration_and_weights_that_can_be_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"]), CONFIGS["Llama tied"]()
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    program = zfunc.compile(zfunc.hf.segments(model), precision="fp32", device="cpu")
    state = zfunc.init(program)
    with pytest.raises(ValueError, match="and lora where adapters were trained"):
        zfunc.hf.save(tmp_path / "x", program, state, config=config)
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(transformers.LlamaConfig, "tie_word_embeddings", always)
    with pytest.raises(ValueError, match=r"that a LlamaForCausalLM ties, .*: pass adapter_only=True"):
        zfunc.hf.save(tmp_path / "x", program, state, config=config, lora=lora)
    assert not list(tmp_path.iterdir())


@every_case
def test_a_folder_with_new_adapters_has_the_logits_of_its_model(name: str, tmp_path: Path) -> None:
    kind, given = CASES[name]
    base(kind).save_pretrained(tmp_path)
    _, segments = zfunc.hf.load(tmp_path, lora=peft.LoraConfig(r=4, **given))
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    assert torch.allclose(zfunc.apply(program, zfunc.init(program), tokens()), logits(base(kind)), atol=1e-6)


@pytest.mark.usefixtures("without_advice")
def test_the_command_trains_and_exports(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["<unk>", "</s>", *(f"w{n}" for n in range(45))]
    base().save_pretrained("model")
    save_tokenizer(Path("model/tokenizer.json"), words)
    texts = ({"text": " ".join(f"w{(n + k) % 45}" for k in range(9))} for n in range(40))
    write_jsonl(Path("texts.jsonl"), *texts)
    tiny = ["--seq-length", "12", "--batch-size", "4", "--data", "texts.jsonl", "--steps", "4", "--no-sample"]
    command = ["train", "--hf", "model", "--lora", "4", *tiny, "--lr", "0.02", "--params-on", "host"]
    assert main([*command, "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert "LoRA: 1,344 of 28,512 parameters are trained, adapters of q_proj, v_proj\n" in out
    both = "28,512 parameters, 1,344 of them trained"
    assert f"sequences of 12 tokens: {both}\n" in out
    assert both in str(read_history(Path("run")).model)
    assert main(["report", "run"]) == 0
    assert both in Path("run/report.html").read_text()
    assert main(["plan", "--hf", "model", "--lora", "4", "--hardware", "h100", "--json", *tiny[:4]]) == 0
    planned = json.loads(re.sub(r"(?s)^.*?(?=^{)", "", capsys.readouterr().out, flags=re.MULTILINE))
    for counts in (planned, json.loads(Path("run/config.json").read_text())):
        assert (counts["parameters"], counts["trained"]) == (28_512, 1_344)
    rows = measured("run")
    assert rows[-1]["held_out_bits_per_token"] < rows[0]["held_out_bits_per_token"]
    assert main(["export", "run", "--hf", "model", "--out", "tuned"]) == 0
    export = ["export", "run/checkpoints", "--hf", "model", "--adapter-only", "--out", "adapter"]
    assert main(export) == 0
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    assert Path("tuned/tokenizer.json").is_file()
    assert torch.allclose(logits(peft.PeftModel.from_pretrained(base(), "adapter")), logits(tuned), atol=1e-6)
    assert not torch.allclose(logits(base()), logits(tuned), atol=1e-6)
    capsys.readouterr()
    for wrong, message in {
        "train --lora 4": "--lora: got it without --hf",
        "train --hf model --lora-alpha 4": "--lora-alpha: got it without --lora",
        "train --hf model --use-dora": "--use-dora: got it without --lora",
        f"train --hf model --lora 4 --lora-targets x {' '.join(tiny)}": "--lora-targets: got .*ends of names",
        f"train --hf model --lora 4 --lora-target-parameters x {' '.join(tiny)}": (
            "--lora-target-parameters: got .*, of which 'x' is no parameter"
        ),
        "export run --adapter-only --out x": "--adapter-only: got it without --hf",
        "export model --hf model --adapter-only --out x": "got no checkpoint in it",
    }.items():
        assert main(wrong.split()) == 2
        assert re.search(message, " ".join(capsys.readouterr().err.split())), message


@pytest.mark.usefixtures("without_advice")
def test_the_command_trains_magnitudes_and_goes_on_with_them(own_folder: Path) -> None:
    """DoRA: peft reads what was trained, magnitudes too, and has the logits of the merged folder."""
    base().save_pretrained("model")
    save_tokenizer(Path("model/tokenizer.json"), ["<unk>", "</s>", *(f"w{n}" for n in range(45))])
    write_jsonl(Path("texts.jsonl"), *({"text": " ".join(f"w{n + k}" for k in range(9))} for n in range(30)))
    tiny = "--seq-length 12 --batch-size 4 --data texts.jsonl --no-sample --lr 0.02 --save-every 2"
    command = ["train", "--hf", "model", "--lora", "4", "--use-dora", "--steps", "4", *tiny.split(), "--out"]
    assert main([*command, "run"]) == 0
    assert main([*command, "later", "--resume", "run/checkpoints/step-00000002"]) == 0
    kept = {}
    for run in ("run", "later"):
        export = ["export", run, "--hf", "model", "--out"]
        assert main([*export, f"{run} tuned"]) == main([*export, f"{run} alone", "--adapter-only"]) == 0
        kept[run] = load_file(f"{run} alone/adapter_model.safetensors")
        loaded = peft.PeftModel.from_pretrained(base(), f"{run} alone")
        tuned = transformers.AutoModelForCausalLM.from_pretrained(f"{run} tuned")
        assert torch.allclose(logits(loaded), logits(tuned), atol=1e-6)
    assert kept["run"].keys() == kept["later"].keys()
    assert all(torch.equal(kept["later"][x], t) for x, t in kept["run"].items())

    drawn = peft.get_peft_model_state_dict(peft.get_peft_model(base(), peft.LoraConfig(r=4, use_dora=True)))
    assert {x: t.shape for x, t in drawn.items()} == {x: t.shape for x, t in kept["run"].items()}
    assert all(float((kept["run"][x] - t).abs().max()) > 1e-3 for x, t in drawn.items())


def test_the_command_packs_the_experts_that_python_packs(own_folder: Path) -> None:
    base("Qwen3 MoE").save_pretrained("model")
    given: dict[str, Any] = {
        "hf": Path("model"),
        "lora": 4,
        "data": Path("model"),
        "steps": 1,
        "seq_length": 8,
    }
    ends = ",".join(EXPERTS)
    settings = TrainSettings(**given, lora_targets="q_proj", quantize="nf4", quantize_parameters=ends)
    found = pretrained_model(settings)
    assert found is not None
    plain = zfunc.hf.load("model", lora=lora_config(4, targets="q_proj"))[1]
    linear = zfunc.hf.load("model", lora=lora_config(4, targets="q_proj"), quantize="nf4")[1]
    names = [p.name.removesuffix(".nf4") for s in linear for p in s.parameters if p.encodes]
    experts = [p.name for s in plain for p in s.parameters if p.name.endswith(tuple(EXPERTS))]
    assert experts
    for ours, theirs in zip(found.segments, zfunc.quantized(plain, "nf4", names + experts), strict=True):
        assert [(p.name, p.shape) for p in ours.parameters] == [(p.name, p.shape) for p in theirs.parameters]
        packed, expected = ours.initial(0), theirs.initial(0)
        assert all(torch.equal(x, expected[name]) for name, x in packed.items())
    for changed, message in (
        ({"quantize": "int8"}, "quantize_parameters: got it with int8, .* expected nf4: pass quantize='nf4'"),
        (
            {"quantize_parameters": "up"},
            "quantize_parameters: got .* 'up' is no parameter, .* experts.down_proj",
        ),
        ({"quantize": None}, "quantize_parameters: got it without `?quantize"),
    ):
        with pytest.raises(ValueError, match=message):
            pretrained_model(evolve(settings, **changed))


@pytest.mark.slow
@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize("more", [(), ("--quantize", "nf4", "--lora-targets", "q_proj")])
def test_the_command_trains_adapters_of_experts(
    more: tuple[str, ...], own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base("Mixtral").save_pretrained("model")
    save_tokenizer(Path("model/tokenizer.json"), ["<unk>", "</s>", *(f"w{n}" for n in range(45))])
    texts = ({"text": " ".join(f"w{(n + k) % 45}" for k in range(9))} for n in range(40))
    write_jsonl(Path("texts.jsonl"), *texts)
    tiny = [
        "--seq-length",
        "12",
        "--batch-size",
        "4",
        "--data",
        "texts.jsonl",
        "--steps",
        "4",
        "--lr",
        "0.02",
    ]
    command = ["train", "--hf", "model", "--lora", "4", "--lora-target-parameters", ",".join(EXPERTS), *more]
    assert main([*command, *tiny, "--no-sample", "--out", "run"]) == 0
    assert "adapters of experts.down_proj, experts.gate_up_proj" in capsys.readouterr().out
    assert main(["export", "run", "--hf", "model", "--out", "tuned"]) == 0
    assert main(["export", "run", "--hf", "model", "--adapter-only", "--out", "adapter"]) == 0
    assert sorted(json.loads(Path("adapter/adapter_config.json").read_text())["target_parameters"]) == sorted(
        EXPERTS
    )
    tuned = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    own = base("Mixtral")
    for name, p in own.named_parameters():
        if more and re.search(r"layers.*_proj\.weight", name):
            p.data = decode(FORMATS["nf4"].encode(p), "nf4", tuple(p.shape))
    before = logits(own)
    merged = logits(peft.PeftModel.from_pretrained(own, "adapter"))
    assert torch.allclose(merged, logits(tuned), atol=1e-5)
    assert not torch.allclose(before, merged, atol=1e-3)
