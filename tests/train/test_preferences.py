"""`zfunc train --loss dpo`: preferences read, their loss against TRL and plain PyTorch, the reference of a run."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl_reference
from small_trainings import measured, rows
from text_data import save_tokenizer, write_jsonl

import zfunc
import zfunc.models.hf
from zfunc.cli.main import main
from zfunc.models.loss import Preferences
from zfunc.train.data.opening import open_data
from zfunc.train.data.records import preference_of
from zfunc.train.data.tokenizer import open_tokenizer

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

TRL = json.loads((Path(__file__).parents[1] / "goldens/trl.json").read_text())
BETA = trl_reference.BETA
FLAGS = ("--hf", "model", "--loss", "dpo", "--seq-length", "7", "--batch-size", "4", "--lr", "1e-2")
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer and preferences."""
    folder = tmp_path_factory.mktemp("made")
    trl_reference.model(1).save_pretrained(folder / "model")
    save_tokenizer(folder / "model/tokenizer.json", trl_reference.WORDS)
    write_jsonl(folder / "few.jsonl", *trl_reference.RECORDS)
    many = ({**x, "chosen": f"{x['chosen']} w{n}"} for n in range(5) for x in trl_reference.RECORDS)
    write_jsonl(folder / "prefs.jsonl", *many)
    return folder


@pytest.fixture(autouse=True)
def a_model_and_data(own_folder: Path, made: Path) -> None:
    shutil.copytree(made, own_folder, dirs_exist_ok=True)


def read(path: Path, seq_length: int = 7, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of all preferences at `path`, chosen and rejected in turn."""
    tokenizer = open_tokenizer(Path("model/tokenizer.json"), end=1)
    given = {"split": False, "pairs": True, "whole_documents": seq_length, **more}
    stream = open_data(path, cache=Path("cache"), tokenizer=tokenizer, **given).train
    return stream.read(range(stream.num_sequences(seq_length)), seq_length=seq_length)


def sums(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the labels' log-probabilities in each row, of plain transformers."""
    found = torch.log_softmax(model(ids).logits.double(), -1).gather(-1, labels.clamp(0)[..., None])[..., 0]
    return (found * (labels != -100)).sum(1)


STREAMED = {"micro_batches": 2, "params_on": "host", "state_on": "host"}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("sigmoid", {}), ("ipo", STREAMED)),
        pytest.param("sigmoid", STREAMED, marks=pytest.mark.slow),
        pytest.param("ipo", {}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_trl_and_of_plain_pytorch(kind: str, way: dict[str, Any]) -> None:
    ids, labels = read(Path("few.jsonl"))
    order = [*range(0, 8, 2), *range(1, 8, 2)]  # TRL has the chosen answers first
    assert ids[order].tolist() == TRL["input_ids"]
    learned = torch.tensor(TRL["completion_mask"])[:, 1:] == 1
    assert (labels[order][:, :-1] != -100).tolist() == learned.tolist()
    options = {"precision": "fp32", "device": "cpu", "optimizer": zfunc.SGD(lr=1.0), "norms": True, **way}
    # The frozen reference, by a program of its own, streamed from the host
    frozen = zfunc.compile(zfunc.hf.segments(trl_reference.model(2)), **{**options, "params_on": "host"})
    reference = zfunc.apply(frozen, zfunc.init(frozen), ids, Preferences(labels))
    plain, other = trl_reference.model(1), trl_reference.model(2)
    torch.testing.assert_close(reference.double(), sums(other, ids, labels), atol=2e-5, rtol=1e-6)
    # A step: TRL's loss, rewards and norms of gradients; each element of the gradients of plain PyTorch
    program = zfunc.compile(zfunc.hf.segments(trl_reference.model(1)), **options)
    state = zfunc.init(program)
    before = zfunc.params(program, state)
    state, metrics = zfunc.train_step(
        program, state, (ids, Preferences(labels, reference, BETA, kind == "ipo"))
    )
    assert metrics.loss == pytest.approx(TRL[kind]["loss"], rel=1e-5)
    assert metrics.aux == pytest.approx(TRL[kind]["rewards"], abs=1e-5)
    assert metrics.norms == pytest.approx(TRL[kind]["norms"], rel=1e-5)
    change = sums(plain, ids, labels) - reference.double()
    margin = change[0::2] - change[1::2]
    loss = -torch.nn.functional.logsigmoid(BETA * margin)
    if kind == "ipo":
        change = change / (labels != -100).sum(1)
        loss = (change[0::2] - change[1::2] - 1 / (2 * BETA)) ** 2
    loss.mean().backward()
    assert metrics.loss == pytest.approx(float(loss.mean().detach()), rel=1e-6)
    after = zfunc.params(program, state)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(before[name] - after[name], p.grad, atol=1e-6, rtol=1e-5)


def test_halves_of_pairs_are_refused() -> None:
    program = zfunc.compile(zfunc.hf.segments(trl_reference.model(1)), precision="fp32", device="cpu")
    ids, labels = read(Path("few.jsonl"))
    with pytest.raises(ValueError, match="got 7 rows of preferences in a micro-batch, expected pairs"):
        zfunc.train_step(program, zfunc.init(program), (ids[:7], Preferences(labels[:7], torch.zeros(7))))


def train(*more: object) -> int:
    return main(["train", *FLAGS, *map(str, more)])


def test_a_run_goes_on_with_the_reference_of_its_beginning(capsys: Out) -> None:
    few = ("--data", "prefs.jsonl", "--steps", 6, "--eval-every", 9, "--save-every", 3, "--no-sample")
    assert train(*few, "--out", "whole") == 0
    told = capsys.readouterr().out
    assert "held out 0.6931\n" in told
    assert "bits per" not in told
    first, *others = (x for x in rows("whole") if "loss" in x)
    assert first["loss"] == pytest.approx(np.log(2))
    assert first["aux"]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert others[-1]["aux"]["rewards/margins"] > 0.05
    checkpoint = "whole/checkpoints/step-00000003"
    assert train(*few, "--out", "other", "--resume", checkpoint) == 0
    assert measured("other")[-1] == measured("whole")[-1]
    ids, labels = read(Path("prefs.jsonl"))
    kept = np.load("whole/reference.npz")
    found = sums(trl_reference.model(1), ids, labels).detach().numpy()
    np.testing.assert_allclose(np.concatenate([kept["train"], kept["held_out"]]), found, rtol=1e-5)
    # Without the file, or for other data, there is nothing right to go on with
    Path("whole/reference.npz").unlink()
    assert train(*few[:3], 9, *few[4:], "--out", "whole", "--resume", "auto") == 2
    assert "which has kept no reference" in capsys.readouterr().err
    assert train(*few[:3], 9, "--out", "other", "--resume", "auto", "--seq-length", 6) == 2
    assert "got other data, seq_length or tokenizer than" in capsys.readouterr().err
    Path("other/reference.npz").write_bytes(b"damaged")
    assert train(*few[:3], 9, "--out", "other", "--resume", "auto") == 2
    err = capsys.readouterr().err
    assert "reference.npz, which is damaged (" in err
    assert "pickle" not in err, "NumPy's advice is to trust it"


def test_under_lora_the_reference_is_the_base(capsys: Out) -> None:
    pytest.importorskip("peft")
    few = ("--data", "prefs.jsonl", "--steps", 2, "--micro-batches", 2, "--no-sample", "--dpo-type", "ipo")
    assert train(*few, "--lora", 2, "--params-on", "host", "--dpo-beta", "0.5", "--out", "run") == 0
    first, second = (x["loss"] for x in rows("run") if "loss" in x)
    assert first == pytest.approx(1.0)  # (1 / (2 * 0.5)) ** 2: the policy is the reference
    assert second < first
    ids, labels = read(Path("prefs.jsonl"))
    kept = np.load("run/reference.npz")["train"]
    found = sums(trl_reference.model(1), ids, labels).detach().numpy()
    np.testing.assert_allclose(kept, found[: len(kept)], rtol=1e-5)


USER, GOOD, BAD = (
    {"role": r, "content": x} for r, x in (("user", "w1"), ("assistant", "w2"), ("assistant", "w3"))
)
SYSTEM = {"role": "system", "content": "w2"}
FORMS = {
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole chats": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole chats beside the text of the prompt": {
        "prompt": "w1",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
    },
    "as LLaMA-Factory has them": {
        "conversations": [{"from": "human", "value": "w1"}],
        "chosen": {"from": "gpt", "value": "w2"},
        "rejected": {"from": "gpt", "value": "w3"},
    },
    **{
        f"whole chats beside {case}": {"chosen": [USER, GOOD], "rejected": [USER, BAD], **more}
        for case, more in {
            "the prompt": {"prompt": [USER]},
            "conversations, the prompt": {"conversations": [{"from": "human", "value": "w1"}]},
            "conversations, a whole chat": {"conversations": [USER, GOOD]},
            "empty conversations": {"prompt": None, "conversations": []},
        }.items()
    },
    "JSON text": {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_conversations_are_one(form: str) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    Path("model/chat_template.jinja").write_text(template)
    ids, labels = read(write_jsonl(Path("chat.jsonl"), FORMS[form]))
    assert ids.tolist() == [[0, 3, 0, 4, 0, 0, 0], [0, 3, 0, 5, 0, 0, 0]]  # user w1 assistant w2
    assert labels.tolist() == [[-100, -100, x, *[-100] * 4] for x in (4, 5)]


@pytest.mark.parametrize("answers", [([GOOD], [BAD]), ([USER, GOOD], [USER, BAD])])
@pytest.mark.parametrize("system", [{"system": "w2"}, {"conversations": [SYSTEM, USER]}])
def test_the_system_prompt_beside_conversations_is_read(
    answers: tuple[Any, Any], system: dict[str, Any]
) -> None:
    counts = Counter[str]()
    record = {"conversations": [USER], "chosen": answers[0], "rejected": answers[1], **system}
    chosen, rejected = preference_of(record, "a", counts)
    assert chosen.values.messages == (SYSTEM, USER, GOOD)
    assert rejected.values.messages == (SYSTEM, USER, BAD)
    assert not +counts


def test_long_answers_are_cut_or_left_out_in_pairs() -> None:
    ids, _ = read(Path("few.jsonl"), seq_length=5)
    assert ids[:, 4].tolist() == [0, 8, 14, 17, 23, 0, 31, 0]
    assert read(Path("few.jsonl"), 6, long_documents="drop")[0][:, 0].tolist() == [27, 27]


LINE = r"data: .*a\.jsonl, line 1"
REFUSED = {
    (
        "dpo",
        '{"text": "w1"}',
    ): rf"{LINE}: got an object with text with --loss dpo, expected a prompt, and two",
    ("dpo", '{"prompt": "w1", "chosen": "w2"}'): "got an object with chosen, prompt with",
    (
        "dpo",
        '{"chosen": "w2", "rejected": "w3"}',
    ): r"got a preference \(chosen, rejected\) without a prompt, or",
    ("dpo", '{"prompt": "w1", "chosen": "", "rejected": "w3"}'): "without an answer",
    ("dpo", '{"prompt": "w1", "chosen": "w2", "rejected": "w2"}'): rf"{LINE}: got one answer as chosen and",
    ("dpo", json.dumps({"chosen": [USER, GOOD], "rejected": [USER, GOOD]})): "got one answer as chosen and",
    ("dpo", '{"prompt": "w1", "chosen": "w2", "rejected": [{"role": "user"}]}'): "expected",
    ("dpo", '{"prompt": "w1", "chosen": "w2", "rejected": 3}'): rf"{LINE}, rejected, 'completion': got 3",
    ("dpo", json.dumps({"prompt": [USER], "chosen": "w2", "rejected": "w3"})): rf"{LINE}, chosen.*or objects",
    (
        "tokens",
        '{"prompt": "w1", "chosen": "w2", "rejected": "w3"}',
    ): r"with a loss of tokens.*pass --loss dpo",
}


@pytest.mark.parametrize(("loss", "line"), REFUSED)
def test_data_of_the_other_loss_is_refused(loss: str, line: str, capsys: Out) -> None:
    Path("a.jsonl").write_text(line + "\n")
    assert train("--data", "a.jsonl", "--loss", loss) == 2
    assert pytest.importorskip("re").search(REFUSED[loss, line], told := capsys.readouterr().err), told


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--loss", "tokens", "--dpo-beta", "1"), "got it without --loss dpo"),
        (("--packing", "documents"), "--packing: got documents with"),
        (("--tiles", "2"), "--tiles: got 2 with"),
        (("--stream",), "--loss: got dpo with --stream, expected tokens: leave one out"),
        (
            ("--batch-size", "6", "--micro-batches", "2"),
            "got 6 for 1 rank with 2 micro-batches each of pairs",
        ),
        (("--data", "text.txt"), "got 'a text' with --loss dpo"),
        ((), "got 'texts' with --loss dpo"),
    ],
)
def test_flags_that_do_not_go_with_dpo_are_refused(flags: tuple[str, ...], error: str, capsys: Out) -> None:
    Path("text.txt").write_text("w1 w2")
    data = () if not flags or "--data" in flags else ("--data", "prefs.jsonl")
    assert train(*data, *flags) == 2
    assert error in capsys.readouterr().err
