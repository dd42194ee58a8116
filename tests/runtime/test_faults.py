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
from types import SimpleNamespace
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
from zfunc.runtime.fault_injection import ACTIONS, Fault, faults_at, from_environment, parse_faults

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
WAITING = "(send to|receive from|all_reduce).*expected all 3 ranks"
MISSING: dict[str, tuple[list[Any], dict[int, str]]] = {  # how each rank ends, and what those that see it say
    "killed": (
        [ERROR, ERROR, ERROR, KILLED],
        dict.fromkeys((0, 1, 2), "expected all 4 ranks: rank 3 is gone. See what"),
    ),
    **dict.fromkeys(
        ("stage killed", "stage killed in a send"),
        ([ERROR, KILLED, ERROR], dict.fromkeys((0, 2), f"{WAITING}: rank 1 is gone. See what")),
    ),
    "stage hung": (
        [ERROR, HANGS, ERROR],
        dict.fromkeys((0, 2), f"{WAITING}: rank 1 did not come.*ZFUNC_TIMEOUT"),
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
    "stage frozen with the store": (
        [HANGS, ERROR],
        {1: f"receive from rank 0 on rank 1: got a time-out .*{NO_STORE} or stuck.*has not answered"},
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


@pytest.mark.slow
@pytest.mark.parametrize(("does", "said"), [("kill", "rank 1 is gone"), ("hang", "rank 1 did not come")])
def test_zfunc_train_ends_with_1_and_the_message_when_a_rank_dies_or_hangs(
    tmp_path: Path, does: str, said: str
) -> None:
    """With its processes, what is said of forked ranks above: by torchrun; for one that hangs without its agent,
    which would wait half a minute for it."""
    (data := tmp_path / "data.txt").write_text("Every rank reads its part of the batch. " * 400)
    job = [
        "-m",
        "zfunc",
        "train",
        "--steps",
        "5",
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
        *SMALL,
    ]
    given = {"XDG_CACHE_HOME": str(tmp_path), "ZFUNC_TIMEOUT": "5" if does == "hang" else "60"}
    given["ZFUNC_FAULTS"] = f"rank=1,step=2,op=update[0],do={does}"
    if does == "kill":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        starts = [([sys.executable, *launch, *job], given)]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        starts = [([sys.executable, *job], {**given, "RANK": str(rank)}) for rank in range(2)]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env={**os.environ, **more}, **pipes) for command, more in starts]
    try:
        _, message = started[0].communicate(timeout=100)
    finally:
        for process in started:
            process.kill()
        for process in started[1:]:
            process.communicate()
    assert started[0].returncode == 1
    assert f"expected all 2 ranks: {said}" in message


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


def test_who_waits_for_a_device_learns_that_another_rank_has_left() -> None:
    """Whether a collective is under way or not; a store that has ended tells nothing of those that trained on."""
    store = dist.HashStore()
    waits, leaves = (RankGroup(rank=n, world=2, members=(0, 1), store=store) for n in (0, 1))
    assert not waits.watch()
    leaves.leave("of its own accord")
    with pytest.raises(
        RankError, match="a wait for the device on rank 0.*rank 1 has left: of its own accord"
    ):
        waits.watch()
    assert not RankGroup(world=2, members=(0, 1), store=SimpleNamespace(check=lambda _: 1 / 0)).watch()


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
    assert call(store, 4, {0: "notified"}, max_wait=0.2) == {0: MissingRanks((2,), why="the disk is full")}


def test_a_group_without_a_store_or_with_one_that_does_not_answer_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_detection, "STORE_TIMEOUT", 0.1)
    release = threading.Event()
    stuck = SimpleNamespace(check=lambda *_: release.wait())
    for store, said in ((None, "the group has no store"), (stuck, "has not answered for 0.1 s")):
        with pytest.raises(StoreLost, match=said):
            FailureDetector(store, 0, 2).failed()
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
    for text in ("0", "-1", "nan", "inf", "10 min", "1e9"):
        said = rf"ZFUNC_TIMEOUT: got '{re.escape(text)}', expected seconds .* unset it"
        with pytest.raises(ValueError, match=said):
            timeout({"ZFUNC_TIMEOUT": text})


# --- faults ---------------------------------------------------------------------------------------------

FAULT = Fault(1, 7, "reduce_scatter[0,2,0]", "kill")


@pytest.mark.parametrize(("action", "code"), [("kill", KILLED), ("terminate", TERMINATED)])
def test_signals_end_the_process(action: Any, code: int) -> None:
    code_run = f"from zfunc.runtime.fault_injection import Fault; Fault(0, 1, 'load[0]', {action!r}).happen()"
    assert subprocess.run([sys.executable, "-c", code_run], stderr=subprocess.DEVNULL).returncode == code


def test_faults_round_trip_through_text_and_are_due_at_their_rank_and_step() -> None:
    faults = (FAULT, *(Fault(0, 3, "global_norm", x) for x in ACTIONS))
    assert parse_faults(";".join(map(str, faults))) == faults
    assert from_environment({"ZFUNC_FAULTS": f" {FAULT} ; "}) == (FAULT,)
    assert from_environment({}) == ()
    assert [faults_at(faults, 1, step) for step in (7, 8)] == [(FAULT,), ()]


BAD_FAULTS = """kill
rank=1,step=7,op=update[3]
rank=1,step=7,op=,do=kill
rank=1,rank=1,step=7,op=update[3],do=kill
rank=1,step=7,op=update[3],do=kill,when=now
rank=-1,step=7,op=update[3],do=kill
rank=1,step=seven,op=update[3],do=kill
rank=1,step=7,op=update[3],do=kil"""


@pytest.mark.parametrize("text", BAD_FAULTS.splitlines())
def test_a_bad_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ZFUNC_FAULTS: got '.*', expected a fault such as rank=1,step=7"):
        parse_faults(text)
