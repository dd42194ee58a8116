"""Who is missing: what ranks ask each other after a collective has failed, through the store of their group.

A broken connection only says that something broke, a time-out only that somebody did not come. So every rank that
has noticed calls "here" in the store, and who has not called after a while is missing. The first to find that out
writes the verdict, and all others take it over, those too that come later.

The invariant: nothing here needs a rank that is gone. Every question to the store is given up after a while,
because the store itself may have been kept by the rank that is missing.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from attrs import asdict, frozen

T = TypeVar("T")
Symptom = Literal["broken", "late", "told"]  # a connection broke; the time-out; somebody else has given up

POLL = 0.05  # seconds between two questions
ANSWER = 3.0  # seconds for the store to answer one
FAREWELL = 1.0  # seconds that a rank stays for others who have called and not read the verdict yet
LONGEST = 1000  # characters of a reason


class StoreLost(Exception):  # noqa: N818
    """The store does not answer, or there is none."""


@frozen
class MissingRanks:
    """Which ranks of the group are missing, and what is known of why."""

    missing: tuple[int, ...]
    late: bool = False  # they did not come within the time-out, and may still be there
    why: str = ""  # what the one that left said

    def text(self, names: Sequence[int], me: int) -> str:
        """What to tell on the rank `me`, with `names[rank]` for each rank.

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
    """The roll of `world` ranks in their `store` (as `torch.distributed.Store`; None if it cannot be had).

    A group is only ever called once: after that nothing it sends counts any more.
    """

    store: Any
    rank: int
    world: int

    def leave(self, why: str) -> None:
        """Tell the others that this rank will not come again. Raises StoreLost."""
        mine = json.dumps({"rank": self.rank, "why": why[:LONGEST]})

        def tell() -> None:
            self.store.compare_set(_key("left"), "", mine)
            self.store.set(_key("failed"), "1")

        self._ask(tell, ANSWER)

    def failed(self) -> bool:
        """Whether any rank has left or given up. Raises StoreLost."""
        return self._ask(lambda: self.store.check([_key("failed")]), ANSWER)

    def take(self, sign: Symptom, *, least: float, most: float) -> MissingRanks:
        """Call this rank and hear who else does, for at most `most` seconds; the same verdict on every rank.

        Done when all others have called but one, though not before `least` seconds, in which that one may. Raises
        StoreLost if the store does not answer.
        """
        return self._ask(lambda: self._take(sign, least, most), most + FAREWELL + ANSWER)

    def _take(self, sign: Symptom, least: float, most: float) -> MissingRanks:
        begun, store = time.monotonic(), self.store
        store.set(_key("here", self.rank), sign)
        store.add(_key("calls"), 1)
        store.set(_key("failed"), "1")
        while not store.check([_key("verdict")]):
            waited, calls = time.monotonic() - begun, store.add(_key("calls"), 0)
            enough = calls == self.world or (calls == self.world - 1 and waited >= least) or waited >= most
            if enough or store.check([_key("left")]):
                store.compare_set(_key("verdict"), "", json.dumps(asdict(self._found())))
            else:
                time.sleep(POLL)
        verdict = json.loads(store.get(_key("verdict")))
        self._part()
        return MissingRanks(tuple(verdict["missing"]), verdict["late"], verdict["why"])

    def _found(self) -> MissingRanks:
        if self.store.check([_key("left")]):
            left = json.loads(self.store.get(_key("left")))
            return MissingRanks((left["rank"],), why=left["why"])
        here = [r for r in range(self.world) if self.store.check([_key("here", r)])]
        late = any(self.store.get(_key("here", r)) == b"late" for r in here)
        return MissingRanks(tuple(r for r in range(self.world) if r not in here), late=late)

    def _part(self) -> None:
        """Stay until everybody who has called has the verdict: the store may end with this process."""
        until = time.monotonic() + FAREWELL
        parted = self.store.add(_key("parted"), 1)
        while parted < self.store.add(_key("calls"), 0) and time.monotonic() < until:
            time.sleep(POLL)
            parted = self.store.add(_key("parted"), 0)

    def _ask(self, question: Callable[[], T], seconds: float) -> T:
        """The answer, from a thread that may be left behind: a store on a machine without power never answers."""
        if self.store is None:
            raise StoreLost("the group has no store")
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put((question(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=ask, name="zfunc roll call", daemon=True).start()
        try:
            answer, error = answers.get(timeout=seconds)
        except Empty:
            raise StoreLost(f"the store has not answered for {seconds:g} s") from None
        if error is not None:
            raise StoreLost(f"the store failed with {type(error).__name__}: {error}") from error
        return answer


def _key(*parts: object) -> str:
    return "/".join(map(str, ("zfunc", "roll", *parts)))
