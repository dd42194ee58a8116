"""The buckets that settings ask for: a layout, and the fields of a StepSpec about it."""

from collections.abc import Sequence
from typing import Any

from zfunc.core.layout import Layout, Parameter, make_layout, paged_buckets, part_size, resident_buckets
from zfunc.core.settings import DISK, StepSettings
from zfunc.options import AUTO


def lay_out(parameters: Sequence[Sequence[Parameter]], settings: StepSettings, world: int) -> Layout:
    """The layout of the segments' parameters, in buckets of the size set, or smaller with partial offload."""
    trainable = {p.name: p.numel for own in parameters for p in own if p.trainable}
    share = settings.disk_ratio if settings.state_on == DISK else settings.offload_ratio
    size = part_size(settings.bucket_size, sum(trainable.values()), share)
    return make_layout(
        parameters,
        bucket_size=size,
        world=world,
        within_segments=settings.streams or settings.group_size > 1,
        persistent=settings.persistent(parameters),
    )


def in_buckets(layout: Layout, settings: StepSettings) -> dict[str, Any]:
    """The fields of a StepSpec about buckets: the layout, staging, where each lives, and when it is updated."""
    share_on_host = 1.0 if settings.offload_ratio == AUTO else settings.offload_ratio
    on_disk = settings.disk_ratio if settings.state_on == DISK else 0.0
    late_last = settings.defer and settings.waits_for_norm  # the order of updates ascends
    return {
        "layout": layout,
        "grad_slots": settings.grad_slots,
        "host_slots": settings.host_slots,
        "stage": settings.stage,
        "group_size": settings.group_size,
        "params_on": settings.params_on,
        "weight_slots": settings.weight_slots,
        "activations_on": settings.activations_on,
        "resident": resident_buckets(layout, share_on_host),
        "paged": paged_buckets(layout, on_disk, ascending=late_last),
        "state_slots": settings.state_slots,
        "grads_on": settings.grads_on,
        "shadows": settings.speculate,
        "ema": settings.ema is not None,
        "delayed": settings.delayed,
        "defer": settings.defer,
        "norms": settings.norms,
    }
