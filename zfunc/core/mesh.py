"""Which device makes which pass of a step, and which ranks train together: `StepSpec.mesh` answers for all."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import chain, pairwise

from attrs import frozen

from zfunc.core.layout import Layout
from zfunc.core.pipeline import B, F, I, InGroups, Order, Pass, R, W, passes_listed
from zfunc.core.settings import StepSettings
from zfunc.errors import PlanError, refuse, setting


@frozen
class DeviceMesh:
    """Which device of a step makes which passes (forward or backward of a micro-batch through a segment).
    Devices are those of one process, which share host memory and disk, or, with pp, pipeline stages of
    `world` ranks each, which share none.

    `order` lists the passes of each device; without it one device makes all. `stage` is the pipeline stage of
    this rank, None for a mesh of all.
    """

    layout: Layout
    settings: StepSettings
    world: int
    order: Order | None
    stage: int | None
    peers: bool = False  # whether devices of a process copy from each other's memory, past the host's

    @cached_property
    def over_ranks(self) -> bool:
        """Whether the step is a pipeline over ranks (pp above 1), whose devices share no memory."""
        return self.settings.pp > 1

    @property
    def several_ranks(self) -> bool:
        """Whether several ranks train together, by data or as stages of a pipeline."""
        return self.world > 1 or self.over_ranks

    @cached_property
    def trained(self) -> list[int]:
        """Ascending numbers of the segments with trainable parameters."""
        return [s for s in range(len(self.layout.segments)) if self.layout.buckets_of(s)]

    @cached_property
    def tied(self) -> dict[int, set[int]]:
        """For each tied bucket, the segments whose gradients are added up to the bucket's gradient."""
        buckets = (x for x in self.layout.buckets if len(x.deliveries) > 1)
        return {x.index: {*chain(*x.deliveries)} for x in buckets}

    @property
    def repeated(self) -> list[int]:
        """Numbers of the segments whose forward may be recomputed in a pass of its own, before their
        backward; none with rows in tiles or compiled segments."""
        if self.settings.tiles != 1 or self.settings.compile_segments:
            return []
        modes = self.settings.recompute_modes(len(self.layout.segments))
        return [s for s, mode in enumerate(modes) if mode == "all"]

    @cached_property
    def listed(self) -> list[list[Pass]]:
        """The passes of each device, in the order in which the device makes them."""
        order, settings = self.order or InGroups(self.settings.group_size), self.settings
        sizes = settings.stages, settings.micro_batches, self.trained, len(self.layout.segments)
        return passes_listed(order, *sizes, self.repeated)

    @cached_property
    def made_on(self) -> dict[tuple[str, int, int], int]:
        """The device number (with pp the stage) that makes each pass, by (letter of its kind, micro-batch,
        segment); "I", the input half of backward, is entered as "B". Empty for one device."""
        lists = self.listed if self.settings.stages > 1 else ()
        return {(B if x.way == I else x.way, x.m, x.s): x.device for x in chain(*lists)}

    @cached_property
    def makers(self) -> dict[tuple[str, int], set[int]]:
        """The numbers of the devices that make passes of a kind through a segment, by (letter of the kind,
        such as "F" or "B", segment); empty if there is one device."""
        makers: dict[tuple[str, int], set[int]] = {}
        for (way, _, s), device in self.made_on.items():
            makers.setdefault((way, s), set()).add(device)
        return makers

    @cached_property
    def homes(self) -> dict[int, set[int]]:
        """By bucket index, the devices whose passes read its parameters; empty if there is one device."""
        homes: dict[int, set[int]] = {}
        for (_, s), devices in self.makers.items():
            for b in self.layout.weights_of(s):
                homes.setdefault(b, set()).update(devices)
        return homes

    @cached_property
    def parts(self) -> frozenset[tuple[str, int]]:
        """The parts of backward that are separate passes in some micro-batch, as pairs (letter, segment): "W"
        for the gradients of weights, "R" for the recomputation."""
        return frozenset(x for x in self.makers if x[0] in (W, R))

    @property
    def one_sum_at_a_time(self) -> bool:
        """Whether, for every bucket, each device adds to at most one of its gradient sums, and each segment
        has its backward on one device only."""
        pulled = {s: devices for (way, s), devices in self.makers.items() if way == B}
        sums = [[pulled[s] for *_, s in own] for own in (x.deliveries for x in self.layout.buckets) if pulled]
        apart = all(len(set[int]().union(*own)) == len(own) for own in sums)
        return apart and all(len(devices) == 1 for devices in pulled.values())

    def device_of(self, way: str, m: int, s: int) -> int:
        """The number of the device that makes the pass of kind `way` ("F" forward, "B" backward, also for its
        half "I") of micro-batch `m` through segment `s`; 0 if there is one device."""
        return self.made_on.get((way, m, s), 0)

    def run_of(self, way: str, m: int, s: int) -> int:
        """The first of those consecutive segments up to `s`, in the order of passes of kind `way`, whose passes
        of micro-batch `m` are on the device of that of `s`: what they pass on has not come from another since."""
        if not self.made_on:  # one device: no walk over all segments for each pass of each
            return 0 if way == F else len(self.layout.segments) - 1
        here, step = self.device_of(way, m, s), -1 if way == F else 1
        while 0 <= s + step < len(self.layout.segments) and self.device_of(way, m, s + step) == here:
            s += step
        return s

    def segments_on(self, device: int, *ways: str) -> list[int]:
        """Ascending numbers of the segments through which `device` makes passes of any kind in `ways`,
        letters such as "F" (forward) and "B" (backward)."""
        segments, makers = range(len(self.layout.segments)), self.makers
        if not makers:
            return [*segments]
        return [s for s in segments if any(device in makers.get((way, s), ()) for way in ways)]

    def hops(self, way: str) -> list[int]:
        """Numbers of the segments whose input (`way` "F"), or whose input's gradient ("B"), some micro-batch
        has to copy from one device to another."""
        of = self.made_on
        return sorted({s for (x, m, s), d in of.items() if x == way and s and of.get((x, m, s - 1), d) != d})

    def check_passes(self, stay: Collection[int], stateful: Collection[int]) -> None:
        """Raise PlanError if the order of passes on several devices contradicts other settings, or needs data
        on another device. The segments in `stay` keep activations on the device; forward of those in
        `stateful` changes module buffers."""
        settings = self.settings
        if any(way == W for way, _ in self.parts) and (settings.tiles != 1 or settings.compile_segments):
            name = "tiles" if settings.tiles != 1 else "compile_segments"
            got = f"a backward in two halves with {setting(name, getattr(settings, name))}, whose backward is one"
            do = f"pass {setting('order', 'OneFOneB')}, or leave `{name}` out"
            refuse("order", got, do=do, kind=PlanError)
        for x in chain(*self.listed):
            m, s, forward = x.m, x.s, self.device_of(F, x.m, x.s)
            if x.way in (W, R) and x.device != (other := self.device_of(B, m, s)):
                got = f"{x} on device {x.device} and the rest of that backward on device {other}"
                expected = "one device, which has what is kept between them"
                refuse("order", got, expected, f"list {x} for device {other}", PlanError)
            if x.way in (B, I) and x.device != forward and (self.over_ranks or s in stay):
                activations = f"its forward on device {forward}, which has its activations"
                way_on = f"in one process {setting('activations_on', 'host')} for all but the last segment"
                got = f"{x} on device {x.device} and {activations}"
                refuse("order", got, do=f"expected one device, or {way_on}", kind=PlanError)
            losses = self.over_ranks and s == len(self.layout.segments) - 1
            if forward != self.device_of(F, 0, s) and (losses or s in stateful):
                why = "whose forward changes buffers" if s in stateful else "whose losses one rank adds up"
                got = f"segment {s}, {why}, on several devices"
                do = "pass an order that keeps a segment on a device, such as 'OneFOneB'"
                refuse("order", got, "one", do, PlanError)

    def check_homes(self, anywhere: Callable[[int], bool]) -> None:
        """Raise PlanError if passes on several devices read the parameters of one bucket, unless the devices
        are of one process and `anywhere(bucket index)` is true."""
        for b, devices in self.homes.items():
            if len(devices) > 1 and (self.over_ranks or not anywhere(b)):
                on_host = setting("params_on", "host")
                way_on = f"{on_host}, with {setting('update_on', 'host')}"
                if self.over_ranks:
                    way_on = (
                        f"{setting('devices', self.settings.pp)}, {on_host} in one process, or untie them"
                    )
                got = f"passes with the weights {self._names(b)} on the devices {sorted(devices)}"
                one_order = "an order that has those segments on one, as DualPipeV the first and last"
                refuse("order", got, "one", f"pass {way_on}, or {one_order}", PlanError)

    def check_sums(self, passes: Sequence[Pass]) -> None:
        """With ZeRO stage 1, raise PlanError if `passes`, in serial order, add gradients of a tied weight in
        another order than a single device does, which would change the bits of the sum."""
        for b, segments in self.tied.items() if self.settings.stage == 1 else ():
            for x, y in pairwise(x for x in passes if x.ended and x.way in (B, W) and x.s in segments):
                if (x.m, -x.s) > (y.m, -y.s):
                    got = (
                        f"{x} before {y} with {setting('stage', 1)} and the weights {self._names(b)}, which "
                        "it adds up in this order"
                    )
                    expected = "one micro-batch after the other through all of their segments"
                    refuse("order", got, expected, f"pass {setting('stage', 2)}, or another order", PlanError)

    def _names(self, b: int) -> str:
        return ", ".join(span.name for span in self.layout.all_buckets[b].spans[:3])
