"""Finds the missing ranks after a collective has failed, through the store of their group.

A broken connection or a time-out does not say which rank caused it. So every rank that notices one reports "here"
in the store, and a rank that has not reported after a while is missing. The first rank to find that out writes the
verdict, and all others, also later ones, read it.

The invariant: nothing here needs a missing rank. Every request to the store has a time-out, because a missing rank
may have hosted the store.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from attrs import asdict, frozen

T = TypeVar("T")
Symptom = Literal["broken", "late", "notified"]  # a broken connection; a time-out; another rank has given up

POLL = 0.05  # seconds between two questions
STORE_TIMEOUT = 3.0  # seconds for the store to answer one
TIMEOUT = timedelta(minutes=10)  # that a collective waits for the others, if nothing else is said
VARIABLE, LONGEST_TIMEOUT = "ZFUNC_TIMEOUT", 10**6  # seconds
EXIT_GRACE = 1.0  # seconds that a rank stays for others that have reported and not read the verdict yet
LONGEST = 1000  # characters of a reason


def timeout(environment: Mapping[str, str] = os.environ, default: timedelta = TIMEOUT) -> timedelta:
    """The time-out of a collective: ZFUNC_TIMEOUT in seconds, or `default`. Raises ValueError for a bad value.

    >>> timeout({"ZFUNC_TIMEOUT": "90"})
    datetime.timedelta(seconds=90)
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= LONGEST_TIMEOUT:
        raise ValueError(
            f"{VARIABLE}: got {text!r}, expected seconds from 0.001 to {LONGEST_TIMEOUT:,}: set it to 600, say, or "
            "unset it"
        )
    return timedelta(seconds=seconds)


class StoreLost(Exception):  # noqa: N818
    """The key-value store through which ranks report failures does not answer, or there is none."""


@frozen
class MissingRanks:
    """The ranks missing from a group after a collective has failed, and the known reasons."""

    missing: tuple[int, ...]
    late: bool = False  # they did not come within the time-out, and may still be there
    why: str = ""  # what the one that left said

    def text(self, names: Sequence[int], me: int) -> str:
        """The missing ranks in words, for a message of rank `me` of the group; `names[rank]` stands for each rank.

        >>> MissingRanks((1,)).text(names=(0, 1), me=0)
        'rank 1 is gone'
        >>> MissingRanks((0, 2), late=True).text(names=(4, 5, 6), me=2)
        'rank 4 did not come'
        """
        absent = [r for r in self.missing if r != me]
        if not absent:
            return (
                "the others had given up waiting for this one"
                if self.missing
                else "no rank is missing, so a connection between two of them broke"
            )
        listed = ", ".join(str(names[r]) for r in absent)
        if self.why:
            return f"rank {listed} has left: {self.why}"
        if absent[1:]:
            return f"ranks {listed} {'did not come' if self.late else 'are gone'}"
        return f"rank {listed} {'did not come' if self.late else 'is gone'}"


@frozen(eq=False)
class FailureDetector:
    """Finds out which of `world` ranks are missing after a failure, through a `store`
    (torch.distributed.Store) in which ranks report.

    A detector serves one failure of a group, which cannot be used afterwards. With `store` None, calls raise
    StoreLost.
    """

    store: Any
    rank: int
    world: int

    def leave(self, why: str) -> None:
        """Tell the other ranks through the store that this rank has left, and `why`. Raises StoreLost."""
        mine = json.dumps({"rank": self.rank, "why": why[:LONGEST]})

        def tell() -> None:
            self.store.compare_set(_key("left"), "", mine)
            self.store.set(_key("failed"), "1")

        self._ask(tell, STORE_TIMEOUT)

    def failed(self) -> bool:
        """Whether the store knows of a rank that has left or given up. Raises StoreLost."""
        return self._ask(lambda: self.store.check([_key("failed")]), STORE_TIMEOUT)

    def find_missing(self, symptom: Symptom, *, min_wait: float, max_wait: float) -> MissingRanks:
        """Report this rank's `symptom` in the store, wait for other ranks' reports, and return the missing
        ranks: the same on every rank.

        Ends when all ranks have reported; if one is missing, after `min_wait` seconds; otherwise after
        `max_wait` seconds. Raises StoreLost if the store does not answer.
        """
        return self._ask(
            lambda: self._find_missing(symptom, min_wait, max_wait), 2 * max_wait + EXIT_GRACE + STORE_TIMEOUT
        )

    def _find_missing(self, symptom: Symptom, min_wait: float, max_wait: float) -> MissingRanks:
        begun, store = time.monotonic(), self.store
        store.set(_key("here", self.rank), symptom)
        store.add(_key("calls"), 1)
        store.set(_key("failed"), "1")
        while not store.check([_key("verdict")]):
            waited, calls = time.monotonic() - begun, store.add(_key("calls"), 0)
            enough = (
                calls == self.world or (calls == self.world - 1 and waited >= min_wait) or waited >= max_wait
            )
            if enough or store.check([_key("left")]):
                store.compare_set(_key("verdict"), "", json.dumps(asdict(self._missing())))
            else:
                time.sleep(POLL)
        verdict = json.loads(store.get(_key("verdict")))
        with suppress(Exception):  # the verdict is read: the store may end now, with the process that has it
            self._wait_for_readers(verdict["missing"], max_wait)
        return MissingRanks(tuple(verdict["missing"]), verdict["late"], verdict["why"])

    def _missing(self) -> MissingRanks:
        if self.store.check([_key("left")]):
            left = json.loads(self.store.get(_key("left")))
            return MissingRanks((left["rank"],), why=left["why"])
        here = [r for r in range(self.world) if self.store.check([_key("here", r)])]
        late = any(self.store.get(_key("here", r)) == b"late" for r in here)
        return MissingRanks(tuple(r for r in range(self.world) if r not in here), late=late)

    def _wait_for_readers(self, missing: Sequence[int], max_wait: float) -> None:
        """Wait up to `max_wait` seconds until every rank that reported has read the verdict: the store may
        end with this process.

        Rank 0, whose process usually hosts the store, also waits for ranks that have not reported yet.
        """
        until = time.monotonic() + (EXIT_GRACE if self.rank else max_wait)
        survivors = 0 if self.rank else self.world - len(missing)
        parted = self.store.add(_key("parted"), 1)
        while parted < max(survivors, self.store.add(_key("calls"), 0)) and time.monotonic() < until:
            time.sleep(POLL)
            parted = self.store.add(_key("parted"), 0)

    def _ask(self, question: Callable[[], T], seconds: float) -> T:
        """The result of `question`, run in a thread that is abandoned after `seconds`; then raises StoreLost."""
        if self.store is None:
            raise StoreLost("the group has no store")
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=ask, name="zfunc failure detection", daemon=True).start()
        try:
            answer, error = answers.get(timeout=seconds)
        except Empty:
            raise StoreLost(f"the store has not answered for {seconds:g} s") from None
        if error is not None:
            raise StoreLost(f"the store failed with {type(error).__name__}: {error}") from error
        return answer


def _key(*parts: object) -> str:
    return "/".join(map(str, ("zfunc", "roll", *parts)))
