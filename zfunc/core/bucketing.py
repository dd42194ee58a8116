"""The buckets that settings ask for: a layout, which buckets live where, and the fields of a StepSpec about it."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from zfunc.core.layout import Bucket, Layout, Parameter, make_layout
from zfunc.core.setting_values import DISK
from zfunc.core.settings import StepSettings
from zfunc.errors import did_you_mean, refuse, setting

BUCKET_SIZE, LARGEST = 50_000_000, 500_000_000  # elements where none are set, of few ranks and of any number
FEW_RANKS = 16
MIN_PARTIAL_BUCKETS = 32  # with partial offload: a share of the state is a number of whole buckets


def lay_out(
    parameters: Sequence[Sequence[Parameter]],
    settings: StepSettings,
    world: int,
    known: dict[Any, Layout] | None = None,
) -> Layout:
    """Lay out the `parameters` of each segment in buckets of at most `settings.bucket_size` elements
    (default: `default_bucket_size(world)`; less where the optimizer state is divided between device and
    host). `known` is a cache of layouts of these parameters, which this call reads and fills.

    Raises ValueError for parameters off the device on several ranks unless `stage` is 3.
    """
    if settings.params_on in ("host", DISK) and world > 1 and settings.stage != 3:
        got = f"{settings.params_on!r} with {setting('stage', settings.stage)} on {world} ranks"
        refuse("params_on", got, f"{setting('stage', 3)}, in which each keeps its slice there", "pass it")
    trainable = {p.name: p.numel for own in parameters for p in own if p.trainable}
    size = settings.bucket_size or default_bucket_size(world)
    if "," in settings.state_on or "," in settings.update_on:  # shares are whole buckets
        size = max(1, min(size, -(-sum(trainable.values()) // MIN_PARTIAL_BUCKETS)))
    options: dict[str, Any] = {
        "bucket_size": size,
        "world": world,
        "within_segments": settings.streams or settings.group_size > 1 or settings.stages > 1,
        "persistent": persistent_names(parameters, settings),
        "in_fp32": fp32_names(parameters, settings),
    }
    known, key = {} if known is None else known, (*options.values(),)
    if key not in known:
        known[key] = make_layout(parameters, **options)
    return known[key]


def persistent_names(parameters: Sequence[Sequence[Parameter]], settings: StepSettings) -> frozenset[str]:
    """Names of the parameters that stay on the device while the others are streamed.

    Raises ValueError for a name that no parameter has.

    >>> parameters = [[Parameter("embed.tok", (500, 8)), Parameter("embed.norm", (8,))], [Parameter("b", (9,))]]
    >>> streamed = (StepSettings(stage=3, persistent_params=x) for x in (8, ["embed", 9]))
    >>> [sorted(persistent_names(parameters, settings)) for settings in streamed]
    [['embed.norm'], ['b', 'embed.norm', 'embed.tok']]
    """
    parts = str(settings.persistent_params).split(",")
    most = max([0, *(int(part) for part in parts if part.isdecimal())])
    known = {p.name: p for own in parameters for p in own}
    chosen = {p.name for p in known.values() if p.numel <= most}
    for part in parts:
        if part.isdecimal():  # no segment of that name, as a list of modules has
            continue
        named = {name for name in known if f"{name}.".startswith(f"{part}.")}
        if not named:
            names = [*dict.fromkeys(n.rpartition(".")[0] or n for n in known), *known]
            expected = "a number of elements, or the names of segments or parameters"
            similar = did_you_mean(part, names)
            refuse("persistent_params", repr(part), expected + similar, f"pass such as {names[0]!r}")
        chosen |= named
    return frozenset(chosen if settings.streams else ())


def fp32_names(parameters: Sequence[Sequence[Parameter]], settings: StepSettings) -> frozenset[str]:
    """Names of the parameters that are fp32 on the device, by `fp32_params` or their own `fp32_in`; none if all
    are, with precision "fp32".

    Raises ValueError for a glob that matches no name.

    >>> parameters = [[Parameter("embed.tok", (500, 8)), Parameter("embed.norm.bias", (8,))]]
    >>> [sorted(fp32_names(parameters, StepSettings(fp32_params=x))) for x in ("*.norm", "embed,*k")]
    [['embed.norm.bias'], ['embed.norm.bias', 'embed.tok']]
    """
    names = dict.fromkeys(p.name for own in parameters for p in own)
    chosen = {p.name for own in parameters for p in own if settings.precision in p.fp32_in}
    for glob in settings.fp32_params:
        matched = {x for x in names if fnmatchcase(x, glob) or fnmatchcase(x, f"{glob}.*")}
        if not matched:
            expected = f"a glob of names of parameters{did_you_mean(glob, [*names])}"
            refuse("fp32_params", repr(glob), expected, f"pass such as {next(iter(names))!r}")
        chosen |= matched
    encoded = {p.name for own in parameters for p in own if p.encodes}
    return frozenset(chosen - encoded if settings.precision != "fp32" else ())


def in_buckets(layout: Layout, settings: StepSettings) -> dict[str, Any]:
    """The arguments of `StepSpec` that depend on `layout` and `settings`, by name: both of these, and the
    indices of the buckets whose optimizer state is on the device ("resident") and on the disk ("paged")."""
    late_last = settings.defer and settings.waits_for_norm  # the order of updates ascends
    on_device, on_disk = (settings.share_of_state(place) for place in ("device", DISK))
    return {
        "layout": layout,
        "settings": settings,
        "resident": resident_buckets(layout, on_device),
        "paged": paged_buckets(layout, on_disk, ascending=late_last),
    }


def default_bucket_size(world: int) -> int:
    """Elements of a bucket on `world` ranks by default: from 32 ranks on in proportion to `world`, up to a limit.

    >>> [default_bucket_size(world) for world in (1, 16, 64, 1024)]
    [50000000, 50000000, 200000000, 500000000]
    """
    return min(LARGEST, BUCKET_SIZE * max(1, world // FEW_RANKS))


def resident_buckets(layout: Layout, share: float) -> frozenset[int]:
    """The buckets whose optimizer state is on the device, if a `share` of it (0 to 1) is there.

    The share is rounded to whole buckets. The buckets that backward completes last stay on the device, because
    backward does not hide their copies to the host and back.

    >>> layout = make_layout([[Parameter(str(n), (64,))] for n in range(4)], bucket_size=64)
    >>> sorted(resident_buckets(layout, 0.5)), sorted(resident_buckets(layout, 0.0))
    ([0, 1], [])
    """
    return _share(layout.buckets, share)


def paged_buckets(layout: Layout, share: float, *, ascending: bool) -> frozenset[int]:
    """The buckets whose optimizer state is on the disk, if a `share` of it (0 to 1) is, in whole buckets.

    The buckets updated last stay in memory: those of the highest index if updates are `ascending`, else lowest.

    >>> layout = make_layout([[Parameter(str(n), (64,))] for n in range(4)], bucket_size=64)
    >>> sorted(paged_buckets(layout, 0.75, ascending=True)), sorted(paged_buckets(layout, 0.75, ascending=False))
    ([0, 1, 2], [1, 2, 3])
    """
    last_first = layout.buckets[:: -1 if ascending else 1]
    return frozenset(b.index for b in layout.buckets) - _share(last_first, 1 - share)


def _share(buckets: Sequence[Bucket], share: float) -> frozenset[int]:
    """Indices of the first of `buckets` that make up `share` (0 to 1, rounded to whole buckets) of all elements."""
    left = share * sum(b.numel for b in buckets)
    chosen: set[int] = set()
    for bucket in buckets:
        if bucket.numel / 2 <= left or share == 1:
            chosen.add(bucket.index)
            left -= bucket.numel
    return frozenset(chosen)
