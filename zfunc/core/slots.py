"""Staging slots in classes of size, so that one large item does not decide the size of all.

What is used again stays in its slot until another item needs it, so what was used last is still there when a pass
turns round. What only passes through gets the slots of its class in turn.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from attrs import define, evolve, field

from zfunc.core.dtypes import Dtype
from zfunc.core.graph import Region
from zfunc.errors import PlanError, refuse

Slots = OrderedDict[Region, None]
SizeClass = tuple[Sequence[int], int, int]  # items, the slots they share, and the room of each in bytes

ALIKE: Mapping[int, Dtype] = {}  # items of the dtype of their region
ANYWHERE: Mapping[int, int] = {}


def size_classes(sizes: Mapping[int, int], kinds: Mapping[int, Any]) -> list[list[int]]:
    """Sort items into classes by their `sizes` (by item, bytes), largest first: a class has items of one kind
    (`kinds[item]`) that are more than half as large as its largest item.

    >>> size_classes({0: 1000, 1: 60, 2: 64, 3: 30, 4: 40}, {})
    [[0], [2, 1, 4], [3]]
    """
    classes: list[list[int]] = []
    for item in sorted(sizes, key=lambda x: (kinds.get(x, ""), -sizes[x], x)):
        first = classes[-1][0] if classes else item
        alike = 2 * sizes[item] > sizes[first] or not sizes[first]
        if classes and alike and kinds.get(item) == kinds.get(first):
            classes[-1].append(item)
        else:
            classes.append([item])
    return classes


@define(eq=False)
class Ring:
    """Staging slots for items such as buckets: a new item gets the slot, among those of its size class, that
    was used longest ago.

    A slot is a copy of `region` with a number, the bytes of its class's largest item and the items' dtype.
    Slots of a temporary region have no memory: they only limit how many items exist at a time.
    """

    region: Region
    classes: Sequence[SizeClass]
    stays: bool  # an item that has a slot is not given another
    dtypes: Mapping[int, Dtype] = ALIKE  # by item, where they are not all of the region's
    _by_use: list[Slots] = field(init=False, factory=list[Slots])  # of each class, oldest first
    _class_of: dict[int, Slots] = field(init=False, factory=dict[int, Slots])
    _held: dict[int, Region] = field(init=False, factory=dict[int, Region])
    _last: dict[Region, int] = field(init=False, factory=dict[Region, int])  # whom each slot was given to
    kept: set[int] = field(init=False, factory=set[int])  # items whose slot no other is given

    def __attrs_post_init__(self) -> None:
        for items, count, room in self.classes:
            numbers = range(n := sum(map(len, self._by_use)), n + count)
            nbytes, dtype = room if self.region.kept else 0, self.dtypes.get(items[0], self.region.dtype)
            own = self.region.index  # begins that of a slot
            slots = (evolve(self.region, index=(*own, k), nbytes=nbytes, dtype=dtype) for k in numbers)
            slots = OrderedDict.fromkeys(slots)
            self._by_use.append(slots)
            self._class_of |= dict.fromkeys(items, slots)

    @classmethod
    def reused(
        cls,
        region: Region,
        sizes: Mapping[int, int],
        groups: Iterable[Sequence[int]],
        depth: int,
        dtypes: Mapping[int, Dtype] = ALIKE,
    ) -> "Ring":
        """A ring whose items stay in their slots until another item needs one, and are used again. The items
        of a group in `groups` are used together; there are slots for any `depth` groups. `sizes` are bytes by
        item.

        >>> ring = Ring.reused(Region("slot"), {0: 64, 1: 64, 2: 64}, [[0], [1], [2]], depth=2)
        >>> [ring.take([item]) for item in (0, 1, 2, 2, 1, 0)]
        [[0], [1], [2], [], [], [0]]
        """
        groups, classes = [*groups], list[SizeClass]()
        for items in size_classes(sizes, dtypes):
            together = max(map(len, map({*items}.intersection, groups)))
            classes.append((items, min(len(items), depth * together), sizes[items[0]]))
        return cls(region, classes, stays=True, dtypes=dtypes)

    @classmethod
    def passing(
        cls,
        region: Region,
        sizes: Mapping[int, int],
        order: Sequence[int],
        depth: int,
        dtypes: Mapping[int, Dtype] = ALIKE,
        homes: Mapping[int, int] = ANYWHERE,
    ) -> "Ring":
        """A ring whose items pass once, in this `order`: any `depth` consecutive items have different slots,
        and items with different `homes` (devices) never share one. `sizes` are bytes by item.

        Size classes are joined where that needs less memory, so all slots take no more than `depth` largest
        items.

        >>> ring = Ring.passing(Region("slot"), {0: 900, 1: 64, 2: 64, 3: 64}, [3, 2, 1, 0], depth=2)
        >>> [ring.give(item).index[0] for item in (3, 2, 1, 0, 3)], [room for _, _, room in ring.classes]
        ([1, 2, 1, 0, 2], [900, 64])
        """
        order = [*order]
        order *= -(-depth // max(1, len(order)))  # they pass again, with the next micro-batch
        cheapest: list[tuple[int, list[SizeClass]]] = [(0, [])]
        kinds = {x: (dtypes.get(x, ""), homes.get(x, 0)) for x in sizes}
        classes = size_classes(sizes, kinds)
        for stop in range(1, len(classes) + 1):
            found: list[tuple[int, list[SizeClass]]] = []
            for start, (before, chosen) in enumerate(cheapest):
                items = [x for joined in classes[start:stop] for x in joined]
                if kinds[items[0]] != kinds[items[-1]]:
                    continue
                count, room = _most_in_a_row({*items}, order, depth), sizes[items[0]]
                found.append((before + count * room, [*chosen, (items, count, room)]))
            cheapest.append(min(found, key=lambda x: x[0]))
        return cls(region, cheapest[-1][1], stays=False, dtypes=dtypes)

    def __contains__(self, item: int) -> bool:
        return item in self._class_of

    def give(self, item: int) -> Region:
        """Assign a slot to `item` and return it: the one used longest ago of its size class, or, in a ring
        made by `reused`, the slot that it still has."""
        slots, slot = self._class_of[item], self._held.get(item) if self.stays else None
        if slot is None:
            kept = {self._held[x].index for x in self.kept}
            slot = next((x for x in slots if x.index not in kept), next(iter(slots)))
        if self._held.get(other := self._last.get(slot, item)) is slot:
            del self._held[other]
        slots.move_to_end(slot)
        self._held[item], self._last[slot] = slot, item
        return slot

    def take(self, items: Sequence[int]) -> list[int]:
        """Assign a slot to each of `items`. Returns the items that had none before: copy in their data."""
        new = [x for x in items if x not in self._held]
        for item in (*(x for x in items if x in self._held), *new):
            self.give(item)
        return new

    def slot(self, item: int) -> Region:
        """The slot that holds `item`. Raises PlanError if no slot does."""
        if item in self._held:
            return self._held[item]
        slot = "before one that gives it a slot, or after another took it"
        got = f"an operation on item {item} of {self.region} {slot}"
        refuse("recipe", got, do="yield the operation that brings it there just before", kind=PlanError)


def _most_in_a_row(items: set[int], order: Sequence[int], depth: int) -> int:
    """The largest number of `items` among any `depth` consecutive elements of `order`; at least 1."""
    sums = [*accumulate((x in items for x in order), initial=0)]
    return max([1, *(stop - start for start, stop in zip(sums, sums[depth:], strict=False))])
