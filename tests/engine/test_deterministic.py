"""`deterministic=True`: torch's deterministic kernels during a program's own work, and no longer."""

import os
import threading
from typing import Any

import pytest
import torch
from small_models import Loss, tied_gpt
from torch import Tensor, nn

import zfunc
from zfunc.errors import ExecutionError
from zfunc.runtime import accelerator
from zfunc.runtime.accelerator import CUBLAS, deterministic_kernels

BATCH = torch.ones(4, 8), torch.ones(4)


def setting() -> tuple[bool, bool, bool]:
    """Whether kernels are deterministic, whether torch only warns, and whether new memory is filled."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


ON, OFF, WARNS = (True, False, False), (False, False, True), (True, True, True)


class Putting(nn.Module):
    """`put_` has no deterministic kernel, not even on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.numel()).view_as(x)
        return torch.zeros_like(x).put(places, x * self.w)


@pytest.mark.parametrize("before", [OFF, WARNS])
@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_are_deterministic_during_the_programs_own_work_alone(
    before: tuple[bool, bool, bool], deterministic: bool
) -> None:
    seen: set[tuple[str, tuple[bool, bool, bool]]] = set()

    class Watched(Loss):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            seen.add(("segment", setting()))
            return super().forward(x, targets)

    def noting(verb: str) -> Any:
        def stage(op: Any, mem: Any, step: Any) -> None:
            seen.add((verb, setting()))
            plain[verb](op, mem, step)

        return stage

    segments = [zfunc.segment("loss", Watched(8))]
    plain = zfunc.compile(segments, device="cpu").stages
    program = zfunc.compile(
        segments,
        device="cpu",
        deterministic=deterministic,
        schedule="Overlapped",
        stages={verb: noting(verb) for verb in ("forward", "backward", "update", "to_host")},
    )
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        state, _ = zfunc.train_step(program, zfunc.init(program), BATCH)
        zfunc.evaluate(program, state, BATCH)
        assert setting() == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert {what for what, _ in seen} == {"segment", "forward", "backward", "update", "to_host"}
    assert {now for _, now in seen} == {ON if deterministic else before}


def test_it_ends_with_the_last_of_several_programs_in_threads_and_with_an_error() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deterministic_kernels(True):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError), deterministic_kernels(True):
        thread.start()
        entered.wait(10)
        raise KeyError
    assert setting() == ON
    leave.set()
    thread.join()
    assert setting() == OFF


def test_the_bits_of_a_cpu_are_the_same_with_it() -> None:
    losses: list[list[float]] = []
    for deterministic in (False, True):
        segments, data = tied_gpt(0.1)
        program = zfunc.compile(segments, device="cpu", precision="fp32", deterministic=deterministic)
        state, own = zfunc.init(program, seed=1), list[float]()
        for i in range(2):
            state, metrics = zfunc.train_step(program, state, data(i))
            own += [metrics.loss, metrics.grad_norm]
        losses.append(own)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_an_operation_without_a_deterministic_kernel_is_named(recompute: Any) -> None:
    segments = [zfunc.segment("putting", Putting()), zfunc.segment("loss", Loss(8))]
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "recompute": recompute}
    program = zfunc.compile(segments, deterministic=True, **settings)
    state = zfunc.init(program)
    with pytest.raises(ExecutionError, match=r"forward\[0,0\] .*put_ does not have a deterministic impl"):
        zfunc.train_step(program, state, BATCH)
    with pytest.raises(RuntimeError, match="^put_ does not have a deterministic implementation"):
        zfunc.evaluate(program, state, BATCH)
    assert setting() == OFF
    plain = zfunc.compile(segments, **settings)
    zfunc.train_step(plain, zfunc.init(plain), BATCH)


def test_cublas_gets_its_workspace_or_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a product on a GPU shows which: a stand-in refuses as torch does there."""
    monkeypatch.setenv(CUBLAS, "to be removed afterwards")
    monkeypatch.delenv(CUBLAS)
    monkeypatch.setitem(accelerator.VENDORS, "cpu", accelerator.VENDORS["cuda"])
    zfunc.compile([zfunc.segment("loss", Loss(8))], device="cpu")
    assert CUBLAS not in os.environ
    zfunc.compile([zfunc.segment("loss", Loss(8))], device="cpu", deterministic=True)
    assert os.environ[CUBLAS] == ":4096:8"

    def refused(*_: Any) -> Any:
        assert setting() == ON
        raise RuntimeError("Deterministic behavior was enabled [...] because it uses CuBLAS")

    monkeypatch.setattr(torch, "mm", refused)
    monkeypatch.setenv(CUBLAS, ":0:0")
    with pytest.raises(
        ValueError, match=r"^deterministic: got CUBLAS_WORKSPACE_CONFIG=':0:0', .*export it before"
    ):
        zfunc.compile([zfunc.segment("loss", Loss(8))], device="cpu", deterministic=True)
    assert setting() == OFF
