"""Bad arguments of an update are refused on the host and on a device: got, expected, and nothing is touched."""

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adam_states import buffers, device_update_, exact, fresh
from torch import Tensor
from torch._subclasses import FakeTensorMode

from zfunc.optim.compact import QuantizedMoment, SplitMaster
from zfunc.optim.host_adam import accumulate_, adam_update_, square_sum
from zfunc.optim.kernel_loader import cpu_adam as kernel

N = 128
Arguments = dict[str, Any]
every_update = pytest.mark.parametrize("update", [adam_update_, device_update_])


def good(moments: str) -> Arguments:
    p, m, v = fresh(N, moments)
    return {"master": p, "exp_avg": m, "exp_avg_sq": v, "grad": torch.ones(N), "out": torch.zeros(N)}


def tensors(arguments: Arguments) -> list[Tensor]:
    """All of them whose memory can be read."""
    known = [*arguments.values(), *(arguments["into"] if isinstance(arguments.get("into"), tuple) else ())]
    parts = [*buffers(x for x in known if isinstance(x, Tensor | SplitMaster | QuantizedMoment))]
    return [x for x in parts if type(x) is Tensor and x.is_cpu and x.layout is torch.strided and alive(x)]


def alive(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() >= x.nbytes


def assert_refused(call: Callable[..., Any], error: type[Exception], words: str, **arguments: Any) -> None:
    before = [x.clone() for x in tensors(arguments)]
    with pytest.raises(error, match=words) as caught:
        call(**arguments)
    assert "got" in str(caught.value)
    assert "expected" in str(caught.value)
    assert all(torch.equal(exact(x), exact(y)) for x, y in zip(tensors(arguments), before, strict=True))


@every_update
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"step": 0}, ValueError, "step"),
        ({"step": 1.0}, TypeError, "step"),
        ({"step": True}, TypeError, "step"),
        ({"step": 10**400}, ValueError, "step"),
        ({"lr": math.nan}, ValueError, "lr"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"lr": "1"}, TypeError, "lr"),
        ({"lr": torch.ones(2)}, TypeError, "lr"),
        ({"lr": np.ones(2)}, TypeError, "lr"),
        ({"lr": 3e38}, ValueError, "as step_size"),
        ({"lr": 1e38, "weight_decay": 1e30}, ValueError, "lr, betas and weight_decay"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"betas": (-0.1, 0.9)}, ValueError, "betas"),
        ({"betas": 0.9}, ValueError, "betas"),
        ({"eps": -1e-8}, ValueError, "eps"),
        ({"weight_decay": math.inf}, ValueError, "weight_decay"),
        ({"grad_scale": math.inf}, ValueError, "grad_scale"),
        ({"grad_scale": 1e39}, ValueError, "grad_scale"),
    ],
)
def test_bad_numbers(update: Any, change: Arguments, error: type[Exception], match: str) -> None:
    assert_refused(update, error, match, **{**good("fp32"), "step": 1, "lr": 1e-3, **change})


@pytest.mark.parametrize(("threads", "error"), [(0, ValueError), (1.5, TypeError)])
def test_bad_numbers_of_threads(threads: Any, error: type[Exception]) -> None:
    assert_refused(adam_update_, error, "threads", **good("fp32"), step=1, lr=1.0, threads=threads)


def quantized(n: int = N, scales: int = 2) -> QuantizedMoment:
    return QuantizedMoment(torch.zeros(n, dtype=torch.uint8), torch.zeros(scales, dtype=torch.int16))


def split(high: int = N, low: int = N, dtype: torch.dtype = torch.int16) -> SplitMaster:
    return SplitMaster(torch.zeros(high).bfloat16(), torch.zeros(low, dtype=dtype))


Change = Callable[[Arguments], Any]
BUFFERS: list[tuple[str, str, Change, type[Exception], str]] = [
    ("fp32", "grad", lambda _: torch.ones(N - 1), ValueError, r": got shape \[127\]"),
    ("fp32", "grad", lambda _: torch.ones(2 * N)[::2], ValueError, ": got stride 2"),
    ("fp32", "grad", lambda _: torch.ones(N).double(), TypeError, ": got float64; expected float32 or bf"),
    ("fp32", "grad", lambda _: torch.ones(N).int(), TypeError, ": got int32"),
    ("fp32", "grad", lambda _: [1.0] * N, TypeError, ": got list"),
    (
        "fp32",
        "grad",
        lambda _: torch.ones(N, device="meta"),
        ValueError,
        ": got a tensor on meta; expected .* cpu",
    ),
    ("fp32", "out", lambda _: torch.ones(N).int(), TypeError, ": got int32"),
    ("fp32", "out", lambda c: c["grad"], ValueError, "grad and out|out and grad"),
    ("fp32", "master", lambda c: c["master"].numpy(), TypeError, ": got ndarray"),
    ("fp32", "exp_avg", lambda c: c["exp_avg"].bfloat16(), TypeError, ": got bfloat16"),
    ("fp32", "exp_avg_sq", lambda c: c["exp_avg_sq"].reshape(16, 8), ValueError, r": got shape \[16, 8\]"),
    ("fp32", "exp_avg", lambda _: quantized(), TypeError, ": got QuantizedMoment; expected a torch.Tensor"),
    ("8bit", "exp_avg", lambda _: quantized(), TypeError, ": got QuantizedMoment; expected a torch.Tensor"),
    ("16bit", "exp_avg", lambda _: torch.zeros(N), TypeError, ": got float32; expected bfloat16"),
    ("16bit", "exp_avg", lambda c: c["master"].high, ValueError, "overlap"),
    ("16bit", "exp_avg_sq", lambda _: quantized(), TypeError, "exp_avg: got bfloat16; expected uint8"),
    ("16bit", "exp_avg_sq", lambda c: c["exp_avg"], ValueError, "overlap"),
    ("16bit", "master", lambda _: torch.zeros(N), TypeError, "exp_avg: got bfloat16; expected float32"),
    ("16bit", "master", lambda _: split(dtype=torch.int32), TypeError, "master.low: got int32"),
    ("16bit", "master", lambda _: split(low=N // 2), ValueError, r"master.low: got shape \[64\]"),
    ("8bit", "exp_avg_sq", lambda _: torch.zeros(N), TypeError, "exp_avg: got uint8; expected bfloat16"),
    ("8bit", "exp_avg_sq", lambda _: quantized(N + 1), ValueError, r"codes: got shape \[129\]"),
    ("8bit", "exp_avg_sq", lambda _: quantized(scales=3), ValueError, r"scales: got shape \[3\].* \[2\]"),
]


@every_update
@pytest.mark.parametrize(("moments", "name", "change", "error", "words"), BUFFERS)
def test_bad_buffers(
    update: Any, moments: str, name: str, change: Change, error: type[Exception], words: str
) -> None:
    arguments = good(moments)
    words = f"{name}{words}" if words.startswith(":") else words
    assert_refused(update, error, words, **{**arguments, name: change(arguments)}, step=1, lr=1.0)


INTO: list[tuple[str, int, Change, type[Exception], str]] = [
    ("fp32", 0, lambda c: c["master"], ValueError, "master and into master|into master and master"),
    ("fp32", 1, lambda c: c["exp_avg_sq"], ValueError, "overlaps"),
    ("fp32", 2, lambda c: c["into"][1], ValueError, "overlaps"),
    ("fp32", 2, lambda c: c["grad"], ValueError, "overlaps"),
    ("fp32", 2, lambda c: c["out"], ValueError, "overlaps"),
    ("fp32", 1, lambda _: torch.zeros(N + 1), ValueError, r"into exp_avg: got shape \[129\]"),
    ("fp32", 1, lambda _: torch.zeros(N).half(), TypeError, "into exp_avg: got float16"),
    ("fp32", 1, lambda _: torch.zeros(2 * N)[::2], ValueError, "into exp_avg: got stride 2"),
    ("fp32", 1, lambda _: locked(N), ValueError, "into exp_avg: got read-only memory"),
    ("fp32", 0, lambda _: split(), TypeError, "into master: got SplitMaster; expected Tensor"),
    ("8bit", 0, lambda _: torch.zeros(N), TypeError, "into master: got Tensor; expected SplitMaster"),
    ("8bit", 2, lambda _: torch.zeros(N), TypeError, "into exp_avg_sq: got Tensor; expected QuantizedMoment"),
    ("16bit", 2, lambda _: quantized(), TypeError, "into exp_avg_sq: got QuantizedMoment; expected Tensor"),
    ("8bit", 2, lambda _: quantized(N + 1), ValueError, r"into exp_avg_sq.codes: got shape \[129\]"),
]


@pytest.mark.parametrize(("moments", "place", "change", "error", "words"), INTO)
def test_bad_buffers_for_the_new_state(
    moments: str, place: int, change: Change, error: type[Exception], words: str
) -> None:
    arguments = {**good(moments), "into": fresh(N, moments)}
    into = [*arguments["into"]]
    into[place] = change(arguments)
    assert_refused(adam_update_, error, words, **{**arguments, "into": tuple(into)}, step=1, lr=1.0)


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ((*fresh(N, "16bit"), None), "into: got 4 of them; expected a tuple"),
        (fresh(N, "16bit")[0], "into: got SplitMaster; expected a tuple of three"),
    ],
)
def test_a_new_state_is_three(into: Any, words: str) -> None:
    assert_refused(adam_update_, TypeError, words, **good("16bit"), into=into, step=1, lr=1.0)


def locked(n: int, start: int = 0) -> Tensor:
    """Memory whose pages cannot be written from byte `start` on: a write would end the process with a signal."""
    size = -(-4 * n // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(pages, dtype=torch.float32, count=n)
    libc = ctypes.CDLL(None, use_errno=True)
    protected = ctypes.c_void_p(x.data_ptr() + start), ctypes.c_size_t(size - start)
    assert libc.mprotect(*protected, mmap.PROT_READ) == 0
    return x


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "out"])
@pytest.mark.parametrize("start", [0, mmap.PAGESIZE], ids=["all of it", "its end"])
def test_memory_that_cannot_be_written(name: str, start: int) -> None:
    n = mmap.PAGESIZE // 2  # 4-byte elements: two pages
    arguments = {x: torch.ones(n) for x in ("master", "exp_avg", "exp_avg_sq", "grad", "out")}
    x = locked(n, start)
    words = f"{name}: got read-only memory"
    assert_refused(adam_update_, ValueError, words, **{**arguments, name: x}, step=1, lr=1e-3)
    adam_update_(**{**arguments, "grad": x}, step=1, lr=1e-3)
    with pytest.raises(ValueError, match="acc: got read-only memory"):
        accumulate_(x, arguments["grad"], first=True)


def resized(nbytes: int) -> Tensor:
    x = torch.ones(N)
    x.untyped_storage().resize_(nbytes)
    return x


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(N)


@pytest.mark.parametrize(
    "make", [lambda: resized(16), lambda: resized(0), fake], ids=["less", "none", "fake"]
)
@pytest.mark.parametrize("name", ["master", "exp_avg", "grad", "out"])
@every_update
def test_a_tensor_whose_memory_is_gone(update: Any, name: str, make: Callable[[], Tensor]) -> None:
    words = f"{name}: got a tensor whose"
    assert_refused(update, ValueError, words, **{**good("fp32"), name: make()}, step=1, lr=1e-3)
    with pytest.raises(ValueError, match="grad: got a tensor whose"):
        square_sum(make())


def test_neighbours_in_one_storage_do_not_overlap() -> None:
    store = torch.zeros(2 * N)
    arguments = {**good("fp32"), "step": 1, "lr": 1e-3}
    apart = {"master": store[:N], "exp_avg": store[N:]}
    overlapping = {"master": store[:N], "exp_avg": store[N - 1 : 2 * N - 1]}
    assert_refused(adam_update_, ValueError, "overlaps", **{**arguments, **overlapping})
    adam_update_(**{**arguments, **apart})


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
    ],
)
def test_bad_sums(call: Callable[..., Any], error: type[Exception]) -> None:
    assert_refused(call, error, "acc|grad|threads", acc=torch.zeros(8), grad=torch.ones(8))


def test_wrappers_of_torch_func() -> None:
    def loss(p: Tensor) -> Tensor:
        adam_update_(p, torch.zeros(4), torch.zeros(4), torch.ones(4), step=1, lr=1.0)
        return p.sum()

    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(4))


def test_an_instruction_set_the_cpu_lacks() -> None:
    with pytest.raises(ValueError, match="does not run"):
        kernel.accumulate(0, torch.zeros(4).data_ptr(), 0, 4, kernel.FP32, False, 1, 99)
