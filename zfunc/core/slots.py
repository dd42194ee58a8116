"""Staging slots in classes of size, so that one large item does not decide the size of all.

What is used again gets the least recently used slot of its class, so what was used last is still there when a pass
turns round. What only passes through gets the slots of its class in turn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from attrs import define, field, frozen


@frozen
class Slot:
    """Slot number `index` of the class `size_class`, with room for `numel` elements."""

    size_class: int
    index: int
    numel: int

    @property
    def key(self) -> tuple[int, int]:
        """Its class and its number in that."""
        return self.size_class, self.index


def size_classes(sizes: Mapping[int, int]) -> list[list[int]]:
    """Items in classes of similar size, the largest first: a class has the sizes above half its largest.

    >>> size_classes({0: 1000, 1: 60, 2: 64, 3: 30, 4: 40})
    [[0], [2, 1, 4], [3]]
    """
    classes: list[list[int]] = []
    for item in sorted(sizes, key=lambda x: (-sizes[x], x)):
        if classes and 2 * sizes[item] > sizes[classes[-1][0]]:
            classes[-1].append(item)
        else:
            classes.append([item])
    return classes


@define(eq=False)
class SlotAllocator:
    """Slots for items of these `sizes`, with room for `depth` of the `groups` that are in use together.

    >>> slots = SlotAllocator({0: 64, 1: 64, 2: 64}, [[0], [1], [2]], depth=2)
    >>> [slots.take([item]) for item in (0, 1, 2, 2, 1, 0)]
    [[0], [1], [2], [], [], [0]]
    """

    sizes: Mapping[int, int]
    groups: Iterable[Sequence[int]]
    depth: int
    # Of each class, the oldest use first.
    _by_use: list[list[Slot]] = field(init=False, factory=list[list[Slot]])
    _class_of: dict[int, int] = field(init=False, factory=dict[int, int])
    _held: dict[int, Slot] = field(init=False, factory=dict[int, Slot])

    def __attrs_post_init__(self) -> None:
        for c, items in enumerate(size_classes(self.sizes)):
            together = max(len(set(items).intersection(group)) for group in self.groups)
            count = min(len(items), self.depth * together)
            self._by_use.append([Slot(c, k, self.sizes[items[0]]) for k in range(count)])
            self._class_of |= dict.fromkeys(items, c)

    def take(self, items: Sequence[int]) -> list[int]:
        """Give each item a slot; returns those that no slot held. All `items` are of one group."""
        held = [x for x in items if x in self._held]
        for item in held:
            self._touch(self._held[item])
        new = [x for x in items if x not in self._held]
        for item in new:
            slot = self._by_use[self._class_of[item]][0]
            before = next((x for x, held in self._held.items() if held is slot), None)
            if before is not None:
                del self._held[before]
            self._held[item] = slot
            self._touch(slot)
        return new

    def slot(self, item: int) -> Slot:
        """The slot that holds an item."""
        return self._held[item]

    def _touch(self, slot: Slot) -> None:
        slots = self._by_use[slot.size_class]
        slots.remove(slot)
        slots.append(slot)


@define(eq=False)
class StagingSlots:
    """Slots for items of these `sizes` that pass through in this `order`; any `depth` in a row have different ones.

    Classes are joined where that takes less memory, so there is never more than `depth` times the largest.

    >>> slots = StagingSlots({0: 900, 1: 64, 2: 64, 3: 64}, [3, 2, 1, 0], depth=2)
    >>> slots.numels, [slots.next(item) for item in (3, 2, 1, 0, 3)], [slots.of(item) for item in range(4)]
    ([900, 64, 64], [1, 2, 1, 0, 2], [0, 1, 2, 1])
    """

    sizes: Mapping[int, int]
    order: Sequence[int]
    depth: int
    numels: list[int] = field(init=False, factory=list[int])  # of each slot
    _slots: dict[int, range] = field(init=False, factory=dict[int, range])  # of each item's class
    _fixed: dict[int, int] = field(init=False, factory=dict[int, int])
    _given: Counter[range] = field(init=False, factory=Counter[range])  # to how many items

    def __attrs_post_init__(self) -> None:
        order = [*self.order]
        while 0 < len(order) < self.depth:  # they pass again, with the next micro-batch
            order += self.order
        cheapest: list[tuple[int, list[tuple[list[int], int]]]] = [(0, [])]
        classes = size_classes(self.sizes)
        for stop in range(1, len(classes) + 1):
            joined = [[x for items in classes[start:stop] for x in items] for start in range(stop)]
            counts = [self._most_in_a_row({*items}, order) for items in joined]
            cheapest.append(
                min(
                    (
                        (before + count * self.sizes[items[0]], [*chosen, (items, count)])
                        for (before, chosen), items, count in zip(cheapest, joined, counts, strict=True)
                    ),
                    key=lambda found: found[0],
                )
            )
        for items, count in cheapest[-1][1]:
            slots = range(len(self.numels), len(self.numels) + count)
            self.numels += [self.sizes[items[0]]] * count
            for n, item in enumerate(sorted(items)):
                self._slots[item], self._fixed[item] = slots, slots[n % count]

    def _most_in_a_row(self, items: set[int], order: Sequence[int]) -> int:
        sums = [*accumulate((x in items for x in order), initial=0)]
        return max([1, *(stop - start for start, stop in zip(sums, sums[self.depth :], strict=False))])

    def next(self, item: int) -> int:
        """The number of the next slot of an item's class."""
        slots = self._slots[item]
        self._given[slots] += 1
        return slots[(self._given[slots] - 1) % len(slots)]

    def of(self, item: int) -> int:
        """The number of the slot that an item always has, where items pass in ascending or descending order."""
        return self._fixed[item]
