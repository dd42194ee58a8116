"""`zfunc train --hf`: a local model trained on JSONL, stopped, gone on with, and written back."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from attrs import evolve

import zfunc
import zfunc.models.hf
from zfunc.cli.main import main
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.batches import held_out_parts, rank_batch
from zfunc.train.loop import evaluate_held_out
from zfunc.train.settings import FINE_TUNING_LR, TrainSettings
from zfunc.train.setup import TrainingJob, prepare_job

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "</s>", *(f"w{n}" for n in range(45))]
SIZE: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": True},
}
TINY = ["--seq-length", "12", "--batch-size", "4", "--eval-every", "3"]


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 5)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZE)
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("model/tokenizer.json")
    texts = [{"text": " ".join(f"w{(n + k) % 45}" for k in range(9))} for n in range(40)]
    Path("texts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in texts))
    pairs = [
        {"prompt": " ".join(["w1"] * (n % 4 + 1)), "completion": " ".join(["w2"] * (n * n % 7))}
        for n in range(80)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))


def train(*more: object) -> int:
    return main(["train", "--hf", "model", *TINY, *map(str, more)])


def measured(run: str) -> list[dict[str, Any]]:
    names = ("step", "loss", "grad_norm", "lr", "held_out_bits_per_token")
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{k: row[k] for k in names if k in row} for row in rows]


def job(**given: Any) -> TrainingJob:
    settings = {"seq_length": 12, "batch_size": 4, "data": Path("pairs.jsonl"), "hf": Path("model"), **given}
    return prepare_job(TrainSettings(**settings), cache=Path("cache"))


def test_it_trains_stops_goes_on_and_is_loaded_by_from_pretrained(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--data", "pairs.jsonl", "--lr", 1e-2, "--micro-batches", 2, "--save-every", 2)
    assert train(*given, "--steps", 6, "--out", "whole") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for told in (
        "model: LlamaForCausalLM of model: 2 blocks of 16 features with 2 heads, sequences of 12 tokens",
        "80 documents",
        "tokenizer: model/tokenizer.json",
        "learned: ",
        "held out",
    ):
        assert told in out
    rows = measured("whole")
    assert rows[-1]["held_out_bits_per_token"] < rows[0]["held_out_bits_per_token"]
    config = json.loads(Path("whole/config.json").read_text())
    assert (config["architecture"], config["settings"]["num_layers"]) == ("LlamaForCausalLM", 2)
    assert config["unit"] == "token"
    assert "w" in json.loads(Path("whole/summary.json").read_text())["sample"]

    assert train(*given, "--steps", 6, "--out", "part", "--resume", "whole/checkpoints/step-00000004") == 0
    assert "other settings" not in capsys.readouterr().err
    assert measured("part")[-2:] == rows[-2:], "a resume is the training that was not interrupted"

    assert main(["export", "part", "--hf", "model", "--out", "trained"]) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained("trained").eval()
    assert Path("trained/tokenizer.json").read_text() == Path("model/tokenizer.json").read_text()
    done = job()
    state = zfunc.load("part/checkpoints", done.program)
    x = done.batch(0)[0]
    assert torch.allclose(zfunc.apply(done.program, state, x), trained(x).logits, atol=1e-5)
    before = transformers.AutoModelForCausalLM.from_pretrained("model").state_dict()
    assert not torch.equal(before["lm_head.weight"], trained.state_dict()["lm_head.weight"])


def test_first_loss_and_step_are_the_models_own_however_the_batch_is_cut() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    for parts in (1, 2, 4):
        made = job(micro_batches=parts)
        ids, (labels, weights) = made.batch(8)
        counts = (labels != IGNORE_INDEX).sum(1)
        assert len(set(counts.tolist())) > 1, "rows hold unequally many"
        own = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(own, list(model.parameters()))
        norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        _, metrics = zfunc.train_step(made.program, zfunc.init(made.program), (ids, (labels, weights)))
        assert abs(metrics.loss - float(own.detach())) < 1e-5
        assert abs(metrics.grad_norm - norm) < 1e-4 * norm


def test_ranks_weigh_by_what_the_batch_of_all_holds() -> None:
    made = job()
    inputs, (labels, weights) = made.batch(4)
    parts = [
        rank_batch(made.settings, made.corpus, 4, cast("Any", SimpleNamespace(rank=r, world=2)))
        for r in (0, 1)
    ]
    assert torch.equal(torch.cat([x for x, _ in parts]), inputs)
    assert torch.equal(torch.cat([x for _, (x, _) in parts]), labels)
    assert torch.equal(torch.cat([x for _, (_, x) in parts]), weights)
    assert len({int((x != IGNORE_INDEX).sum()) for _, (x, _) in parts}) == 2, "they hold unequally many"


def test_a_batch_of_nothing_learned_is_worth_nothing() -> None:
    pairs = [{"prompt": " ".join(["w1"] * n), "completion": "w2 w3"} for n in (500, *[2] * 40)]
    Path("long.jsonl").write_text("".join(json.dumps(x) + "\n" for x in pairs))
    made = job(data=Path("long.jsonl"), batch_size=1)
    at = next(n for n in range(50) if (made.batch(n)[1][0] == IGNORE_INDEX).all())
    assert zfunc.evaluate(made.program, zfunc.init(made.program), made.batch(at)) == 0


def held_out(made: TrainingJob) -> float | None:
    going = evaluate_held_out(made, made.program, zfunc.init(made.program))
    while True:
        try:
            next(going)
        except StopIteration as end:
            return end.value


def test_held_out_loss_is_the_mean_over_what_is_learned() -> None:
    made, model = job(batch_size=1), transformers.AutoModelForCausalLM.from_pretrained("model")
    assert len(made.held_out) > 1
    total = count = 0.0
    with torch.no_grad():
        for ids, (labels, _) in made.held_out:
            logits = model(ids).logits.flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
            count += int((labels != IGNORE_INDEX).sum())
    found = held_out(made)
    assert found == pytest.approx(total / count / np.log(2), rel=1e-5)


@pytest.mark.parametrize("data", ["pairs.jsonl", "text.txt"])
def test_held_out_loss_is_the_same_however_the_batch_is_cut(data: str) -> None:
    Path("text.txt").write_text("".join(chr(97 + n * n % 23) for n in range(1200)))
    sizes = {"hf": None, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "batch_size": 8}
    jobs = [job(data=Path(data), micro_batches=parts, **sizes) for parts in (1, 2, 4)]
    for rank in (0, 1):
        of_two = held_out_parts(
            jobs[0].settings, jobs[0].corpus, cast("Any", SimpleNamespace(rank=rank, world=2))
        )
        jobs.append(evolve(jobs[0], held_out=of_two))
    windows = [torch.cat([ids for ids, _ in made.held_out]) for made in jobs]
    assert len(windows[0]) % 8, "the last batch is a smaller one"
    assert all(torch.equal(x, windows[0]) for x in windows)
    losses = [held_out(made) for made in jobs]
    assert losses == pytest.approx(losses[:1] * len(jobs), rel=1e-6)


def test_a_new_gpt_learns_from_pairs_too() -> None:
    losses: list[float] = []
    for parts in (1, 4):
        made = job(hf=None, num_layers=1, hidden_size=16, num_attention_heads=2, micro_batches=parts)
        assert made.unit == "byte"
        losses.append(zfunc.train_step(made.program, zfunc.init(made.program), made.batch(0))[1].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_new_gpt_learns_the_tokens_of_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    gpt = ["--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2, *TINY]
    more = ["--data", "texts.jsonl", "--tokenizer", "model/tokenizer.json", "--steps", 2]
    assert main(["train", *map(str, (*gpt, *more, "--out", "run"))]) == 0
    settings = json.loads(Path("run/config.json").read_text())["settings"]
    assert settings["vocab_size"] == len(WORDS)
    assert main(["train", *map(str, (*gpt, *more, "--vocab-size", 10))]) == 2
    assert "got 10 for model/tokenizer.json, expected its 47 or more" in capsys.readouterr().err


def test_a_bin_of_its_tokens_needs_no_tokenizer_and_the_rate_is_low() -> None:
    (np.arange(2000) % 50).astype("<u2").tofile("a.bin")
    Path("model/tokenizer.json").unlink()
    assert train("--data", "a.bin", "--steps", 1, "--out", "run") == 0
    settings = json.loads(Path("run/config.json").read_text())["settings"]
    assert (settings["lr"], settings["vocab_size"]) == (FINE_TUNING_LR, 50)


def without_tokenizer() -> None:
    Path("model/tokenizer.json").unlink()


def larger_vocabulary() -> None:
    told = json.loads(Path("model/tokenizer.json").read_text())
    told["model"]["vocab"] |= {f"x{n}": 47 + n for n in range(9)}
    Path("model/tokenizer.json").write_text(json.dumps(told))


REFUSED: dict[str, tuple[list[object], str, Callable[[], object]]] = {
    "sizes": (["--num-layers", 3], "--num-layers: got it with --hf", lambda: None),
    "dropout": (["--dropout", 0.5], "--dropout: got it with --hf", lambda: None),
    "length": (["--seq-length", 33], "expected at most the 32 positions.*pass --seq-length 32", lambda: None),
    "vocabulary": (["--vocab-size", 9], "--vocab-size: got 9 for model, expected its 50", lambda: None),
    "no tokenizer": ([], "got none, and no tokenizer.json in model", without_tokenizer),
    "larger vocabulary": ([], "with 56 tokens, expected at most the 50", larger_vocabulary),
    "no model": (["--hf", "nowhere"], r"nowhere: got no config\.json", lambda: None),
    "broken line": (
        [],
        "texts.jsonl, line 2: got invalid JSON",
        lambda: Path("texts.jsonl").write_text('{"text": "w1"}\n{"text\n'),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_the_model_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, message, happen = REFUSED[name]
    happen()
    assert train("--data", "texts.jsonl", "--steps", 2, *given) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in err
    assert re.search(message, err)
    assert not list(Path("runs").glob("*"))
