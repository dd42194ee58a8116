"""Staging slots in classes of size, so that one large item does not decide the size of all.

A new item gets the least recently used slot of its class, so what was used last is still there when a pass turns
round.
"""

from collections.abc import Iterable, Mapping, Sequence

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
    _by_use: list[list[Slot]] = field(
        init=False, factory=list[list[Slot]]
    )  # of each class, the oldest use first
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
            self._held = {x: s for x, s in self._held.items() if s != slot}
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
