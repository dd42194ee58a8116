"""A recipe of one's own: what is checked of it before a step is run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS
from table import SPECS, Segments, layouts, spec

import zfunc
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.recipes import deferred, plain, zero_offload
from zfunc.core.spec import StepSpec
from zfunc.engine.program.program import Program
from zfunc.errors import PlanError


def compiled(recipe: Any, **more: Any) -> Program:
    segments, _ = MODELS["odd sizes"]()
    return zfunc.compile(segments, precision="fp32", device="cpu", recipe=recipe, **more)


MINE = Region("mine", (), 4, "host", "state", "fp32")


def without(*verbs: str) -> Callable[[StepSpec], Iterator[Op]]:
    return lambda spec: (op for op in zero_offload(spec) if op.verb not in verbs)


def test_zero_offload_is_the_default_recipe() -> None:
    assert compiled(zero_offload).plan == compiled(None).plan


@given(layouts(), st.data())
def test_plain_is_zero_offload_where_nothing_else_is_set(
    made: tuple[Segments, int, int], data: st.DataObject
) -> None:
    segments, bucket_size, _ = made
    own = spec(
        segments,
        bucket_size=bucket_size,
        state_format=data.draw(st.sampled_from(["fp32", "16bit", "8bit", "muon-8bit"])),
        micro_batches=data.draw(st.integers(1, 3)),
        recompute=data.draw(st.tuples(*[st.booleans()] * len(segments))),
        **{name: data.draw(st.booleans()) for name in ("barrier", "save")},
        slots=data.draw(st.integers(1, 3)),
    )
    if any(len(b.deliveries) > 1 or own.places[b.index].matrices for b in own.layout.buckets):
        with pytest.raises(PlanError, match="tied parameters or updates of whole matrices"):
            Graph(plain(own))
    else:
        assert Graph(plain(own)) == Graph(zero_offload(own))


def test_plain_refuses_other_settings_and_trains() -> None:
    with pytest.raises(PlanError, match="plain: got params_on, expected one device"):
        compiled(plain, params_on="host")
    with pytest.raises(PlanError, match="plain: got ranks"):
        Graph(plain(SPECS["tied neighbours"]))
    assert compiled(plain, clip_norm=1.0).plan == compiled(None, clip_norm=1.0).plan


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (without("global_norm"), "a step in which nothing writes norm"),
        (lambda spec: zero_offload(evolve(spec, save=False)), "that saves in which nothing writes published"),
        (
            lambda spec: [*zero_offload(spec), Op("mine", (), "host")],
            r"operations \['mine'\] without a stage",
        ),
        (
            lambda spec: (
                evolve(op, reads=tuple(r for r in op.reads if op.verb != "update" or r.buffer != "decision"))
                for op in zero_offload(spec)
            ),
            r"got update\[\d+\], whose effect leaves the step.*let it read the region decision",
        ),
        (
            lambda spec: (
                evolve(op, writes=(*op.writes, MINE)) if op.verb == "global_norm" else op
                for op in zero_offload(spec)
            ),
            r"got mine with the lifetime 'state'",
        ),
        (deferred, "got a spec that defers no update, expected one: pass defer=True and `clip_norm`"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(recipe: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compiled(recipe)


def test_a_recipe_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match="recipe: got 'zero_offload', expected a function"):
        compiled("zero_offload")


def test_a_custom_operation_with_a_stage_runs() -> None:
    seen: list[str] = []
    recipe = lambda spec: [*zero_offload(spec), Op("mine", (), "host")]  # noqa: E731
    program = compiled(recipe, stages={"mine": lambda op, _mem, _step: seen.append(op.name)})
    zfunc.train_step(program, zfunc.init(program), MODELS["odd sizes"]()[1](0))
    assert seen == ["mine"]
