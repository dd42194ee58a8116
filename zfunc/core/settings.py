"""The settings of a training step: one field each, with its default, its check, and help that names the unit.

`zfunc.compile` and `zfunc.plan` take them by name, in signature and docstring, and the command line derives its
flags. A new setting is one field here and the code where it has an effect.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal, NoReturn, cast

from attrs import Attribute, evolve, fields, frozen

from zfunc.core.display import brief, counted
from zfunc.core.dtypes import PRECISIONS, Dtype, Precision, one_precision
from zfunc.core.layout import Bucket
from zfunc.core.optimizer_state import MOMENTS, Moments
from zfunc.core.pipeline import Order
from zfunc.core.setting_values import (
    BY_DEVICE,
    CHECK,
    CHOICES,
    DEVICE_SHARE,
    DISK,
    DISK_SHARE,
    ELSEWHERE,
    GONE,
    MOST_DEVICES,
    MOST_MICRO_BATCHES,
    MOST_TILES,
    OF_OPTIMIZER,
    ONE_DEVICE,
    PLACES,
    RECOMPUTE,
    SHARES,
    TIERS_OF,
    UPDATE_SHARES,
    Recompute,
    Schedule,
    clip_norm_or_none,
    globs_of_names,
    joined,
    make_setting,
    name_or_callable,
    one_or_more,
    order_or_group_size,
    schedule_for,
    size_or_names,
    swap_folders,
    word_or_number,
)
from zfunc.core.shares import InShares, InTiers, every_part_has_one, shares_of, word_of, words_of
from zfunc.errors import SettingTypeError, refuse, refuse_unknown, setting
from zfunc.options import AUTO, one_of
from zfunc.values import NamedSettings, number, of_type, truth, whole


def _refuse_name(name: str, known: Sequence[str]) -> NoReturn:
    if name in GONE:
        refuse(name, "a setting that is gone", "what is instead of it", GONE[name], SettingTypeError)
    if name in ELSEWHERE:
        refuse_unknown(name, known, ELSEWHERE[name], near=False)
    refuse_unknown(name, known)


@frozen(kw_only=True)
class StepSettings(NamedSettings):
    """The settings of a step; `zfunc.compile` documents each. Raises TypeError or ValueError for a bad value.

    >>> StepSettings(micro_batches=2).slots
    2
    >>> StepSettings(micro_batches=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zfunc.errors.SettingError: micro_batches: got 0, expected a whole number of at least 1...: pass 1 or more
    """

    refuse_name: ClassVar = staticmethod(_refuse_name)

    precision: Precision = make_setting(
        "bf16",
        one_precision,
        "how it runs",
        f"dtype of parameters and gradients on the device: {joined(PRECISIONS)}",
        "Master weights are always fp32; fp16 trains with dynamic loss scaling.",
        tries=("fp32", "bf16"),
        common=True,
    )
    fp32_params: tuple[str, ...] = make_setting(
        (),
        globs_of_names,
        "how it runs",
        "parameters that are fp32 on the device in any precision: globs of names, joined by commas",
        'Such as "*norm*,*.router": their gradients are fp32 too, and their values those of the master. A glob may '
        "name what comes before a dot. The code of a segment decides how they meet activations of the precision: "
        "an operation of torch promotes these to fp32, or refuses them.",
        note=" (default: none)",
        metavar="GLOB,...",
    )
    schedule: str | Schedule = make_setting(
        BY_DEVICE,
        partial(name_or_callable, "Graph -> Plan"),
        "how it runs",
        "what runs when, and on which lane",
        "The name of a class in `zfunc.schedules`, or anything callable `Graph -> Plan`. By device: `Overlapped` "
        "with an accelerator; on a CPU, where lanes share the cores and overlap costs time, `SharedCores`.",
        tries=("Overlapped", "Interleaved", "CriticalPath"),
        common=True,
    )
    recompute: str = make_setting(
        "all",
        InShares((*RECOMPUTE, AUTO)),
        "how it runs",
        f"what backward recomputes of forward: {joined(RECOMPUTE)}",
        "With all, a segment keeps only its input; with none, all that autograd keeps; with min-cut, the residuals "
        f"that are cheapest to keep. {SHARES} "
        '"auto", with `example`: min-cut if it fits, else all; `zfunc.plan` tries shares of the segments, too.',
        tries=(*("none", "min-cut", "all:0.25,min-cut", "all,min-cut", "all:0.75,min-cut", "all"),),
        common=True,
    )
    tiles: int | Literal["auto"] = make_setting(
        1,
        word_or_number((AUTO,), "a number of tiles", partial(one_or_more, most=MOST_TILES)),
        "how it runs",
        "equal tiles of a row of tokens, which pass a segment one by one; its memory follows the tile",
        "Tokens of a segment depend on each other through causal attention alone, which takes all keys so far. The "
        "last segment passes whole, unless its loss is a sum over tokens, as that of zfunc's models. Weights are "
        "moved once, and their gradients added in fp32. Backward recomputes all. "
        '"auto", with `example`: as few as fit.',
        metavar=f"N|{AUTO}",
        tries=(AUTO,),
    )
    compile_segments: bool | Literal["reduce-overhead"] = make_setting(
        False,
        word_or_number(("reduce-overhead",), "True or False", truth),
        "how it runs",
        "compile the blocks with torch.compile",
        '"reduce-overhead" is torch\'s mode that launches each pass as one CUDA graph: docs/devices.md.',
        note="; needs a compiler",
    )
    deterministic: bool = make_setting(
        False,
        truth,
        "how it runs",
        "the same bits in every run on a GPU; slower attention",
        "An operation without a deterministic kernel is an error that names it. Costs, and what holds "
        "without it: docs/devices.md.",
    )
    micro_batches: int = make_setting(
        1,
        partial(one_or_more, most=MOST_MICRO_BATCHES),
        "step",
        "equal parts of a batch; their gradients are accumulated",
        f"In fp32, on the host. At most {MOST_MICRO_BATCHES:,}.",
        tries=(AUTO,),
        common=True,
    )
    clip_norm: float | None = make_setting(
        None,
        clip_norm_or_none,
        "step",
        "largest global gradient norm",
        "None or 0 does not clip. As `torch.nn.utils.clip_grad_norm_`; no update starts before the norm is known.",
        note="; 0 does not clip",
        name="clip",
    )
    norms: bool = make_setting(
        False,
        truth,
        "step",
        "report the norm of every parameter's gradient",
        "In `metrics.norms`, by name, before clipping; measured with the global norm, which keeps its bits.",
    )
    devices: int = make_setting(
        1,
        partial(one_or_more, most=MOST_DEVICES),
        "step",
        "devices of this process; each makes the passes of some segments",
        "A pipeline, in the order of `order`, with the bits of one device at the same `micro_batches`.",
    )
    pp: int = make_setting(
        1,
        partial(one_or_more, most=MOST_DEVICES),
        "step",
        "pipeline stages, each on ranks of its own; these are data parallel",
        "A pipeline, in the order of `order`, with the bits of one stage at the same `micro_batches`. The ranks of "
        "a stage follow one another, and the n-th of each get the same rows.",
    )
    order: str | int | Order = make_setting(
        BY_DEVICE,
        order_or_group_size,
        "step",
        "order of passes: horizontal (micro-batches one by one), vertical (all pass a segment, then the next) or "
        "so many at a time; of several devices one that also places the segments, such as OneFOneB",
        "Same result. Vertical moves parameters once a pass, whatever the number of micro-batches, and keeps what "
        "every one of them leaves for backward. By device: on one horizontal, or vertical where parameters are not "
        "on the device; on several `OneFOneB`. Of several, the name of a class in `zfunc.schedules.ORDERS`, an "
        "object of one, a CSV file of torch.distributed.pipelining, or a function `(devices, segments, "
        "micro_batches)` that returns for each device its passes.",
        metavar="horizontal|vertical|NAME|N",
        tries=("horizontal", "vertical", 2, 4, 8),
    )
    stage: int = make_setting(
        2,
        partial(whole, least=1, most=3),
        "step",
        "ZeRO stage of several ranks: 3 shards parameters too, 2 reduces each micro-batch's gradient, 1 their sum",
        "In stage 3 a segment's parameters are gathered before its forward and backward. The sum of stage 1 is on "
        "the device, not sharded, and has the dtype of `precision`.",
        metavar="1|2|3",
        tries=(1, 2, 3),
    )
    ema: float | None = make_setting(
        None,
        partial(number, positive=True, below=1, hint="pass a decay such as 0.999, or leave it out"),
        "step",
        "keep a moving average of the weights, with this decay a step, such as 0.999",
        "In fp32, where the optimizer state is: 4 bytes a parameter. It begins as the first weights; a skipped "
        "step leaves it, those of frozen weights move. `params`, `apply` and `evaluate` read it with `ema=True`.",
        note=" (default: none)",
    )
    params_on: Literal["device", "host", "disk", "auto"] = make_setting(
        "device",
        one_of((*TIERS_OF["params_on"], AUTO)),
        "offload",
        f"where parameters live: {joined(TIERS_OF['params_on'])}; from host and disk those of a segment "
        "are fetched before it runs",
        'Same result. In stage 3 each rank has its slice there. "auto", with `example`: on the device if they fit, '
        "else on the host, several ranks in stage 3, or on the disk with the state. On the disk they are part of "
        "the optimizer state; frozen ones are there too.",
        tries=TIERS_OF["params_on"],
        common=True,
    )
    persistent_params: int | str = make_setting(
        0,
        size_or_names,
        "offload",
        "parameters that stay on the device where others are streamed: of at most so many elements, or by name",
        "Same result. Names are those of segments or parameters, joined by commas, a number among them: "
        '"embed,head,100000". Without effect where parameters are on the device and not sharded.',
        metavar="N|NAME,...",
        tries=(AUTO, 0),
    )
    activations_on: str = make_setting(
        "device",
        InShares((*TIERS_OF["activations_on"], AUTO)),
        "offload",
        f"where the inputs of segments wait for backward: {joined(TIERS_OF['activations_on'])}; "
        "the disk needs folders, `swap`",
        f"Same result. Residuals of recompute min-cut wait there as well. {SHARES} "
        '"auto", with `example`: on the device if they fit, or the nearest place that helps.',
        tries=(
            *("device", "host,device", "host:0.75,device", "host"),
            *("disk:0.25,host", "disk,host", "disk"),
        ),
        common=True,
    )
    keys_on: Literal["device", "host"] = make_setting(
        "device",
        one_of(PLACES),
        "offload",
        f"where keys and values of a row in tiles are while it passes a segment: {joined(PLACES)}",
        "Same result. With the sums of their gradients they are in pinned memory, and some are copied while "
        "others are attended, so that device memory follows the tile alone. Windows and packed documents are "
        "attended in operations of torch then, on CUDA too. An evaluation has keys on the device.",
        tries=PLACES,
    )
    moments: Moments = make_setting(
        "fp32",
        one_of(MOMENTS),
        "offload",
        f"format of Adam's moments on the host: {joined(MOMENTS)}; smaller is faster",
        "That of the optimizer.",
        tries=MOMENTS,
        common=True,
    )
    bucket_size: int | None = make_setting(
        None,
        one_or_more,
        "buffers",
        "elements that are moved and updated as a unit",
        "Without it 50,000,000 for every 16 ranks, at least that and at most 500,000,000, because a collective "
        "takes longer to start the more ranks there are.",
        note=" (default: 50,000,000, and up to 500,000,000 among more than 16 ranks)",
        tries=tuple(n * 1_000_000 for n in (500, 200, 100, 50, 25, 10)),
    )
    slots: int = make_setting(
        2,
        one_or_more,
        "buffers",
        "buffers for each kind of data that moves, each way; for optimizer state one more",
        "Streamed parameters have room for so many segments, gradients and copies for so many buckets in a row, in "
        "classes of size: a large embedding does not decide the size of all.",
        tries=(4, 3, 2, 1),
    )
    state_on: str = make_setting(
        "host",
        InTiers((*PLACES, DISK, AUTO)),
        "offload",
        "where the optimizer state lives: device, host, disk, or a share as in device:0.25,host or host:0.25,disk; "
        "the disk needs folders, `swap`",
        "Same result. A bucket's state is read before its update and written after it. Shares are whole buckets, "
        "which are smaller then: the device has those that backward completes last, the host beside the disk those "
        'that are updated last. "auto", with `example`: on the host if it fits, else, with swap, on the disk; '
        '"device:auto,host": as much on the device as fits, the rest on the host and nothing on the disk.',
        tries=(DEVICE_SHARE, "host", DISK_SHARE, DISK),
        common=True,
    )
    update_on: str = make_setting(
        "host",
        InShares((*PLACES, AUTO)),
        "offload",
        f"where optimizer state that is not on the device is updated: {joined(PLACES)}",
        "Same result, but for the last digits of the norm of sums that stay on an accelerator, which measures it. "
        "A bucket's state is copied to the device and back; its gradient waits where `grads_on` says. Several are "
        'for shares of the buckets, from the first. "auto", with `example`: the share that '
        "takes least, by the measured rates of host and copies, if it fits.",
        tries=UPDATE_SHARES[::-1],
    )
    grads_on: Literal["device", "host", "disk", "auto"] = make_setting(
        "device",
        one_of((*TIERS_OF["grads_on"], AUTO)),
        "offload",
        f"where gradients wait for the norm or for a deferred update: {joined(TIERS_OF['grads_on'])}; "
        "the last with `state_on=disk`",
        "Same result. Those of updates on the host wait in its memory at the nearest. Sums that the host makes, of "
        "several micro-batches or of tied parameters, wait there. Several devices add up micro-batches themselves "
        'where parameters are fetched, unless this is host. "auto", with `example`: the nearest that fits.',
        tries=TIERS_OF["grads_on"],
    )
    swap: tuple[str, ...] = make_setting(
        (),
        swap_folders,
        "offload",
        "folder for what lives on the disk; once for each drive",
        "A state there is a checkpoint: training goes on from it with `zfunc.load`.",
        note=" (default: none)",
        metavar="FOLDER",
        common=True,
    )
    commit_every: int = make_setting(
        1,
        one_or_more,
        "offload",
        "with `state_on=disk`, steps between two that can be gone back to after a crash",
        "Such a step also writes what memory has of the state, and waits until the disk has it.",
    )
    defer: bool = make_setting(
        False,
        truth,
        "offload",
        "with clipping or fp16, update in the next step, behind its forward; same result, same memory",
        "`params`, `apply`, `evaluate`, `save` and `zfunc.flush` make an update that is left, so with several "
        "ranks all of them have to call these.",
        tries=(False, True),
    )

    def __repr__(self) -> str:
        return brief(self)

    def __attrs_post_init__(self) -> None:
        """Check every setting, and the combinations of settings that exclude each other."""
        for f in fields(StepSettings):
            value = getattr(self, f.name)
            if value is None and f.name == "schedule":
                value = f.default
            if value is not None or f.default is not None:
                object.__setattr__(self, f.name, f.metadata[CHECK](f.name, value))
        for name, given, other, present, expected, do in _exclusions(self):
            if given and present:
                got = f"{getattr(self, name)!r} with {setting(other, getattr(self, other))}"
                refuse(name, got, expected, do)

    @property
    def state_slots(self) -> int:
        """The number of staging slots for buckets' states: one arrives, one is updated, one leaves."""
        return self.slots + 1

    @property
    def streams(self) -> bool:
        """Whether parameters are whole on the device only while a segment uses them."""
        return self.params_on in ("host", DISK) or self.stage == 3

    @property
    def splits_master(self) -> bool:
        """Whether bf16 parameters are the high half of split fp32 master weights, not a separate copy."""
        return self.params_on in ("host", DISK) and self.precision == "bf16"

    @property
    def moves(self) -> bool:
        """Whether weights or activations may be at other device addresses in backward than in forward,
        because they are streamed or offloaded."""
        return self.streams or self.stashes

    @property
    def stashes(self) -> bool:
        """Whether any segment's activations are on the host or the disk between forward and backward."""
        return self.spills_activations or "host" in words_of(self.activations_on)

    @property
    def spills_activations(self) -> bool:
        """Whether any segment's activations are on the disk between forward and backward."""
        return DISK in words_of(self.activations_on)

    @property
    def pages_state(self) -> bool:
        """Whether a part of the optimizer state is kept on the disk."""
        return DISK in words_of(self.state_on)

    @property
    def fits_state(self) -> bool:
        """Whether the device keeps as much of the optimizer state as fits: `state_on` "device:auto,host"."""
        return self.state_on == DEVICE_SHARE

    def share_of_state(self, place: str) -> float:
        """The share (0 to 1) of the optimizer state in `place` ("device", "host", "disk"), by `state_on`."""
        return float(shares_of(self.state_on).get(place, 0))

    @property
    def keeps_all(self) -> bool:
        """Whether some segment keeps all activations that autograd would keep (`recompute` "none")."""
        return "none" in words_of(self.recompute)

    def recompute_of(self, s: int, num_segments: int) -> Recompute:
        """The mode of recomputation ("all", "min-cut" or "none") that `recompute` names for segment `s`."""
        return cast("Recompute", word_of(self.recompute, s, num_segments))

    def recompute_modes(self, num_segments: int) -> list[Recompute]:
        """Each segment's mode of recomputation. The last segment never repeats its forward: backward is next."""
        modes: list[Recompute] = [self.recompute_of(s, num_segments) for s in range(num_segments)]
        if modes[-1] == "all":
            modes[-1] = "min-cut" if self.compile_segments else "none"
        return modes

    def dtype_of(self, bucket: Bucket) -> Dtype:
        """The dtype of a bucket's parameters and gradients on the device."""
        return "uint8" if bucket.is_bytes else "fp32" if bucket.in_fp32 else self.precision

    def check_shares(self, num_segments: int) -> None:
        """Raise ValueError if a part of `recompute` or `activations_on` has none of the `num_segments` segments."""
        for name in ("recompute", "activations_on"):
            if not every_part_has_one(text := getattr(self, name), num_segments):
                got = f"{text!r} for {counted(num_segments, 'segment')}"
                refuse(name, got, "shares that have a segment each", "leave some out, or change the numbers")

    def placed(self, world: int, *, disk: bool, **others: Sequence[Any]) -> "Iterator[StepSettings]":
        """Yield copies of these settings with a place ("device", "host" or "disk") for each setting that is
        "auto", nearest places first. What moves fewest bytes leaves the device first: activations, then
        gradients, parameters, optimizer state. Combinations that contradict each other are left out.

        The disk is tried only with `disk`. With `world` above 1, parameters off the device need stage 3.
        `others` are the values to try for further settings, by name.
        """
        choices = {
            name: [x for x in tiers if disk or x != DISK]
            if getattr(self, name) == AUTO
            else [getattr(self, name)]
            for name, tiers in {**CHOICES, **others}.items()
        }
        for places in product(*choices.values()):
            changes: dict[str, Any] = dict(zip(choices, places, strict=True))
            if self.grads_on == AUTO and changes["grads_on"] == changes["update_on"] == "host":
                continue  # they wait there on "device", too
            sliced = self.params_on == AUTO and changes["params_on"] != "device" and world > 1
            with suppress(ValueError):
                yield self.at(**changes, **({"stage": 3} if sliced else {}))

    def at(self, **places: Any) -> "StepSettings":
        """A copy of these settings with the values `places`, by name, such as params_on="host"; `swap` is
        emptied if nothing is then on the disk."""
        settings = evolve(self, swap=(), **places)
        return evolve(settings, swap=self.swap) if settings.needs_folders else settings

    @property
    def automatic(self) -> list[str]:
        """Names of the settings that are "auto": `recompute`, and those of places, such as `params_on`."""
        return [name for name in CHOICES if getattr(self, name) == AUTO]

    @property
    def needs_folders(self) -> bool:
        """Whether state, parameters, gradients or activations are in the folders of `swap`."""
        return self.pages_state or DISK in (self.params_on, self.grads_on) or self.spills_activations

    @property
    def in_flight(self) -> int:
        """How many micro-batches' activations of a segment may at most wait for backward at a time."""
        return self.group_size if self.stages == 1 else self.micro_batches

    @property
    def sums_on_device(self) -> bool:
        """Whether a device may sum gradients over all micro-batches: one device, if all of them pass a
        segment before the next segment; several, if parameters are fetched and `grads_on` is not "host"."""
        if self.stages > 1:
            return self.micro_batches > 1 and self.streams and self.grads_on != "host"
        return 1 < self.micro_batches <= self.group_size

    @property
    def stages(self) -> int:
        """The number of devices in a pipeline: devices of one process or, with pp, stages of several ranks."""
        return max(self.devices, self.pp)

    @property
    def group_size(self) -> int:
        """How many micro-batches pass a segment before any passes the next one; 1 with several devices."""
        if self.stages > 1:
            return 1
        usual = ONE_DEVICE["vertical" if self.streams else "horizontal"]
        size = self.order if isinstance(self.order, int) else ONE_DEVICE.get(str(self.order), usual)
        return min(size, self.micro_batches)

    @property
    def waits_for_norm(self) -> bool:
        """Whether updates wait for the norm of the step's whole gradient, for clipping or fp16."""
        return self.clip_norm is not None or self.precision == "fp16"

    def check_folders(self) -> None:
        """Raise ValueError if some data is to be on the disk, but the setting `swap` names no folder."""
        if self.needs_folders and not self.swap:
            name = next(x for x in TIERS_OF if DISK in words_of(getattr(self, x)))
            got = f"no folder with {setting(name, getattr(self, name))}"
            refuse("swap", got, "one on each drive to use", "pass `swap`")

    def scheduled(self, *, on_cpu: bool) -> "StepSettings":
        """The settings with the default schedule of the device, CPU or accelerator, unless they name one.

        >>> StepSettings().scheduled(on_cpu=True).schedule, StepSettings().scheduled(on_cpu=False).schedule
        ('SharedCores', 'Overlapped')
        """
        return evolve(self, schedule=schedule_for(self.schedule, on_cpu=on_cpu))

    @property
    def schedule_name(self) -> str:
        """The name of the setting `schedule`, or, if it is an object, the name of its class."""
        return self.schedule if isinstance(self.schedule, str) else type(self.schedule).__name__


def _exclusions(s: StepSettings) -> Iterator[tuple[str, Any, str, Any, str, str]]:
    """Yield the pairs of settings that exclude each other, as (name, whether it is set, other name, whether
    that is set, values expected of the first, advice for the error)."""
    off_device, in_memory = s.params_on in ("host", DISK), not s.pages_state and s.state_on != AUTO
    left = "what backward keeps would be parameters of forward, which have left the device by then"
    for name, given, why in (
        ("compile_segments", s.compile_segments, "a compiled segment keeps what it chooses"),
        ("params_on", off_device, left),
        ("stage", s.stage == 3, left),
        ("activations_on", s.stashes, "what autograd keeps cannot be moved"),
    ):
        yield name, given, "recompute", s.keeps_all, "'all' or 'min-cut'", f"pass one of them: {why}"
    again = "pass that: backward makes a tile's forward again"
    yield "tiles", s.tiles != 1, "recompute", s.recompute != "all", "'all'", again
    one = "leave one out: a stage has one device"
    yield "pp", s.pp != 1, "devices", s.devices != 1, "1 of one of the two", one
    of_one = isinstance(s.order, int) or str(s.order) in ONE_DEVICE
    of_several = s.order not in (BY_DEVICE, AUTO) and not of_one
    for name in ("devices", "pp"):
        do = "pass one such as 'OneFOneB', or leave it out"
        yield "order", of_one, name, getattr(s, name) != 1, "an order of several devices", do
    expected, do = (
        "horizontal, vertical or a number",
        f"pass one, leave it out, or pass {setting('devices', 2)} or more, or `pp`",
    )
    yield "order", of_several, "devices", s.stages == 1, expected, do
    for name, given in (("params_on", off_device), ("order", s.group_size > 1)):
        yield "stage", s.stage == 1, name, given, "2 or 3", "pass one of them, or leave it out"
    for name, given, or_else in (
        ("params_on", s.params_on == DISK, ""),
        ("grads_on", s.grads_on == DISK, ""),
        (
            "swap",
            s.swap and not s.needs_folders and s.activations_on != AUTO,
            f" or {setting('activations_on', DISK)}",
        ),
    ):
        expected = setting("state_on", DISK) + or_else
        yield name, given, "state_on", in_memory, expected, "pass that, or leave it out"
    for name in ("state_on", "params_on", "grads_on"):
        on_disk, one = DISK in words_of(getattr(s, name)), "leave the other out: a swap space has no averages"
        yield name, on_disk, "ema", s.ema is not None, "one of the two", one


def settings_with(settings: StepSettings | None, changes: Mapping[str, Any]) -> StepSettings:
    """`settings`, or the defaults, with `changes` by name. Raises TypeError for an unknown name."""
    settings = StepSettings() if settings is None else settings
    expected = "a zfunc.core.settings.StepSettings: pass one, or pass settings by name"
    of_type("settings", settings, StepSettings, expected)
    known = list(named_settings())
    for name in (x for x in changes if x not in known):
        _refuse_name(name, known)
    return evolve(settings, **changes)


def named_settings() -> "dict[str, Attribute[Any]]":
    """The fields of StepSettings that `zfunc.compile` takes by name: all but those that the optimizer has."""
    return {f.name: f for f in fields(StepSettings) if f.name not in OF_OPTIMIZER}
