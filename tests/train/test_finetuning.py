"""`zfunc train --hf`: a local model trained on JSONL, stopped, gone on with, and written back."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from attrs import evolve
from small_trainings import config, measured, rows, summary
from text_data import save_tokenizer, write_jsonl
from threaded_ranks import ThreadedRanks, on_every

import zfunc
import zfunc.models.hf
from zfunc.cli.main import main
from zfunc.models.loss import IGNORE_INDEX
from zfunc.train.data.corpus import held_out_parts, rank_batch, without_labels
from zfunc.train.events import Stepped
from zfunc.train.loop import evaluate_held_out, sample, train_events
from zfunc.train.settings import FINE_TUNING_LR, TrainSettings
from zfunc.train.setup import TrainingJob, prepare_job

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

Out = pytest.CaptureFixture[str]
WORDS = ["<unk>", "</s>", *(f"w{n}" for n in range(45))]
SIZE: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": True},
}
TINY = ["--seq-length", "12", "--batch-size", "4", "--eval-every", "3"]
GPT = {"hf": None, "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE)).save_pretrained(folder / "model")
    save_tokenizer(folder / "model/tokenizer.json", WORDS)
    texts = ({"text": " ".join(f"w{(n + k) % 45}" for k in range(9))} for n in range(40))
    write_jsonl(folder / "texts.jsonl", *texts)
    pairs = ((["w1"] * (n % 4 + 1), ["w2"] * (n * n % 7)) for n in range(80))
    write_jsonl(
        folder / "pairs.jsonl", *({"prompt": " ".join(a), "completion": " ".join(b)} for a, b in pairs)
    )
    return folder


@pytest.fixture(autouse=True)
def a_model_and_data(own_folder: Path, made: Path) -> None:
    shutil.copytree(made, own_folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def pairs(made: Path) -> TrainingJob:
    """A job on pairs, for tests that leave it as it is."""
    return job(data=made / "pairs.jsonl", hf=made / "model", cache=made / "cache")


def train(*more: object) -> int:
    return main(["train", "--hf", "model", *TINY, *map(str, more)])


def pretrained(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def job(cache: Path = Path("cache"), **given: Any) -> TrainingJob:
    settings = {"seq_length": 12, "batch_size": 4, "data": Path("pairs.jsonl"), "hf": Path("model"), **given}
    return prepare_job(TrainSettings(**settings), cache=cache)


def test_fine_tuning_resumes_and_from_pretrained_loads_the_result(capsys: Out) -> None:
    given = ("--data", "pairs.jsonl", "--lr", 1e-2, "--micro-batches", 2, "--save-every", 2, "--steps", 4)
    assert train(*given, "--out", "first") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "model: LlamaForCausalLM of model: 2 blocks of 16 features with 2 heads, sequences of 12 tokens",
        "80 documents",
        "tokenizer: model/tokenizer.json",
        "learned: ",
        "held out",
    ):
        assert words in out
    rows = measured("first")
    assert rows[-1]["held_out_bits_per_token"] < rows[0]["held_out_bits_per_token"]
    assert config("first")["architecture"] == "LlamaForCausalLM"
    assert (config("first")["settings"]["num_layers"], config("first")["unit"]) == (2, "token")
    assert "w" in summary("first")["sample"]

    assert train(*given, "--out", "part", "--resume", "first/checkpoints/step-00000002") == 0
    assert "other settings" not in capsys.readouterr().err
    assert measured("part")[-2:] == rows[-2:], "a resume is the training that was not interrupted"

    capsys.readouterr()
    assert main(["export", "part", "--out", "trained"]) == 2
    assert "one file: add --hf model for a folder like" in capsys.readouterr().err
    assert main(["export", "part", "--hf", "model", "--out", "trained"]) == 0
    trained = pretrained("trained").eval()
    assert Path("trained/tokenizer.json").read_text() == Path("model/tokenizer.json").read_text()
    same = job()
    state, x = zfunc.load("part/checkpoints", same.program), same.batch(0)[0]
    assert torch.allclose(zfunc.apply(same.program, state, x), trained(x).logits, atol=1e-5)
    before = pretrained("model").state_dict()
    assert not torch.equal(before["lm_head.weight"], trained.state_dict()["lm_head.weight"])


def test_epochs_on_all_of_the_data_with_other_data_to_evaluate_on(capsys: Out) -> None:
    write_jsonl(Path("eval.jsonl"), *({"text": f"w1 w2 w{n}"} for n in range(9)))
    given = ("--data", "texts.jsonl", "--eval-data", "eval.jsonl", "--epochs", 0.5, "--lr-schedule", "linear")
    assert train(*given, "--warmup", 1, "--out", "run", "--no-sample") == 0
    out = capsys.readouterr().out
    left_out = "400 tokens, of which each pass leaves out some at its ends, others each time"
    assert f"epochs: 0.5 of 32 sequences each ({left_out}): 4 steps" in out
    assert "held out:\n    eval.jsonl: 1 file, 9 documents, 36 tokens" in out
    assert "step 4/4  epoch 0.50  loss" in out
    settings = config("run")["settings"]
    assert (settings["epochs"], settings["steps"], settings["seconds"]) == (0.5, 4, None)
    assert [row["epoch"] for row in rows("run")[1:]] == [0.125, 0.25, 0.375, 0.5]
    assert [row["lr"] for row in rows("run")[1:]] == pytest.approx([2e-5, 1.4e-5, 0.8e-5, 0.2e-5])
    assert train(*given, "--warmup", 1, "--out", "run", "--resume", "auto") == 0
    assert "it ended at step 4: nothing is left to train" in capsys.readouterr().out


def test_a_sample_is_the_answer_to_a_held_out_prompt(
    pairs: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = pairs.corpus.held_out.first_prompt(12)
    assert set(pairs.decode(prompt).split()) == {"w1"}
    assert pairs.stops == {WORDS.index("</s>")}
    state = zfunc.init(pairs.program)
    monkeypatch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 60)
    free = [*sample(evolve(pairs, tokenizer=None), pairs.program, state)]
    assert WORDS.index("</s>") in free, "of random weights, with this seed"
    answer = [*sample(pairs, pairs.program, state)]
    assert answer == free[: free.index(WORDS.index("</s>"))]


def test_the_first_loss_is_the_models_own() -> None:
    """A batch of a job is weighed as zfunc.hf.batch does, whose laws are in tests/models/test_hf.py."""
    pairs = job(micro_batches=4)
    ids, (labels, weights) = pairs.batch(8)
    assert len(set((labels != IGNORE_INDEX).sum(1).tolist())) > 1, "rows hold unequally many"
    assert torch.equal(weights, zfunc.hf.batch(ids, labels)[1][1])
    own = torch.nn.functional.cross_entropy(pretrained("model")(ids).logits.flatten(0, 1), labels.flatten())
    _, metrics = zfunc.train_step(pairs.program, zfunc.init(pairs.program), pairs.batch(8))
    assert abs(metrics.loss - float(own.detach())) < 1e-5


def rank_of_two(rank: int) -> Any:
    return cast("Any", SimpleNamespace(rank=rank, world=2))


def test_ranks_weight_rows_by_the_whole_batch(pairs: TrainingJob) -> None:
    inputs, (labels, weights) = pairs.batch(4)
    parts = [rank_batch(pairs.settings, pairs.corpus, 4, rank_of_two(rank)) for rank in (0, 1)]
    assert torch.equal(torch.cat([x for x, _ in parts]), inputs)
    assert torch.equal(torch.cat([x for _, (x, _) in parts]), labels)
    assert torch.equal(torch.cat([x for _, (_, x) in parts]), weights)
    assert len({int((x != IGNORE_INDEX).sum()) for _, (x, _) in parts}) == 2, "they hold unequally many"


def test_a_step_without_a_label_makes_no_update(capsys: Out) -> None:
    """And a training with such steps resumes as one without a stop."""
    write_jsonl(Path("eval.jsonl"), {"text": "w1 w2 " * 20})
    pairs = ({"prompt": " ".join(["w1"] * n), "completion": "w2 w3"} for n in (60, *[2] * 9))
    data = write_jsonl(Path("long.jsonl"), *pairs)
    full = job(data=data, eval_data=Path("eval.jsonl"), batch_size=1, weight_decay=0.5)
    first = next(n for n in range(8) if without_labels(full.batch(n)))
    assert zfunc.evaluate(full.program, zfunc.init(full.program), full.batch(first)) == 0
    given = f"--data {data} --eval-data eval.jsonl --batch-size 1 --no-sample --weight-decay 0.5".split()
    given += [
        "--lr-schedule",
        "constant",
        "--warmup",
        "0",
        "--save-every",
        "1",
        "--keep",
        "99",
        "--steps",
        "8",
    ]
    assert train(*given, "--out", "first") == 0
    out, err = capsys.readouterr()
    assert "sequences have no label; a step without any makes no update" in out
    log = out + err
    skipped = [n for n in range(1, 9) if f"step {n}: no label in its batch, no update" in log]
    assert skipped == [n for n in range(1, 9) if without_labels(full.batch(n - 1))] != []
    assert {row["step"] for row in rows("first") if "loss" in row} == {*range(1, 9)} - {*skipped}
    before = Path(f"first/checkpoints/step-{skipped[0] - 1:08d}")  # of so many updates
    after = before.with_name(f"{before.name}.1")
    one, other = (zfunc.params(full.program, zfunc.load(folder, full.program)) for folder in (before, after))
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert train(*given, "--out", "second", "--resume", after) == 0
    assert measured("second")[-1:] == measured("first")[-1:]


def test_ranks_pass_over_the_steps_in_which_no_rank_has_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, also those that read none of the labels; as plain PyTorch on the whole batch."""
    lines = ({"prompt": " ".join(["w1"] * n), "completion": "w2 w3"} for n in (*[60] * 5, *[2] * 9))
    data = write_jsonl(Path("long.jsonl"), *lines)
    given = {"data": data, "eval_data": data, "batch_size": 2, "optimizer": "sgd", "lr": 0.1, "warmup": 0}
    make = partial(job, **given, weight_decay=0.0, clip=None, lr_schedule="constant", steps=12, eval_every=0)
    whole, model = make(), pretrained("model")
    ranks, jobs = ThreadedRanks.all(2), list[TrainingJob]()
    for own in ranks:
        monkeypatch.setattr("zfunc.engine.compile._ranks", lambda _, own=own: own)
        monkeypatch.setattr("zfunc.train.setup.RankGroup", SimpleNamespace(of=lambda own=own: own))
        jobs.append(make())
    losses = on_every(jobs, lambda job: [x.metrics.loss for x in train_events(job) if isinstance(x, Stepped)])
    expected, empty, optimizer = (
        list[float](),
        set[int](),
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    )
    for n in range(0, 24, 2):
        ids, (labels, _) = whole.batch(n)
        empty.add(without := int((labels == IGNORE_INDEX).all(1).sum()))
        if without == 2:
            continue
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert empty == {0, 1, 2}, "both rows have labels, one has, none has"
    assert losses[0] == losses[1] == pytest.approx(expected, rel=1e-5)


def held_out(job: TrainingJob) -> float | None:
    return evaluate_held_out(job, job.program, zfunc.init(job.program))


def test_held_out_loss_is_the_mean_over_tokens_that_count() -> None:
    pairs, model = job(batch_size=1), pretrained("model")
    assert len(pairs.held_out) > 1
    total = count = 0.0
    with torch.no_grad():
        for ids, (labels, _) in pairs.held_out:
            logits = model(ids).logits.flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
            count += int((labels != IGNORE_INDEX).sum())
    assert held_out(pairs) == pytest.approx(total / count / np.log(2), rel=1e-5)


@pytest.mark.parametrize("data", ["pairs.jsonl", "text.txt"])
def test_losses_of_a_new_gpt_do_not_depend_on_micro_batches(data: str) -> None:
    Path("text.txt").write_text("".join(chr(97 + n * n % 23) for n in range(1200)))
    jobs = [job(data=Path(data), micro_batches=parts, batch_size=8, **GPT) for parts in (1, 2, 4)]
    assert {x.corpus.unit for x in jobs} == {"byte"}
    steps = [zfunc.train_step(x.program, zfunc.init(x.program), x.batch(0))[1].loss for x in jobs]
    assert steps == pytest.approx(steps[:1] * len(steps), rel=1e-5)
    for rank in (0, 1):
        parts = held_out_parts(jobs[0].settings, jobs[0].corpus, rank_of_two(rank))
        jobs.append(evolve(jobs[0], held_out=parts))
    windows = [torch.cat([ids for ids, _ in x.held_out]) for x in jobs]
    assert len(windows[0]) % 8, "the last batch is a smaller one"
    assert all(torch.equal(x, windows[0]) for x in windows)
    losses = [held_out(x) for x in jobs]
    assert losses == pytest.approx(losses[:1] * len(jobs), rel=1e-6)


def test_a_new_gpt_learns_the_tokens_of_a_tokenizer(capsys: Out) -> None:
    gpt = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", *TINY]
    given = ["train", *gpt, "--data", "texts.jsonl", "--tokenizer", "model/tokenizer.json", "--steps", "2"]
    assert main([*given, "--out", "run"]) == 0
    assert config("run")["settings"]["vocab_size"] == len(WORDS)
    assert main([*given, "--vocab-size", "10"]) == 2
    assert "got 10 for model/tokenizer.json, expected its 47 or more" in capsys.readouterr().err


def test_a_bin_of_its_tokens_needs_no_tokenizer_and_is_one_epoch_at_a_low_rate() -> None:
    (np.arange(240) % 50).astype("<u2").tofile("a.bin")
    Path("model/tokenizer.json").unlink()
    assert train("--data", "a.bin", "--out", "run", "--no-sample", "--eval-every", 0) == 0
    settings = config("run")["settings"]
    assert (settings["lr"], settings["vocab_size"]) == (FINE_TUNING_LR, 50)
    assert (settings["epochs"], settings["seconds"], settings["steps"]) == (1, None, len(rows("run")))


TOKENIZER = Path("model/tokenizer.json")
REFUSED: dict[str, tuple[str, str, Callable[[], object]]] = {
    "sizes": ("--num-layers 3", "--num-layers: got it with --hf", lambda: None),
    "dropout": ("--dropout 0.5", "--dropout: got it with --hf", lambda: None),
    "length": ("--seq-length 33", "expected at most the 32 positions.*pass --seq-length 32", lambda: None),
    "long documents": (
        "--long-documents drop",
        "--long-documents: got drop with --packing stream",
        lambda: None,
    ),
    "an epoch of a stream": (
        "--stream --epochs 1",
        "--epochs: got it|--epochs: got 1 with --steps",
        lambda: None,
    ),
    "a stream without evaluations": (
        "--stream",
        "--eval-data: got none with --stream, .*--eval-every 0",
        lambda: None,
    ),
    "a stream of documents": (
        "--stream --eval-every 0 --packing documents",
        "--packing: got documents with --stream, expected stream",
        lambda: None,
    ),
    "a buffer alone": ("--shuffle-buffer 9", "--shuffle-buffer: got it without --stream", lambda: None),
    "no file of the pattern": (
        "--stream --eval-every 0 --data *.jsonl.gz",
        "--data: got .*gz, which names no file, expected JSONL, Parquet or Arrow.*leave --stream( True)? out",
        lambda: None,
    ),
    "template": (
        "--chat-template-args [1]",
        r"--chat-template-args: got '\[1\]' .*a JSON object",
        lambda: None,
    ),
    "variables": (
        '--chat-template-args {"tools":3}',
        "--chat-template-args: got tools, which zfunc passes to the template itself, expected variables",
        lambda: None,
    ),
    "vocabulary": ("--vocab-size 9", "--vocab-size: got 9 for model, expected its 50", lambda: None),
    "no tokenizer": ("", "got none, and no tokenizer.json in model", TOKENIZER.unlink),
    "larger vocabulary": (
        "",
        "with 56 tokens, expected at most the 50",
        lambda: save_tokenizer(TOKENIZER, [*WORDS, *(f"x{n}" for n in range(9))]),
    ),
    "no model": ("--hf nowhere", r"nowhere: got no config\.json", lambda: None),
    "broken line": (
        "",
        "texts.jsonl, line 2: got invalid JSON",
        lambda: Path("texts.jsonl").write_text('{"text": "w1"}\n{"text\n'),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_contradict_the_model_are_refused(name: str, capsys: Out) -> None:
    flags, message, happen = REFUSED[name]
    happen()
    assert train("--data", "texts.jsonl", "--steps", 2, *flags.split()) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in err
    assert re.search(message, err)
    assert not list(Path("runs").glob("*"))
