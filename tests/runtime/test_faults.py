"""Ranks that die, hang, leave or come late: all others are told which, in time, and end. How a fault is asked for.

tests/fault_worker.py forks the ranks of every scenario; the tests read what each has left.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_worker import CALLS, LONG, SCENARIOS, SHORT, play_all
from forked import ERROR, played

from zfunc.errors import RankError
from zfunc.runtime import failure_detection
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.failure_detection import TIMEOUT, FailureDetector, MissingRanks, StoreLost, timeout
from zfunc.runtime.fault_injection import Fault, faults_at, from_environment, parse_faults

SOON = 20.0  # seconds, on a busy machine; ranks that are not told wait LONG
KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return played(play_all, tmp_path_factory.mktemp("faults"))


def reports(results: Path, name: str, *ranks: int) -> list[dict[str, Any]]:
    return [json.loads((results / name / f"{rank}.json").read_text()) for rank in ranks]


def ends(results: Path, name: str) -> list[Any]:
    return json.loads((results / name / "ends.json").read_text())


# --- ranks of which one is missing ----------------------------------------------------------------------

HANGS = "still there"
NO_STORE = "rank 0, which kept the store, is gone"
MISSING: dict[str, tuple[list[Any], dict[int, str]]] = {  # how each rank ends, and what those that see it say
    "killed": (
        [ERROR, ERROR, ERROR, KILLED],
        dict.fromkeys((0, 1, 2), "expected all 4 ranks: rank 3 is gone. See what"),
    ),
    "terminated": ([TERMINATED, ERROR], {1: "expected all 2 ranks: rank 0 is gone. See what"}),
    "killed without the store": (
        [KILLED, ERROR, ERROR],
        dict.fromkeys((1, 2), "expected all 3 ranks: rank 0 is gone. See what"),
    ),
    "killed with the store": ([KILLED, ERROR, ERROR], dict.fromkeys((1, 2), NO_STORE)),
    "raised": (
        [ERROR, ERROR, ERROR],
        dict.fromkeys((0, 2), r"rank 1 has left: step 2 failed .*InjectedFault: update\[1\]"),
    ),
    "leaves": (  # but its process stays
        [ERROR, ERROR, ERROR],
        {
            **dict.fromkeys((0, 2), "rank 1 has left: step 3 failed with OSError: No space left"),
            1: "out of step, because step 3 failed with OSError",
        },
    ),
    "leaves others behind": (
        [ERROR, ERROR, 0],
        dict.fromkeys((0, 1), "rank 2 has left: step 3 failed with OSError: No space left"),
    ),
    "group of two": (  # named by their number in the job
        [0, ERROR, KILLED],
        {1: "^all_reduce on rank 1: .*expected all 2 ranks: rank 2 is gone"},
    ),
    "late": (
        [ERROR, ERROR, ERROR],
        {
            **dict.fromkeys((0, 1), "rank 2 did not come"),
            2: "^(?!.*rank 2 did).*the others had given up waiting for this one",  # it does not name itself
        },
    ),
    "hung": (
        [ERROR, HANGS, ERROR],
        dict.fromkeys((0, 2), "expected all 3 ranks: rank 1 did not come.*ZFUNC_TIMEOUT"),
    ),
    "frozen with the store": (
        [HANGS, ERROR, ERROR],
        dict.fromkeys((1, 2), f"{NO_STORE} or stuck.*has not answered"),
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_rank_is_named_on_all_others_in_time(results: Path, name: str) -> None:
    expected_ends, messages = MISSING[name]
    assert ends(results, name) == expected_ends
    for (rank, message), report in zip(messages.items(), reports(results, name, *messages), strict=True):
        assert report["type"] == "RankError"
        assert re.search(message, report["text"], re.DOTALL), (rank, report["text"])
        waits = SHORT in (SCENARIOS[name].timeout, SCENARIOS[name].asked)
        assert report["seconds"] < SOON + (SHORT if waits else 0) < LONG
        if HANGS in expected_ends:
            assert report["seconds"] >= SHORT


def test_a_rank_that_fails_by_itself_raises_its_own_error(results: Path) -> None:
    (itself,) = reports(results, "raised", 1)
    assert itself["type"] == "InjectedFault"


def test_the_step_before_is_done_on_every_rank(results: Path) -> None:
    assert {report["steps"] for report in reports(results, "killed", 0, 1, 2)} == {1}


def test_a_rank_without_a_connection_to_the_dead_one_hears_of_it_from_the_others(results: Path) -> None:
    got = [re.search(r"got (\w+)", report["text"]) for report in reports(results, "killed", 0, 1, 2)]
    assert sorted(m[1] for m in got if m) == ["a", "a", "word"]  # a broken connection, or word


@pytest.mark.parametrize("name", ["killed", "hung", "raised"])
def test_after_a_lost_rank_no_collective_is_begun(results: Path, name: str) -> None:
    again = (results / name / "0.again").read_text()
    assert again.startswith("all_reduce on rank 0: got ranks that are out of step, because rank ")
    assert "start all of them again" in again


# --- zfunc train ----------------------------------------------------------------------------------------

SMALL = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"]


@pytest.fixture
def job(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a training of two ranks."""
    data = tmp_path / "data.txt"
    data.write_text("Every rank reads its part of the batch. " * 400)
    arguments = ["--steps", "5", "--data", str(data), "--out", str(tmp_path / "run"), *SMALL]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "ZFUNC_TIMEOUT": "60"}
    return ["-m", "zfunc", "train", *arguments], environment


@pytest.mark.slow
def test_torchrun_ends_with_1_and_the_message_when_a_rank_dies(job: tuple[list[str], dict[str, str]]) -> None:
    """With its processes, what "killed" says of forked ranks and test_train_command.py of a training that fails."""
    arguments, environment = job
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    fault = {"ZFUNC_FAULTS": "rank=1,step=2,op=update[0],do=kill"}
    ran = subprocess.run(
        [*launch, *arguments], env={**environment, **fault}, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 1
    assert "expected all 2 ranks: rank 1 is gone" in ran.stderr


@pytest.mark.slow
def test_zfunc_train_ends_with_1_and_the_message_when_a_rank_hangs(
    job: tuple[list[str], dict[str, str]],
) -> None:
    """Without the agent of torchrun, which would wait half a minute for the one that hangs."""
    arguments, environment = job
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    more |= {"ZFUNC_FAULTS": "rank=1,step=2,op=update[0],do=hang", "ZFUNC_TIMEOUT": "5"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, **more, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, message = ranks[0].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert "expected all 2 ranks: rank 1 did not come" in message


# --- ranks in different calls ---------------------------------------------------------------------------


def test_ranks_in_different_calls_name_the_calls_of_the_others(results: Path) -> None:
    """Any two of them; and nothing is lost, so that they can go on together."""
    assert ends(results, "apart") == [0, 0]
    seen = reports(results, "apart", 0, 1)
    for pair in permutations(CALLS, 2):
        for rank, call in enumerate(pair):
            message = (
                f"{call} on rank {rank}: got rank 0 in {pair[0]}, rank 1 in {pair[1]}, expected all 2 ranks"
            )
            assert message in seen[rank].get(" ".join(pair), "nothing")
    assert [x["together"] for x in seen] == ["2", "2"]


@pytest.mark.parametrize("sent", [[1 << 60, 1 << 60], [1 << 60, ~(1 << 60)], [-1, 0], [5, 0]])
def test_numbers_of_another_call_are_no_lengths(monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> None:
    """Another call's numbers, as long as the sizes of texts: no memory is asked for by what they say."""
    ranks = RankGroup(world=2, members=(0, 1), store=dist.HashStore())

    def all_reduce(_: RankGroup, values: torch.Tensor) -> None:
        values[1] = torch.tensor(sent)

    monkeypatch.setattr(RankGroup, "_all_reduce", all_reduce)
    with pytest.raises(RankError, match=f"rank 1 sent {sent[0]:,}, .* Make the same calls .* on every rank"):
        ranks.texts("save")
    with pytest.raises(RankError, match="out of step, because rank 1 sent"):
        ranks.agree("save")
    assert ranks.detector.failed()


# --- missing ranks --------------------------------------------------------------------------------------


def call(store: Any, world: int, symptoms: dict[int, Any], **seconds: float) -> dict[int, MissingRanks]:
    """The verdicts of the ranks that call, each with its symptom, at once."""
    got: dict[int, MissingRanks] = {}

    def one(rank: int) -> None:
        got[rank] = FailureDetector(store, rank, world).find_missing(
            symptoms[rank], **{"min_wait": 0.1, "max_wait": 5.0, **seconds}
        )

    threads = [threading.Thread(target=one, args=(rank,)) for rank in symptoms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_all_ranks_have_one_verdict() -> None:
    got = call(dist.HashStore(), 4, {0: "broken", 1: "late", 3: "notified"})
    assert got == dict.fromkeys((0, 1, 3), MissingRanks((2,), late=True))


def test_a_verdict_that_is_read_holds_when_the_store_ends() -> None:
    """With the process of rank 0, which has its verdict, while another is on its way out of the search."""

    class Ending:
        store = dist.HashStore()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def add(self, key: str, amount: int) -> int:
            if key.endswith("parted"):
                raise dist.DistNetworkError("the connection was closed")
            return self.store.add(key, amount)

    assert call(Ending(), 3, {0: "late", 2: "late"}) == dict.fromkeys((0, 2), MissingRanks((1,), late=True))


def test_two_missing_ranks_are_waited_for_until_the_time_out() -> None:
    begun = time.monotonic()
    got = call(dist.HashStore(), 4, {1: "broken", 2: "broken"}, max_wait=0.5)
    assert got == dict.fromkeys((1, 2), MissingRanks((0, 3)))
    assert time.monotonic() - begun >= 0.5
    assert MissingRanks((0, 3)).text((0, 1, 2, 3), 1) == "ranks 0, 3 are gone"


def test_if_all_ranks_call_none_is_missing() -> None:
    got = call(dist.HashStore(), 2, {0: "broken", 1: "broken"}, min_wait=1.0)
    assert got == dict.fromkeys((0, 1), MissingRanks(()))
    assert "no rank is missing" in got[0].text((0, 1), 0)


def test_the_first_to_leave_is_named() -> None:
    store = dist.HashStore()
    assert not FailureDetector(store, 0, 4).failed()
    FailureDetector(store, 2, 4).leave("the disk is full")
    FailureDetector(store, 1, 4).leave("it noticed")
    assert FailureDetector(store, 0, 4).failed()
    assert call(store, 4, {0: "notified"}) == {0: MissingRanks((2,), why="the disk is full")}


def test_a_group_without_a_store_is_reported() -> None:
    with pytest.raises(StoreLost, match="the group has no store"):
        FailureDetector(None, 0, 2).failed()


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detection, "STORE_TIMEOUT", 0.1)
    release = threading.Event()

    class Stuck:
        def check(self, *_: object) -> bool:
            return release.wait()

    with pytest.raises(StoreLost, match="has not answered for 0.1 s"):
        FailureDetector(Stuck(), 0, 2).failed()
    release.set()


def test_a_rank_that_cannot_announce_its_leaving_warns(caplog: pytest.LogCaptureFixture) -> None:
    ranks = RankGroup(world=2, members=(0, 1))
    with caplog.at_level("WARNING", "zfunc"):
        ranks.leave("step 3 failed")
    assert "could not be told that this one leaves: the group has no store" in caplog.text
    assert ranks.broken == "step 3 failed"


# --- the time-out ---------------------------------------------------------------------------------------


def test_the_time_out_is_that_of_the_environment() -> None:
    assert timeout({}) == timeout({"ZFUNC_TIMEOUT": " "}) == TIMEOUT
    assert timeout({"ZFUNC_TIMEOUT": "2.5"}) == timedelta(seconds=2.5)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "10 min", "1e9"])
def test_a_bad_time_out_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"ZFUNC_TIMEOUT: got '{re.escape(text)}', expected seconds .* unset it"
    ):
        timeout({"ZFUNC_TIMEOUT": text})


# --- faults ---------------------------------------------------------------------------------------------

FAULT = Fault(1, 7, "reduce_scatter[0,2,0]", "kill")


@pytest.mark.parametrize(("action", "code"), [("kill", KILLED), ("terminate", TERMINATED)])
def test_signals_end_the_process(action: Any, code: int) -> None:
    code_run = f"from zfunc.runtime.fault_injection import Fault; Fault(0, 1, 'load[0]', {action!r}).happen()"
    assert subprocess.run([sys.executable, "-c", code_run], stderr=subprocess.DEVNULL).returncode == code


@pytest.mark.parametrize("action", ["kill", "hang", "raise", "terminate"])
def test_faults_round_trip_through_text(action: Any) -> None:
    faults = (FAULT, Fault(0, 3, "global_norm", action))
    assert parse_faults(";".join(map(str, faults))) == faults
    assert from_environment({"ZFUNC_FAULTS": f" {FAULT} ; "}) == (FAULT,)
    assert from_environment({}) == ()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "kill",
            "rank=1,step=7,op=update[3]",
            "rank=1,step=7,op=,do=kill",
            "rank=1,rank=1,step=7,op=update[3],do=kill",
        ),
        *("rank=1,step=7,op=update[3],do=kill,when=now", "rank=-1,step=7,op=update[3],do=kill"),
        *("rank=1,step=seven,op=update[3],do=kill", "rank=1,step=7,op=update[3],do=kil"),
    ],
)
def test_a_bad_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ZFUNC_FAULTS: got '.*', expected a fault such as rank=1,step=7"):
        parse_faults(text)


def test_only_the_faults_of_this_rank_and_step_are_due() -> None:
    other = Fault(0, 7, "load[0]", "hang")
    assert faults_at((FAULT, other), 1, 7) == (FAULT,)
    assert faults_at((FAULT, other), 1, 8) == ()
