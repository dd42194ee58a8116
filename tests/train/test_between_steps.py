"""What goes on before, between and after steps: it is told of, a signal ends it, and the sample comes last."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from small_trainings import TEXT, summary, train

import zfunc
from zfunc.train.events import (
    INTERRUPT,
    TERMINATED,
    Evaluated,
    Event,
    Finished,
    Sampled,
    Saved,
    Stepped,
    Working,
)
from zfunc.train.loop import TEMPERATURE, sample, train_events
from zfunc.train.resume import ResumePoint
from zfunc.train.settings import TrainSettings
from zfunc.train.setup import TrainingJob, prepare_job

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "batch_size": 4}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """Four steps, with evaluations before them, after the second and after the last."""
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_text(TEXT)
    return prepare_job(
        TrainSettings(data=path, steps=4, seconds=None, eval_every=2, **SIZES), cache=path.parent
    )


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 40)


def run(job: TrainingJob, folder: Path, stop: Callable[[list[Event]], str] = lambda _: "") -> list[Event]:
    seen: list[Event] = []
    for event in train_events(job, stop=lambda: stop(seen), start=ResumePoint(folder)):
        seen.append(event)
    return seen


def begun(events: list[Event], what: str) -> int:
    return events.count(Working(what))


def held_out(events: list[Event]) -> list[float]:
    evaluated = [event.held_out for event in events if isinstance(event, (Evaluated, Stepped))]
    return [x for x in evaluated if x is not None]


def test_evaluation_and_sampling_are_told(job: TrainingJob, tmp_path: Path) -> None:
    events = run(job, tmp_path)
    assert (len(held_out(events)), begun(events, "evaluation"), begun(events, "sample")) == (3, 3, 1)
    finished, _, sampled = events[-3:]
    assert isinstance(finished, Finished)
    assert isinstance(sampled, Sampled)
    assert len(sampled.tokens) == 40


@pytest.mark.parametrize("how", [INTERRUPT, TERMINATED])
@pytest.mark.parametrize(
    ("what", "nth", "steps"), [("evaluation", n, 2 * n) for n in range(3)] + [("sample", 0, 4)]
)
def test_a_signal_ends_evaluation_and_sampling(
    what: str, nth: int, steps: int, how: str, job: TrainingJob, tmp_path: Path
) -> None:
    looks = itertools.count()  # after it has begun; the signal comes between the first two
    if how == INTERRUPT and not steps and what == "evaluation":
        with pytest.raises(KeyboardInterrupt):  # nothing was trained yet
            run(job, tmp_path, lambda seen: how if begun(seen, what) > nth and next(looks) else "")
        return
    events = run(job, tmp_path, lambda seen: how if begun(seen, what) > nth and next(looks) else "")
    (finished,) = (event for event in events if isinstance(event, Finished))
    late = what == "sample" or (nth == 2 and how == INTERRUPT)  # all steps were done
    assert (finished.ended, finished.steps) == ("steps" if late else how, steps)
    assert [event.step for event in events if isinstance(event, Saved)] == [steps][:steps]
    if what == "sample":
        assert isinstance(events[-1], Sampled)
        assert len(events[-1].tokens) < 40
    else:
        assert begun(events, what) == nth + 1, "no other is begun"
        assert len(held_out(events)) == nth
        assert not begun(events, "sample")
        assert events[-1] is finished


def test_after_an_interrupted_step_evaluation_and_sampling_run(job: TrainingJob, tmp_path: Path) -> None:
    events = run(job, tmp_path, lambda seen: INTERRUPT if any(isinstance(x, Stepped) for x in seen) else "")
    last = [type(event) for event in events if not isinstance(event, Working)]
    assert last[-4:] == [Saved, Evaluated, Finished, Sampled]
    assert isinstance(events[-1], Sampled)
    assert len(events[-1].tokens) == 40


def test_evaluation_and_sampling_can_be_turned_off(job: TrainingJob, tmp_path: Path) -> None:
    settings = evolve(job.settings, eval_every=0, no_sample=True)
    events = run(evolve(job, settings=settings), tmp_path)
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4]
    assert not [event for event in events if isinstance(event, (Working, Evaluated, Sampled))]
    assert isinstance(events[-1], Finished)
    assert events[-1].held_out is None


def test_sampling_with_a_cache_equals_sampling_without(job: TrainingJob) -> None:
    """40 tokens are more than there is room for: the newer half goes on in a new sequence."""
    program = evolve(job.program)
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=0), job.batch(0))
    generator, expected = torch.Generator().manual_seed(0), list[int]()
    text = job.corpus.held_out.tokens[:8].tolist()
    for _ in range(40):
        logits = zfunc.apply(program, state, torch.tensor([text]))[0, -1]
        expected.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
        text = [*text, expected[-1]] if len(text) < 16 else [*text[-7:], expected[-1]]
    assert list(sample(job, program, state)) == expected


@pytest.mark.usefixtures("own_folder")
def test_the_summary_is_written_before_the_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> Any:
        before.append(summary("run"))
        raise KeyboardInterrupt

    before: list[dict[str, Any]] = []
    monkeypatch.setattr("zfunc.train.loop.sample", stopped)
    assert train("--steps", 1, "--out", "run") == 130
    assert summary("run") == before[0]
    assert before[0]["ended"] == "steps"
    assert "all steps done: 1 step in" in capsys.readouterr().out
