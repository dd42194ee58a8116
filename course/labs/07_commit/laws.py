"""The graded laws of lab 7."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Any, NamedTuple

from course.drawing import Cell, Row, table
from course.forgetful import Change, Drive, Moment, operations_of, some, survivors
from course.law import Broken, Picture, Student, law

TITLE = "a commit that survives 1,000 power cuts"
NOT_IMPORTED = ("zfunc",)
CUTS = 1_000  # random ones
EACH = 256  # sets of surviving changes that are tried in each moment
PARTS, ROOM = 16, 32  # of the law little_room: parts of a sector each, sectors of the drive
ENDED = slice(-1, None)  # of the moments of a drive, that after its last operation
State = dict[str, bytes] | None

SERIES: tuple[tuple[State, ...], ...] = (  # from the smallest on; the last one of each is cut off
    (None, {"a": b"A"}),
    (None, {"a": b"A"}, {"a": b"B"}),
    (None, {"a": b"A", "b": b"A"}, {"a": b"B", "b": b"B"}),
    (None, {"a": b"A" * 700}, {"a": b"B" * 1_300}),
    (None, {"a": b"A" * 1_300}, {"a": b"B"}),
    (None, {"a": b"A" * 513, "b": b"A" * 513}, {"b": b"B" * 1_024, "c": b"C"}),
    (None, {"a": b"A", "b": b"A"}, {"a": b"B"}, {}),
)
"""Series of states; None is a drive on which nothing was stored."""


class Cut(NamedTuple):
    """A power cut: a drive with all its operations, the Moment of the cut, and the changes that survive."""

    drive: Drive
    moment: Moment
    kept: Sequence[Change]

    def after(self) -> Drive:
        """The drive after the cut."""
        return self.drive.after(self.moment, self.kept)


def runs(data: bytes) -> str:
    """Text of `data`; of more than eight bytes, "n x byte" for each run of equal bytes, or only their
    number."""
    found = [(bytes([x]), len([*some])) for x, some in groupby(data)]
    long = " + ".join(f"{n} x {x!r}" for x, n in found)
    return repr(data) if len(data) <= 8 else long if len(found) <= 4 else f"{len(data)} bytes"


def shown(state: Any, beside: State = None) -> str:
    """Text of a state; of one with many parts, only the parts that differ from `beside`."""
    if not isinstance(state, dict):
        return repr(state)[:200]
    parts: dict[Any, Any] = {**state}
    few = {
        x: y for x, y in parts.items() if len(parts) <= 4 or x not in (beside or {}) or (beside or {})[x] != y
    }
    told = [f"{x!r}: {runs(y) if isinstance(y, bytes) else repr(y)[:40]}" for x, y in [*few.items()][:6]]
    return "{" + ", ".join(told + ["..."] * (len(told) < len(parts))) + "}"


def picture(cut: Cut) -> Picture:
    """A picture of the drive's operations, and what the cut has left of each."""
    rows: list[Row] = []
    said = cut.drive.said
    pending = {x.op for x in cut.moment.pending}
    for n, text in enumerate(said, start=1):
        own = [x for x in cut.moment.pending if x.op == n]
        left = [x for x in cut.kept if x.op == n]
        if n > cut.moment.num_ops:
            fate = Cell("after the cut", "dim")
        elif n not in pending:
            fate = Cell(
                "lasting" if not text.startswith("sync") else "", "right" if text[:4] != "sync" else ""
            )
        elif any(x not in own for x in left):
            fate = Cell("torn", "wrong")
        elif len(left) == len(own):
            fate = Cell("kept", "kept")
        else:
            fate = Cell(f"{len(left)} of {len(own)} sectors kept" if left else "lost", "lost")
        rows.append([str(n), text, fate])
        if n == cut.moment.num_ops:
            rows.append(["", "--- power cut ---", ""])
    return table("Operations, and what is left of them", ["", "operation", "after the cut"], rows)


def check_recovered(
    student: Student, drive: Drive, allowed: Sequence[State], cut: Cut | None = None
) -> State:
    """The state that the student's `recover` finds on `drive`. Raises Broken if it is not in `allowed`."""
    drawn = picture(cut) if cut else None
    old, new = allowed[0], allowed[-1]
    if len(allowed) == 2:
        expected = f"the state before, {shown(old, new)}, or the new one, {shown(new, old)}"
    else:
        expected = "None: nothing was committed" if new is None else f"what was committed, {shown(new)}"
    try:
        got = student.recover(operations_of(drive))
    except Broken as broken:
        raise Broken(f"{broken.message}, expected {expected}", drawn) from None
    if not any(type(got) is type(x) and got == x for x in allowed):
        raise Broken(f"recover: got {shown(got, new)}, expected {expected}", drawn)
    return got


def committed(student: Student, drive: Drive, states: Iterable[State]) -> None:
    """Commit `states` by the student's function, one after the other; None among them is skipped."""
    for state in states:
        if state is not None:
            student.commit(operations_of(drive), dict(state))


def all_cuts(drive: Drive, moments: slice, most: int = EACH) -> Iterator[Cut]:
    """Yield the possible cuts at `moments` of the drive, the earliest first, and the fewest losses first."""
    for moment in drive.past[moments]:
        yield from (Cut(drive, moment, kept) for kept in survivors(moment.pending, most))


def over_series(check: Callable[[Drive, tuple[State, ...]], None], student: Student) -> None:
    """Commit each series of states on a drive, then call `check` with that drive and the states."""
    for states in SERIES:
        drive = Drive()
        committed(student, drive, states[:-1])
        drive = quiet(drive)
        committed(student, drive, states[-1:])
        if not drive.said:
            raise Broken("commit: got no operation of the drive, expected some: nothing else lasts")
        check(drive, states)


def quiet(drive: Drive) -> Drive:
    """The drive after a time so long that every change is lasting."""
    return drive.after(drive.past[-1], drive.past[-1].pending)


@law(points=5)
def whole(student: Student, random: Random) -> None:
    """without any cut, recover gives what was committed last"""
    check_recovered(student, Drive(), [None])

    def check(drive: Drive, states: tuple[State, ...]) -> None:
        check_recovered(student, drive, states[-1:])

    over_series(check, student)
    drive = Drive()
    for _ in range(50):
        committed(student, drive, [state := random_state(random)])
        check_recovered(student, drive, [state])


@law(points=15)
def lasting(student: Student, random: Random) -> None:
    """once commit has returned, no cut takes the new state away"""

    def check(drive: Drive, states: tuple[State, ...]) -> None:
        for cut in all_cuts(drive, ENDED):
            check_recovered(student, cut.after(), states[-1:], cut)

    over_series(check, student)


@law(points=20)
def old_or_new(student: Student, random: Random) -> None:
    """after a cut during commit, whatever survives, recover gives the old state or the new one"""

    def check(drive: Drive, states: tuple[State, ...]) -> None:
        for cut in all_cuts(drive, slice(-1)):
            check_recovered(student, cut.after(), states[-2:], cut)

    over_series(check, student)


@law(points=15)
def goes_on(student: Student, random: Random) -> None:
    """after any such cut, the next commit goes well, and lasts"""
    following: State = {"a": b"N", "d": b"N" * 600}

    def check(drive: Drive, states: tuple[State, ...]) -> None:
        for cut in all_cuts(drive, slice(None), most=16):
            try:
                after = cut.after()
                student.recover(operations_of(after))
                committed(student, after, [following])
            except Broken as broken:
                raise Broken(f"{broken.message}, in the next commit after this cut", picture(cut)) from None
            for second in all_cuts(after, ENDED, most=16):
                check_recovered(student, second.after(), [following], second)

    over_series(check, student)


def torn_cuts(drive: Drive) -> Iterator[Cut]:
    """Yield cuts that tear one sector: only the beginning or the end of what was written to it survives."""
    for moment in drive.past:
        for kept in survivors(moment.pending, 8):
            for n, change in enumerate(kept):
                length = len(change.data)
                for first, end in ((0, 1), (0, length // 2), (length // 2, length), (length - 1, length)):
                    if length > 1:
                        yield Cut(drive, moment, [*kept[:n], change.torn(first, end), *kept[n + 1 :]])


@law(points=5)
def torn(student: Student, random: Random) -> None:
    """on a drive that may tear a sector, too, recover gives the old state or the new one"""

    def check(drive: Drive, states: tuple[State, ...]) -> None:
        for cut in torn_cuts(drive):
            check_recovered(student, cut.after(), states[-2:], cut)

    over_series(check, student)


def random_state(random: Random) -> dict[str, bytes]:
    """A random state of one to three parts, each of up to three sectors filled with one letter."""
    parts = random.sample(("a", "b", "c", "d/e"), random.randint(1, 3))
    return {x: bytes([random.randrange(65, 91)]) * random.choice((0, 1, 9, 512, 513, 1_400)) for x in parts}


def random_cut(random: Random, drive: Drive) -> Cut:
    """A random cut: any moment, any survivors; one in three cuts tears a sector."""
    moment = random.choice(drive.past)
    kept = [moment.pending[n] for n in some(random, range(len(moment.pending)))]
    tearable = [n for n, x in enumerate(kept) if len(x.data) > 1]
    if tearable and random.random() < 1 / 3:
        n = random.choice(tearable)
        first, end = sorted(random.sample(range(len(kept[n].data) + 1), 2))
        kept[n] = kept[n].torn(first, end)
    return Cut(drive, moment, kept)


@law(points=15)
def thousand_cuts(student: Student, random: Random) -> None:
    """1,000 random cuts of a drive, in commit, in recover or after: the old or the new state, and room is left"""
    drive, now = Drive(64), None
    for n in range(CUTS):
        new: State = random_state(random)
        try:
            committed(student, drive, [new])
        except Broken as broken:
            raise Broken(f"{broken.message}, in commit number {n + 1}") from None
        cut = random_cut(random, drive)
        allowed = [new] if cut.moment.num_ops == len(drive.said) else [now, new]
        drive = cut.after()
        now = check_recovered(student, drive, allowed, cut)
        cut = random_cut(random, drive)  # in recover, or after it
        drive = cut.after()
        check_recovered(student, drive, [now] if cut.moment.num_ops == len(cut.drive.said) else allowed, cut)


@law(points=25)
def little_room(student: Student, random: Random) -> None:
    """a state of 16 sectors, of which a commit changes up to 4, on a drive of 32, with cuts"""
    now: State = {f"part{n}": bytes([65 + n]) * 512 for n in range(PARTS)}
    drive = Drive(ROOM)
    committed(student, drive, [now])
    drive = quiet(drive)
    for n in range(40):
        changed = random.sample(range(PARTS), random.randint(1, 4))
        new = now | {f"part{k}": bytes([random.randrange(97, 123)]) * 512 for k in changed}
        committed(student, drive, [new])
        for cut in all_cuts(drive, slice(None), most=16) if n < 8 else ():
            ended = cut.moment.num_ops == len(drive.said)
            check_recovered(student, cut.after(), [new] if ended else [now, new], cut)
        cut = random_cut(random, drive)
        allowed: list[State] = [new] if cut.moment.num_ops == len(drive.said) else [now, new]
        drive = cut.after()
        now = dict(check_recovered(student, drive, allowed, cut) or {})
