"""Adam in torch operations: its pieces, its memory, and that nothing waits. Its bits: test_adam_bits.py."""

import pytest
import torch
from adam_states import MOMENTS, device_update_, fresh, gradient, on
from test_adam_bits import check

from zfunc.engine.cost_trace import AllocationTracker
from zfunc.optim import device_adam, workspaces
from zfunc.optim.workspaces import adam_workspace

every_device = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_format = pytest.mark.parametrize("moments", MOMENTS)


@every_device
@every_format
@pytest.mark.parametrize("n", [1024, 1025, 2047, 3 * 1024 + 64])
def test_pieces_change_no_bit(moments, n, where, monkeypatch):
    monkeypatch.setattr(device_adam, "PIECE", 1024)
    check(fresh(n, moments), gradient(n, torch.bfloat16), where, weight_decay=0.1)


@every_format
@pytest.mark.parametrize("n", [0, 1, 63, 1000, 4096, 10_001, 1 << 20])
def test_the_workspace_bounds_what_is_allocated(moments, n, monkeypatch):
    for module in (device_adam, workspaces):
        monkeypatch.setattr(module, "PIECE", 1 << 18)
    state, grad, out = fresh(n, moments), gradient(n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    with AllocationTracker() as tracker:
        device_update_(*state, grad, out=out, step=1, lr=1e-3, weight_decay=0.1, decoupled=False)
    assert tracker.peak <= adam_workspace(n, moments)
    assert n < 1 << 20 or tracker.peak > 0.8 * adam_workspace(n, moments)


@pytest.mark.gpu
@every_format
def test_the_workspace_bounds_what_the_device_allocates(moments):
    n = 3 * device_adam.PIECE + 65
    state = on(fresh(n, moments), lambda x: x.cuda())
    grad = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    device_update_(*state, grad, step=1, lr=1e-3, weight_decay=0.1)
    assert torch.cuda.max_memory_allocated() - before <= adam_workspace(n, moments)


@pytest.mark.gpu
@every_format
def test_nothing_waits_for_the_device(moments):
    state = on(fresh(1000, moments), lambda x: x.cuda())
    grad = torch.ones(1000, device="cuda")
    device_update_(*state, grad, step=1, lr=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        device_update_(*state, grad, step=2, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_that_require_a_gradient_stay_leaves():
    """Weights that require a gradient, as a leaf would: the step is not recorded."""
    weights = torch.ones(4, requires_grad=True)
    device_update_(weights, torch.zeros(4), torch.zeros(4), torch.ones(4), step=1, lr=0.5)
    assert weights.is_leaf
    assert torch.equal(weights, torch.full((4,), 0.5))
