"""The batch: three numbers and the ranks, of which any two give the third.

The invariant: in a BatchSizes that exists, all that are known multiply to the first.
"""

from attrs import frozen

from zfunc.train.deepspeed.values import ResolvedValues

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@frozen
class BatchSizes:
    """`train` sequences of a step, of all ranks together, in `accumulation` micro-batches of `micro` on each of
    `world` ranks.
    """

    train: int
    micro: int
    accumulation: int
    world: int = 1

    def __str__(self) -> str:
        """As a product."""
        return f"{self.train} = {self.micro} x {self.accumulation} micro-batches x {self.world} ranks"


def batch_sizes(values: ResolvedValues, world: int) -> BatchSizes:
    """The batch that the three keys say, on `world` ranks. Raises ValueError if they contradict each other, or if
    neither size is said, which is an error there too.

    >>> from zfunc.train.deepspeed.values import resolve_values
    >>> from zfunc.train.deepspeed.reading import read_config_file
    >>> config = read_config_file({"train_batch_size": 16, "gradient_accumulation_steps": 2})
    >>> str(batch_sizes(resolve_values(config), world=4))
    '16 = 2 x 2 micro-batches x 4 ranks'
    """
    train, micro = values[_TRAIN], values[_MICRO]
    steps: int | None = values[_STEPS]
    if train is None and micro is None:
        raise ValueError(
            f"{values.source}: got neither {_TRAIN} nor {_MICRO}, expected one of them, as DeepSpeed does: write "
            f'one, or pass --batch-size, or from_deepspeed(..., given={{"{_TRAIN}": ...}})'
        )
    if train is None:
        steps = steps or 1
        return BatchSizes(micro * steps * world, micro, steps, world)
    if micro is None:
        steps = steps or 1
        _divides(values, train, steps * world, f"{_STEPS} {steps} x {world} ranks")
        return BatchSizes(train, train // (steps * world), steps, world)
    if steps is None:
        _divides(values, train, micro * world, f"{_MICRO} {micro} x {world} ranks")
        return BatchSizes(train, micro, train // (micro * world), world)
    if train != micro * steps * world:
        raise ValueError(
            f"{values.source}: got {_TRAIN} {train}, {_MICRO} {micro} and {_STEPS} {steps} on {world} ranks, "
            f"expected the first to be {micro} x {steps} x {world} = {micro * steps * world}: correct one, or "
            "leave one out"
        )
    return BatchSizes(train, micro, steps, world)


def left_open(values: ResolvedValues) -> bool:
    """Whether the file leaves the batch to the command line in words, and nobody says it."""
    sizes = _TRAIN, _MICRO
    return any(name in values.auto for name in sizes) and not any(values.says(name) for name in sizes)


def _divides(values: ResolvedValues, train: int, parts: int, told: str) -> None:
    if train % parts:
        near = f"{train // parts * parts} or {(train // parts + 1) * parts}" if train > parts else f"{parts}"
        raise ValueError(
            f"{values.source}: got {_TRAIN} {train}, expected a multiple of {told} = {parts}: make it {near}"
        )
