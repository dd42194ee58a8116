"""The batch: three numbers and the ranks, of which any two give the third.

The invariant: in a Batch that exists, all that are known multiply to the first.
"""

from attrs import frozen

from zfunc.deepspeed.values import Values

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@frozen
class Batch:
    """`train` sequences of a step, of all ranks together, in `accumulation` micro-batches of `micro` on each of
    `world` ranks. None is what nobody says.
    """

    train: int | None
    micro: int | None
    accumulation: int
    world: int = 1

    def __str__(self) -> str:
        """As a product."""
        return f"{self.train} = {self.micro} x {self.accumulation} micro-batches x {self.world} ranks"


def batch(values: Values, world: int) -> Batch:
    """The batch that the three keys say, on `world` ranks. Raises ValueError if they contradict each other.

    >>> from zfunc.deepspeed import check, read
    >>> str(batch(check(read({"train_batch_size": 16, "gradient_accumulation_steps": 2})), world=4))
    '16 = 2 x 2 micro-batches x 4 ranks'
    """
    train, micro = values[_TRAIN], values[_MICRO]
    steps: int | None = values[_STEPS]
    if train is None:
        steps = steps or 1
        return Batch(None if micro is None else micro * steps * world, micro, steps, world)
    if micro is None:
        steps = steps or 1
        _divides(values, train, steps * world, f"{_STEPS} {steps} x {world} ranks")
        return Batch(train, train // (steps * world), steps, world)
    if steps is None:
        _divides(values, train, micro * world, f"{_MICRO} {micro} x {world} ranks")
        return Batch(train, micro, train // (micro * world), world)
    if train != micro * steps * world:
        raise ValueError(
            f"{values.source}: got {_TRAIN} {train}, {_MICRO} {micro} and {_STEPS} {steps} on {world} ranks, "
            f"expected the first to be {micro} x {steps} x {world} = {micro * steps * world}: correct one, or "
            "leave one out"
        )
    return Batch(train, micro, steps, world)


def _divides(values: Values, train: int, parts: int, told: str) -> None:
    if train % parts:
        near = f"{train // parts * parts} or {(train // parts + 1) * parts}" if train > parts else f"{parts}"
        raise ValueError(
            f"{values.source}: got {_TRAIN} {train}, expected a multiple of {told} = {parts}: make it {near}"
        )
