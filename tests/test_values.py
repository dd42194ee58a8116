"""Values of the wrong type or out of range are refused where they are given: got, expected, what to do."""

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from small_models import Loss, regression
from torch import nn
from torch._export.utils import _compiling_state_context

import zfunc
from zfunc import errors, schedules
from zfunc.runtime import fault_injection

ODD = (
    *(None, True, False, -2, -1, 0, 1, 0.5, 1.5, math.nan, math.inf, "", "1", [1], {}, 1j),
    *(torch.tensor(1.0), torch.ones(2), np.float32(1), np.int64(1), np.bool_(True)),
    *(torch.optim.SGD, object(), nn.Identity()),
)


def segments() -> list[zfunc.Segment]:
    return [zfunc.segment("loss", Loss(8))]


SEGMENTS = segments()


def compiled(**settings: Any) -> Any:
    return zfunc.compile(SEGMENTS, **{"device": "cpu", "precision": "fp32", **settings})


PROGRAM = compiled()
STATE = zfunc.init(PROGRAM)


def nothing(_: Any) -> bool:
    return False


def none(x: Any) -> bool:
    return x is None


def real(x: Any) -> bool:
    """A number, also of NumPy; no truth value, and no tensor, which may be written to."""
    return (
        isinstance(x, int | float | np.number) and not isinstance(x, bool | np.bool_) and -math.inf < x < 3e38
    )


def positive(x: Any) -> bool:
    return real(x) and x > 0


def not_negative(x: Any) -> bool:
    return real(x) and x >= 0


def count(least: int) -> Callable[[Any], bool]:
    return lambda x: type(x) is int and least <= x < 2**63


def truth(x: Any) -> bool:
    return type(x) is bool


def maps(x: Any) -> bool:
    return x in (None, {}) if isinstance(x, dict | None) else False


def function(x: Any) -> bool:
    return callable(x) and not isinstance(x, type)


Takes = Callable[[Any], bool]


def a_share(x: Any) -> bool:
    return real(x) and 0 <= x <= 1


def or_none(takes: Takes) -> Takes:
    return lambda x: x is None or takes(x)


# What makes something, and of its arguments, by what they take.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Takes]]] = {
    "compile": (
        compiled,
        {
            "optimizer device group example schedule recipe": none,
            "micro_batches slots stage": count(1),
            "clip_norm": or_none(not_negative),
            "bucket_size": or_none(count(1)),
            "defer compile_segments": truth,
            "precision recompute": nothing,
            "state_on": nothing,
            "stages": maps,
            "patience": positive,
        },
    ),
    **{
        kind.__name__: (kind, {"stages": count(1)})
        for kind in (schedules.LoopedBFS, schedules.Interleaved1F1B, schedules.ZeroBubble)
    },
    "AdamW": (
        zfunc.AdamW,
        {
            "lr": lambda x: not_negative(x) or function(x),
            "betas": function,
            "eps weight_decay": not_negative,
            "decoupled": truth,
            "decay": callable,
            "moments": nothing,
        },
    ),
    "LossScale": (
        zfunc.LossScale,
        {
            "scale minimum": positive,
            "window steps": count(0),
            "hysteresis": count(1),
            "left last_overflow": count(-1),
            "consecutive": truth,
        },
    ),
    "Jitter": (fault_injection.Jitter, {"seed": count(-(2**63)), "seconds": not_negative}),
    "Save": (
        lambda **given: zfunc.Save(**{"folder": "x", **given}),
        {"folder": lambda x: isinstance(x, str), "keep": count(1), "extra": lambda x: x == {}},
    ),
    "segment": (
        lambda **given: zfunc.segment(**{"name": "a", "module": nn.Tanh(), **given}),
        {
            "name": lambda x: isinstance(x, str),
            "module": lambda x: isinstance(x, nn.Module),
        },
    ),
    "init": (
        lambda **given: zfunc.init(**{"program": PROGRAM, **given}),
        {"program": nothing, "seed": count(1 - 2**63), "params": maps, "loss_scale": none},
    ),
    "train_step": (  # what is right ends at the batch
        lambda **given: zfunc.train_step(
            **{"program": PROGRAM, "state": STATE, "batch": (torch.ones(2, 8), torch.ones(3)), **given}
        ),
        {"program state batch trace debug jitter faults save": nothing},
    ),
}
ARGUMENTS = [
    (make, name, takes)
    for make, arguments in CALLS.values()
    for names, takes in arguments.items()
    for name in names.split()
]


@pytest.mark.parametrize(("make", "argument", "takes"), ARGUMENTS, ids=[name for _, name, _ in ARGUMENTS])
def test_odd_values_are_taken_or_refused_with_what_to_do(
    make: Callable[..., Any], argument: str, takes: Takes
) -> None:
    for value in ODD:
        if takes(value):
            make(**{argument: value})
        else:
            with pytest.raises((ValueError, TypeError, zfunc.PlanError), match="(?s)got.*expected"):
                make(**{argument: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": 1e-46}, "eps: got 1e-46, expected a float32 of at least"),
        ({"eps": 1e-40}, "eps: got 1e-40, expected a float32 of at least"),
        ({"lr": 3e38}, r"rate\): got 3.0*6?e\+39, expected a finite number"),
        ({"lr": 1e3, "weight_decay": 1e37}, r"decay\): got"),
        ({"lr": torch.optim.SGD}, "lr: got"),
        ({"lr": 10**400}, "lr: got 1000.*expected a finite number"),
    ],
)
def test_what_float32_cannot_hold_is_refused_at_birth(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        zfunc.AdamW(**settings)


def test_a_learning_rate_too_large_in_some_step_is_refused_before_it() -> None:
    program = compiled(optimizer=zfunc.AdamW(lr=lambda step: 3e38 if step == 2 else 1e-3))
    state, _ = zfunc.train_step(program, zfunc.init(program), regression(4)(0))
    for _ in range(2):  # the state is unharmed
        with pytest.raises(ValueError, match=r"rate\): got .* expected a finite number"):
            zfunc.train_step(program, state, regression(4)(0))


NUMBERS: list[Callable[[float], Any]] = [
    torch.tensor,
    np.float64,
    lambda x: np.array([x]),
    lambda x: torch.tensor([x], dtype=torch.float64, requires_grad=True),
]


def test_a_rate_of_another_kind_is_a_float_in_the_metrics() -> None:
    for kind in NUMBERS:
        rate, betas = kind(0.25), (kind(0.5), kind(0.75))
        ways: list[Any] = [{"lr": lambda _, x=rate: x, "betas": lambda _, x=betas: x}]
        if kind is np.float64:  # the others may be written to
            ways.append({"lr": rate, "betas": betas})
        for given in ways:
            optimizer = zfunc.AdamW(**given)
            assert [*map(type, ((found := optimizer.factors(1))["lr"], *found["betas"]))] == [float] * 3
    program = compiled(optimizer=zfunc.AdamW(lr=lambda _: torch.tensor(0.25)))
    _, metrics = zfunc.train_step(program, zfunc.init(program), regression(4)(0))
    assert (type(metrics.lr), metrics.lr) == (float, 0.25)


def test_errors_that_a_loop_or_a_schedule_meets_are_names_of_zfunc_and_all_are_of_its_errors() -> None:
    assert zfunc.errors is errors
    for name in ("NonFiniteError", "PlanError"):
        assert getattr(zfunc, name) is getattr(errors, name)
        assert name in zfunc.__all__
    assert len(zfunc.__all__) <= 39


# --- inference mode --------------------------------------------------------------------------------------------


def test_what_allocates_is_refused_in_inference_mode_and_poisons_nothing(tmp_path: Any) -> None:
    program, batch = compiled(), regression(4)(0)
    state = zfunc.init(program)
    refused: dict[str, Callable[[], Any]] = {
        "segment": segments,
        "compile": compiled,
        "init": lambda: zfunc.init(program),
        "load": lambda: zfunc.load(tmp_path, program),
        "train_step": lambda: zfunc.train_step(program, state, batch),
        "flush": lambda: zfunc.flush(program, state),
    }
    with torch.inference_mode():
        for name, call in refused.items():
            with pytest.raises(RuntimeError, match=f"{name}: got inference mode, expected it off"):
                call()
        zfunc.params(program, state)  # these only read
        zfunc.evaluate(program, state, batch)
        zfunc.save(tmp_path, program, state)
    state, _ = zfunc.train_step(program, state, batch)
    zfunc.save(tmp_path, program, state)
    zfunc.train_step(program, zfunc.load(tmp_path, program), batch)


@pytest.mark.parametrize(
    ("mode", "action"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), r"autocast for 'cpu', .*: pass `precision`"),
        (torch.autograd.detect_anomaly, "anomaly detection, .*: pass debug=True"),
        (
            lambda: patch.object(torch.compiler, "is_dynamo_compiling", lambda: True),
            "a call inside torch.compile, expected one outside: .* pass compile_segments=True",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_of_one_thread_are_refused_because_lanes_have_their_own(mode: Any, action: str) -> None:
    """A trace would keep them, too."""
    program, batch = compiled(), regression(4)(0)
    state = zfunc.init(program)
    refused: dict[str, Callable[[], Any]] = {
        "compile": compiled,
        "train_step": lambda: zfunc.train_step(program, state, batch),
        "flush": lambda: zfunc.flush(program, state),
        "apply": lambda: zfunc.evaluate(program, state, batch),
    }
    with mode():
        for name, call in refused.items():
            with pytest.raises(RuntimeError, match=f"{name}: got {action}"):
                call()
    zfunc.train_step(program, state, batch)


def test_a_step_runs_while_another_thread_cuts_a_model() -> None:
    program, batch = compiled(), regression(4)(0)
    with _compiling_state_context():  # of the process, as in a cut and in torch.export
        zfunc.train_step(program, zfunc.init(program), batch)


@pytest.mark.slow  # the import of Dynamo
def test_a_step_in_torch_compile_is_refused_though_dynamo_runs_untraced_what_raises() -> None:
    program, batch = compiled(), regression(4)(0)
    with pytest.raises(RuntimeError, match="^train_step: got a call inside torch.compile"):
        torch.compile(zfunc.train_step)(program, zfunc.init(program), batch)


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Any, targets: Any = None) -> Any:
        if targets is None:
            return {"x": x, "views": [self.weight[2:], self.frozen.view(2, 4), self.shift]}
        return (x * self.weight - targets[:, None]).square().mean()


def test_apply_hands_out_no_live_views() -> None:
    program = zfunc.compile([zfunc.segment("r", Returns())], device="cpu", precision="fp32")
    state = zfunc.init(program)
    x, targets = regression(4)(0)
    before = zfunc.evaluate(program, state, (x, targets))
    for view in zfunc.apply(program, state, x)["views"]:
        view.zero_()
    assert zfunc.evaluate(program, state, (x, targets)) == before
    assert zfunc.params(program, state)["r.frozen"].eq(1).all()
