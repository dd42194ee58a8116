"""What lives on the disk as operations: every plan verifies, and every transfer is one that something needs."""

from itertools import product
from typing import Any

import pytest
from table import FROZEN, SCHEDULES, TIED_THREE, spec

from zfunc.core.extents import BLOCK
from zfunc.core.graph import Graph
from zfunc.core.layout import Parameter
from zfunc.core.memory_model import peak_memory
from zfunc.core.recipes import checkpoint, flush_recipe, recipe_of
from zfunc.core.spec import StepSpec
from zfunc.core.verifier import verify

PLACES = [
    *product(("device", "host", "disk"), ("host", "disk"), (False, True), (False, True), (1, 3), (1, 2))
]


def on_disk(params_on: Any, grads_on: Any, defer: bool, commit: bool, slots: int, world: int) -> StepSpec:
    return spec(
        FROZEN if world > 1 else TIED_THREE,
        **{"params_on": params_on, "grads_on": grads_on, "defer": defer, "commit": commit, "world": world},
        state_on="disk",
        **{"barrier": True, "slots": slots},
        **{
            "bucket_size": 64,
            "stage": 2 if params_on == "device" else 3,
            "paged": {0} if world > 1 else {0, 2},
        },
        state_format="8bit",
    )


def everything(job: StepSpec) -> list[int]:
    """All buckets, frozen ones too."""
    return [b.index for b in job.layout.all_buckets]


@pytest.mark.parametrize("places", PLACES[::3], ids=str)
def test_every_plan_of_them_verifies(places: tuple[Any, ...]) -> None:
    job = on_disk(*places)
    for recipe in (recipe_of(job), checkpoint, *([flush_recipe] if job.deferred else [])):
        graph = Graph(tuple(recipe(job)))
        for schedule in SCHEDULES.values():
            verify(schedule(graph))


@pytest.mark.parametrize("places", PLACES[1::3], ids=str)
def test_a_state_is_read_before_its_update_and_written_after_it(places: tuple[Any, ...]) -> None:
    job = on_disk(*places)
    ops = list(recipe_of(job)(job))
    at = {op.name: i for i, op in enumerate(ops)}
    for b in job.offloaded:
        outs = [op for op in ops if op.verb in ("page_out", "page_out_all") and op.index == (b,)]
        assert (f"page_in[0,{b}]" in at) == (b in job.paged)
        assert len(outs) == (b in job.paged or job.commit)
        assert (f"copy_state[{b}]" in at) == (outs != [] and outs[0].verb == "page_out_all")
        if b in job.paged:
            (outs,) = outs
            assert at[f"page_in[0,{b}]"] < at[f"update[{b}]"] < at[outs.name]
            ins = ops[at[f"page_in[0,{b}]"]]
            assert ins.nbytes == job.extents[b].moved_bytes
            assert outs.nbytes == (job.extents[b].nbytes if job.commit else ins.nbytes)
        assert (f"spill[{b}]" in at) == (f"unspill[{b}]" in at) == (job.places[b].gradient == "disk")
    assert ("commit" in at) == job.commit
    if job.commit:
        assert all(at["commit"] > i for name, i in at.items() if name.startswith("page_out"))
    read = {op.index[1] for op in ops if op.verb == "page_in_weights"}
    assert read == {b for b in everything(job) if job.places[b].params == "disk"}


def test_reading_parameters_moves_what_a_bucket_has_whatever_its_page_has_room_for() -> None:
    """Buckets of one class of size share pages."""
    sizes = {"first": 3000, "second": 5000, "last": 5000}
    job = spec(
        [[Parameter(name, (numel,))] for name, numel in sizes.items()],
        **{
            "state_on": "disk",
            "params_on": "disk",
            "paged": {0, 1, 2},
            "bucket_size": 5000,
            "state_format": "16bit",
        },
    )
    ops = [op for op in recipe_of(job)(job) if op.verb == "page_in_weights"]
    assert {op.writes[0].nbytes for op in ops} == {3 * BLOCK}
    assert {op.index[1]: op.nbytes for op in ops} == {0: 2 * BLOCK, 1: 3 * BLOCK, 2: 3 * BLOCK}


def test_a_slot_less_is_less_memory_and_one_is_enough() -> None:
    def pinned(slots: int) -> int:
        job = on_disk("disk", "disk", defer=True, commit=True, slots=slots, world=1)
        return peak_memory(SCHEDULES["Overlapped"](Graph(tuple(recipe_of(job)(job)))))["pinned"].nbytes

    assert pinned(1) < pinned(2)
