"""Bad arguments of an update are refused on the host and on a device: got, expected, and nothing is touched."""

import math
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_update import locked
from torch import Tensor
from torch._subclasses import FakeTensorMode
from update_law import ROWS, State, exact, fresh

import zfunc
from zfunc.core.decision import StepDecision
from zfunc.errors import SettingTypeError
from zfunc.optim.by_name import CLASSES
from zfunc.optim.kernel_loader import cpu_adam as kernel
from zfunc.optim.updates import accumulate_, square_sum

N = 128
Arguments = dict[str, Any]
Change = Callable[[State], Any]
FIRST = StepDecision(False, 1.0, 1, {"lr": 3e38})


def assert_refused(call: Callable[..., Any], error: type[Exception], words: str, **arguments: Any) -> None:
    kept = [
        x for given in arguments.values() for x in (given.values() if isinstance(given, dict) else [given])
    ]
    readable = [
        x
        for x in kept
        if type(x) is Tensor
        and (x.is_cpu and x.layout is torch.strided and x.untyped_storage().nbytes() >= x.nbytes)
    ]
    before = [x.clone() for x in readable]
    with pytest.raises(error, match=words) as caught:
        call(**arguments)
    assert "got" in str(caught.value)
    assert "expected" in str(caught.value)
    assert all(torch.equal(exact(x), exact(y)) for x, y in zip(readable, before, strict=True))


# ---- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"step": 0}, ValueError, "step"),
        ({"step": 1.0}, ValueError, "step"),
        ({"step": True}, ValueError, "step"),
        ({"step": 10**400}, ValueError, "step"),
        ({"lr": math.nan}, ValueError, "lr"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"lr": "1"}, TypeError, "lr"),
        ({"lr": torch.ones(2)}, TypeError, "lr"),
        ({"lr": torch.tensor(1e-3)}, TypeError, r"lr: got tensor\(.*, expected a plain number"),
        ({"lr": np.array(1e-3)}, TypeError, r"lr: got array\(.*, expected a plain number"),
        ({"weight_decay": torch.tensor(0.1)}, TypeError, r"weight_decay: got tensor\("),
        ({"eps": torch.tensor(1e-8)}, TypeError, r"eps: got tensor\(.*: pass float\(\) of it"),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.99))}, ValueError, r"betas: got \(tensor\("),
        ({"betas": torch.tensor([0.9, 0.99])}, ValueError, r"betas: got tensor\(.*\.tolist\(\)"),
        ({"lr": np.ones(2)}, TypeError, "lr"),
        ({"lr": 3e38}, ValueError, "as rate"),
        ({"lr": 1e38, "weight_decay": 1e30}, ValueError, "as decay"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"betas": (-0.1, 0.9)}, ValueError, "betas"),
        ({"betas": 0.9}, ValueError, "betas"),
        ({"eps": -1e-8}, ValueError, "eps"),
        ({"weight_decay": math.inf}, ValueError, "weight_decay"),
        ({"decoupled": 1}, TypeError, "decoupled"),
        ({"grad_scale": math.inf}, ValueError, "grad_scale"),
        ({"grad_scale": -math.inf}, ValueError, "grad_scale"),
        ({"grad_scale": 1e39}, ValueError, "grad_scale"),
        ({"threads": 0}, ValueError, "threads"),
        ({"threads": 1.5}, ValueError, "threads"),
    ],
)
def test_bad_numbers(change: Arguments, error: type[Exception], match: str) -> None:
    good = {**fresh(N, "fp32"), "grad": torch.ones(N), "step": 1, "lr": 1e-3}
    assert_refused(zfunc.adam_update_, error, match, **{**good, **change})


DECAY = "settings .as decay.: got 1.0000000000000001e.60, expected a finite number"
SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: zfunc.SGD(nesterov=True), "nesterov: got momentum=0.0 and dampening=0.0, expected a momentum above"),
    (lambda: zfunc.SGD(momentum=-1), "momentum: got -1, expected a finite number of at least 0"),
    (lambda: zfunc.SGD(lr=math.inf), "lr: got inf, expected a finite number of at least 0"),
    (lambda: zfunc.Lion(betas=(0.9, 1.0)), r"betas: got \(0.9, 1.0\), expected two numbers in \[0, 1\)"),
    (lambda: zfunc.Lion(1e30, weight_decay=1e30), f"Lion's {DECAY}"),
    (lambda: zfunc.Adagrad(eps=1e-40), "eps: got 1e-40, expected a float32 of at least"),
    (lambda: zfunc.Adagrad(moments="4bit"), "moments: got '4bit', expected one of fp32, 16bit, 8bit"),
    (lambda: zfunc.Adagrad(lr_decay=-1), "lr_decay: got -1, expected a finite number of at least 0"),
    (lambda: zfunc.Adafactor(eps=1e-3), "eps: got 0.001, expected two numbers"),  # pyright: ignore
    (lambda: zfunc.Adafactor(eps=(None, -1.0)), r"eps\[1\]: got -1.0, expected a finite number of at least 0"),  # pyright: ignore
    (lambda: zfunc.Adafactor(beta2_decay=0.8), "beta2_decay: got 0.8, expected a finite number and at most 0"),
    (lambda: zfunc.Adafactor(d=0.5), "d: got 0.5, expected a finite number of at least 1"),
    (lambda: zfunc.Adafactor(1e30, weight_decay=1e30), f"Adafactor's {DECAY}"),
    (lambda: zfunc.Adafactor(moments="4bit"), "moments: got '4bit', expected one of fp32, 16bit, 8bit"),
    (lambda: zfunc.Muon(momentum=1.0), r"momentum: got 1.0, expected a finite number of at least 0 and below 1"),
    (lambda: zfunc.Muon(ns_steps=0), "ns_steps: got 0, expected a whole number of at least 1 and at most 99"),
    (lambda: zfunc.Muon(adjust_lr_fn="rms"), "adjust_lr_fn: got 'rms', expected one of original, match_rms_adamw"),  # pyright: ignore
    (lambda: zfunc.Muon(eps=-1), "eps: got -1, expected a finite number of at least 0"),
    (lambda: zfunc.Muon(3e38).rule_step(FIRST, 0, (9, 1)), "lr of a matrix"),
]  # fmt: skip


@pytest.mark.parametrize("make", CLASSES.values())
def test_an_unknown_setting_is_refused_with_the_nearest(make: Any) -> None:
    words = "weight_dacay: got an unknown setting, expected one of .*lr.* mean 'weight_decay'"
    with pytest.raises(SettingTypeError, match=words):
        make(weight_dacay=0.1)


def test_a_class_with_an_init_of_its_own_takes_its_arguments() -> None:
    class Slow(zfunc.SGD):
        def __init__(self, slowness: float) -> None:
            super().__init__(1 / slowness)

    class OfAny(zfunc.SGD):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)

    assert Slow(slowness=4.0).lr == OfAny(lr=0.25).lr == 0.25
    with pytest.raises(SettingTypeError, match="lr: got an unknown setting, expected one of slowness"):
        Slow(lr=0.1)  # pyright: ignore


@pytest.mark.parametrize(("make", "message"), SETTINGS)
def test_a_wrong_setting_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_no_class_changes_what_the_state_of_another_is() -> None:
    with pytest.raises(
        TypeError, match="expected that of zfunc.optim.lion.Lion, whose checkpoints have this name"
    ):
        type("Lion", (zfunc.Lion,), {"state": ("exp_avg", "other"), "__module__": __name__})


# ---- buffers -----------------------------------------------------------------------------------------


def resized(nbytes: int) -> Tensor:
    x = torch.ones(N)
    x.untyped_storage().resize_(nbytes)
    return x


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(N)


BUFFERS: list[tuple[str, str, Change, type[Exception], str]] = [
    ("fp32", "grad", lambda _: torch.ones(N - 1), ValueError, r": got shape \[127\]"),
    ("fp32", "grad", lambda _: torch.ones(2 * N)[::2], ValueError, ": got stride 2"),
    ("fp32", "grad", lambda _: torch.ones(N).double(), TypeError, ": got float64, expected float32 or bf"),
    ("fp32", "grad", lambda _: torch.ones(N).int(), TypeError, ": got int32"),
    ("fp32", "grad", lambda _: [1.0] * N, TypeError, ": got list"),
    ("fp32", "grad", lambda _: torch.ones(N, device="meta"), ValueError, ": got a tensor on meta, exp.* cpu"),
    ("fp32", "grad", lambda _: torch.ones(N).to_sparse(), ValueError, ": got a lazy or sparse view"),
    ("fp32", "out", lambda _: torch.ones(N).int(), TypeError, ": got int32"),
    ("fp32", "out", lambda c: c["grad"], ValueError, "grad and out|out and grad"),
    ("fp32", "master", lambda c: c["master"].numpy(), TypeError, ": got ndarray"),
    ("fp32", "exp_avg", lambda c: c["exp_avg"].bfloat16(), TypeError, ": got bfloat16"),
    ("fp32", "exp_avg_sq", lambda c: c["exp_avg_sq"].reshape(16, 8), ValueError, r": got shape \[16, 8\]"),
    ("16bit", "exp_avg", lambda _: torch.zeros(N), TypeError, ": got float32, expected bfloat16"),
    ("16bit", "exp_avg", lambda c: c["master_high"], ValueError, "overlap"),
    ("16bit", "exp_avg_sq", lambda c: c["exp_avg"], ValueError, "overlap"),
    ("16bit", "master_low", lambda _: torch.zeros(N, dtype=torch.int32), TypeError, ": got int32"),
    ("16bit", "master_low", lambda c: c["master_low"][:64], ValueError, r": got shape \[64\]"),
    ("8bit", "exp_avg_sq", lambda _: torch.zeros(N), TypeError, ": got float32, expected uint8"),
    ("8bit", "exp_avg_sq", lambda _: torch.zeros(N + 1).byte(), ValueError, r": got shape \[129\]"),
    ("8bit", "exp_avg_sq_scale", lambda _: torch.zeros(3, dtype=torch.int16), ValueError, r"\[3\].* \[2\]"),
    *(
        ("fp32", name, lambda _, make=make: make(), ValueError, ": got a tensor whose")
        for name in ("master", "exp_avg", "grad", "out")
        for make in (lambda: resized(16), lambda: resized(0), fake)
    ),
]


INTO: list[tuple[str, str, Change, type[Exception], str]] = [
    ("fp32", "master", lambda c: c["master"], ValueError, "master and into master|into master and master"),
    ("fp32", "exp_avg", lambda c: c["exp_avg_sq"], ValueError, "overlaps"),
    ("fp32", "exp_avg_sq", lambda c: c["grad"], ValueError, "overlaps"),
    ("fp32", "exp_avg_sq", lambda c: c["out"], ValueError, "overlaps"),
    ("fp32", "exp_avg", lambda _: torch.zeros(N + 1), ValueError, r": got shape \[129\]"),
    ("fp32", "exp_avg", lambda _: torch.zeros(N).half(), TypeError, ": got float16"),
    ("fp32", "exp_avg", lambda _: torch.zeros(2 * N)[::2], ValueError, ": got stride 2"),
    ("fp32", "exp_avg", lambda _: locked(torch.ones(N)), ValueError, ": got read-only memory"),
    ("8bit", "exp_avg_sq", lambda _: torch.zeros(N), TypeError, ": got float32, expected uint8"),
]


def update(where: str, *, row: str, **given: Any) -> None:
    adam, tensors = ROWS[row], {x: given.pop(x) for x in ("grad", "out", "into") if x in given}
    decision, grad = StepDecision(False, 1.0, 1, adam.factors(1)), tensors.pop("grad")
    call = adam.device_update if where == "device" else adam.host_update
    call(given, grad, decision, group=0, **tensors)


@pytest.mark.parametrize(
    ("where", "moments", "name", "change", "error", "words"),
    [(where, *row) for where in ("host", "device") for row in BUFFERS] + [("into", *row) for row in INTO],
)
def test_bad_buffers(
    where: str, moments: str, name: str, change: Change, error: type[Exception], words: str
) -> None:
    given: Arguments = {**fresh(N, moments), "grad": torch.ones(N), "out": torch.zeros(N)}
    if where == "into":
        words = f"into {name}{words}" if words.startswith(":") else words
        given["into"] = {**fresh(N, moments), name: change(given)}
    else:
        words = f"{name}{words}" if words.startswith(":") else words
        given[name] = change(given)
    assert_refused(partial(update, where, row=f"AdamW, {moments}"), error, words, **given)


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "out"])
@pytest.mark.parametrize("start", [0, mmap.PAGESIZE], ids=["all of it", "its end"])
def test_memory_that_cannot_be_written(name: str, start: int) -> None:
    n = mmap.PAGESIZE // 2  # 4-byte elements: two pages
    arguments = {x: torch.ones(n) for x in ("master", "exp_avg", "exp_avg_sq", "grad", "out")}
    x, words = locked(torch.ones(n), start), f"{name}: got read-only memory"
    assert_refused(zfunc.adam_update_, ValueError, words, **{**arguments, name: x}, step=1, lr=1e-3)
    zfunc.adam_update_(**{**arguments, "grad": x}, step=1, lr=1e-3)  # pyright: ignore
    with pytest.raises(ValueError, match="acc: got read-only memory"):
        accumulate_(x, arguments["grad"], first=True)


def test_neighbours_in_one_storage_do_not_overlap() -> None:
    store, (_, v, grad) = torch.zeros(2 * N), torch.ones(3, N)
    how: Arguments = {"exp_avg_sq": v, "grad": grad, "step": 1, "lr": 1e-3}
    near: Arguments = {"master": store[:N], "exp_avg": store[N - 1 : 2 * N - 1]}
    assert_refused(zfunc.adam_update_, ValueError, "overlaps", **how, **near)
    zfunc.adam_update_(store[:N], store[N:], **how)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda acc, grad: accumulate_(acc, grad[:4], first=True), ValueError),
        (lambda acc, grad: accumulate_(acc, acc, first=False), ValueError),
        (lambda acc, grad: accumulate_(acc.half(), grad, first=True), TypeError),
        (lambda acc, grad: accumulate_(acc, grad, first=True, threads=0), ValueError),
        (lambda acc, grad: square_sum(grad.double()), TypeError),
        (lambda acc, grad: square_sum(grad.reshape(2, 4)), ValueError),
        (lambda acc, grad: square_sum(grad.to_sparse()), ValueError),
        (lambda acc, grad: square_sum(fake()), ValueError),
    ],
)
def test_bad_sums(call: Callable[..., Any], error: type[Exception]) -> None:
    assert_refused(call, error, "acc|grad|threads", acc=torch.zeros(8), grad=torch.ones(8))


def test_wrappers_of_torch_func() -> None:
    def loss(p: Tensor) -> Tensor:
        zfunc.adam_update_(p, torch.zeros(4), torch.zeros(4), torch.ones(4), step=1, lr=1.0)
        return p.sum()

    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(4))


def test_an_instruction_set_the_cpu_lacks() -> None:
    with pytest.raises(ValueError, match="does not run"):
        kernel.accumulate(0, torch.zeros(4).data_ptr(), 0, 4, kernel.FP32, False, 1, 99)


def test_a_scalar_of_an_own_rule_has_a_name_that_factors_have() -> None:
    class Named(zfunc.Lion):
        def scalars(self, step: int, lr: float, **factors: Any) -> dict[str, float]:
            return {"speed": lr * step, **factors}

    with pytest.raises(
        TypeError, match="Named.scalars: got the number 'speed', expected some of rate, keep, add, "
    ):
        Named()
