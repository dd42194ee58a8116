"""Device graphs change launches and nothing else: no bit of a result, and no more memory than planned."""

import gc
import inspect
import re
import types
from collections import Counter
from typing import Any

import pytest
import torch
from device_training import compiled, run, train, weights_of
from small_models import Loss
from torch import nn

import zfunc
from zfunc.core.graph import Graph
from zfunc.core.plan import Plan, build
from zfunc.engine import device_graphs, specialize
from zfunc.engine.stages import STAGES
from zfunc.errors import ExecutionError, NonFiniteError, OutOfMemory
from zfunc.runtime.executor import Jitter

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("tied GPT", "Interleaved", {"precision": "fp16", "micro_batches": 2, "recompute": "min-cut"}),
    ("tied GPT", "Overlapped", {"activations_on": "host", "recompute": "min-cut", "clip_norm": 0.5}),
    ("odd sizes", "Overlapped", {"bucket_size": 600, "params_on": "host", "offload_ratio": 0.5}),
    ("odd sizes", "Serial", {"bucket_size": 600, "clip_norm": 2.0, "speculate": 100, "moments": "16bit"}),
    ("odd sizes", "Overlapped", {"bucket_size": 600, "offload_ratio": 0.5, "delay_from": 2}),
    ("odd sizes", "Overlapped", {"clip_norm": 2.0, "defer": True, "recompute": "min-cut"}),
    ("frozen below", "Overlapped", {"precision": "fp16"}),
    ("pairs", "CriticalPath", {"precision": "fp32", "micro_batches": 3}),
]


def captured(program: Any) -> set[tuple[str, int]]:
    graphs = program.cache.graphs
    return set(graphs._passes) if graphs else set()


def expected(program: Any, batch: Any) -> set[tuple[str, int]]:
    """The passes of which the plan says that they are graphs."""
    ops = specialize.specialize(program, batch).plan.graph.ops
    return {(op.verb, op.index[1]) for op in ops if op.touches("graphs")}


@pytest.mark.parametrize(("model", "schedule", "settings"), ROWS, ids=[f"{m} {s}" for m, s, _ in ROWS])
def test_graphs_change_no_bit(device: str, model: str, schedule: str, settings: dict[str, Any]) -> None:
    """Whatever the host and the device delay. Every pass that can be a graph is one, and no other."""
    losses, params = train(model, device, schedule="Serial", **settings)
    program, data = compiled(model, device, schedule=schedule, device_graphs=True, **settings)
    again, same = run(program, data, jitter=Jitter(0, 2e-4))
    assert repr(again) == repr(losses)
    assert torch.equal(same, params)
    assert captured(program) == expected(program, data(0)) != set()


class TwoComputeLanes:
    """Micro-batches take turns on two lanes that compute."""

    def __call__(self, graph: Graph) -> Plan:
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            odd = op.verb in ("forward", "backward") and op.index[0] % 2
            lanes.setdefault(f"{op.kind}-odd" if odd else op.kind, []).append(i)
        return build(graph, lanes)


def test_two_lanes_that_compute_share_the_graphs_memory(device: str) -> None:
    settings: dict[str, Any] = {"micro_batches": 2, "precision": "fp32"}
    losses, params = train("tied GPT", device, schedule="Serial", **settings)
    program, data = compiled("tied GPT", device, schedule=TwoComputeLanes(), device_graphs=True, **settings)
    again, same = run(program, data, jitter=Jitter(1, 1e-3))
    assert again == losses
    assert torch.equal(same, params)
    assert captured(program) == expected(program, data(0))


def test_other_weights_other_shapes_and_debug_mode(device: str, tmp_path: Any) -> None:
    """Steps of two States of one program by turns, a short batch, a checkpoint, traced and debugged steps."""

    def trained(**settings: Any) -> list[Any]:
        program, data = compiled("odd sizes", device, **settings)
        states, seen = [zfunc.init(program, seed=seed) for seed in (1, 2)], list[Any]()
        steps: list[dict[str, Any]] = [{}, {}, {"trace": True}, {"debug": True}, {}, {"save": tmp_path}]
        for i, step in enumerate(steps):
            states[0], m = zfunc.train_step(program, states[0], data(i), **step)
            seen.append(m.loss)
        for i in range(2):
            states[1], m = zfunc.train_step(program, states[1], data(i))
            states[0], n = zfunc.train_step(program, states[0], tuple(t[:5] for t in data(i)))
            seen += [m.loss, n.loss, zfunc.evaluate(program, states[0], data(i))]
        for i in range(3):  # the other State's graphs are for other addresses
            states[1], m = zfunc.train_step(program, states[1], data(i))
            seen.append(m.loss)
        return [seen, *(weights_of(program, state) for state in states)]

    (losses, *weights), (again, *same) = trained(), trained(device_graphs=True)
    assert again == losses
    assert all(map(torch.equal, weights, same))


def test_a_replay_is_one_launch_between_two_copies(controls: Any) -> None:
    def launches(**settings: Any) -> Counter[str]:
        counts: Counter[str] = Counter()

        def counted(verb: str) -> Any:
            def stage(op: Any, *args: Any) -> None:
                before = controls.launches()
                STAGES[verb](op, *args)
                counts[op.name] += controls.launches() - before

            return stage

        stages = {verb: counted(verb) for verb in ("forward", "backward")}
        program, data = compiled("tied GPT", "pretend", schedule="Serial", stages=stages, **settings)
        state = zfunc.init(program, seed=1)
        for i in range(3):
            counts.clear()
            state, _ = zfunc.train_step(program, state, data(i))
        return counts

    with_graphs, without = launches(device_graphs=True), launches()
    assert {with_graphs[f"{verb}[0,2]"] for verb in ("forward", "backward")} == {3}
    assert without["forward[0,2]"] > 20
    assert without["backward[0,2]"] > 40


def test_graphs_fit_into_the_planned_memory_from_the_first_step_on(controls: Any) -> None:
    program, data = compiled("tied GPT", "pretend", device_graphs=True, micro_batches=2)
    gc.collect()
    others = torch.accelerator.memory_reserved()
    state = zfunc.init(program, seed=1)
    planned = specialize.specialize(program, data(0)).memory["device"].nbytes
    controls.set_capacity(0, others + planned)
    for i in range(4):
        state, _ = zfunc.train_step(program, state, data(i), debug=i == 3)
    assert captured(program) == set()  # debug mode needs the memory
    controls.set_capacity(0, others + planned - 4096)
    with pytest.raises(OutOfMemory, match="bytes of device memory"):
        zfunc.train_step(program, state, data(0))


class HostData(nn.Linear):
    """Copies from memory of the host, for which a capture cannot wait."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor([2.0]).to(x)


def test_what_cannot_be_captured_runs_as_before_and_is_told_once(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    parts = [("a", nn.Linear(8, 8)), ("b", HostData(8, 8)), ("c", nn.Dropout(0.5)), ("loss", Loss(8))]
    segments = [zfunc.segment(n, m) for n, m in parts]
    batch, params = (torch.ones(4, 8), torch.ones(4)), list[torch.Tensor]()
    for graphs in (False, True):
        program = zfunc.compile(segments, device=device, precision="fp32", device_graphs=graphs)
        state = zfunc.init(program, seed=1)
        for _ in range(4):
            state, _ = zfunc.train_step(program, state, batch)
        params.append(weights_of(program, state))
    assert torch.equal(*params)
    told = [r.getMessage() for r in caplog.records if "device graph" in r.getMessage()]
    assert len([x for x in told if re.search("'b' runs forward without a device graph, because", x)]) == 1
    assert captured(program) >= {("forward", 0), ("backward", 0), ("forward", 3), ("backward", 3)}
    assert not captured(program) & {("forward", 1), ("forward", 2), ("backward", 2)}


def test_without_graphs_on_the_device_it_is_told_and_nothing_else_changes(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, params = train("odd sizes", device)
    monkeypatch.setattr("zfunc.engine.compile.has_graphs", lambda _: False)
    with caplog.at_level("INFO", "zfunc"):
        again, same = train("odd sizes", device, device_graphs=True)
    assert again == losses
    assert torch.equal(same, params)
    assert "device_graphs: torch has none on" in caplog.text


def test_an_error_in_a_replay_is_noticed_and_explained(controls: Any) -> None:
    program, data = compiled("tied GPT", "pretend", device_graphs=True)
    state = zfunc.init(program)
    for i in range(2):
        state, _ = zfunc.train_step(program, state, data(i))
    tokens, targets = data(0)
    with pytest.raises(ExecutionError, match="index out of range.*debug=True"):
        zfunc.train_step(program, state, (tokens.clone().fill_(10_000), targets))


# --- tests of the tests -----------------------------------------------------------------------------------

BROKEN = {
    "arguments are copied in": (
        device_graphs,
        "if self.inputs:",
        "if False:",
    ),
    "results are copied out": (
        device_graphs,
        "fresh = [torch.empty_like(x) for x in self.outputs]",
        "fresh = self.outputs",
    ),
    "what draws has no graph": (specialize, "and s not in random", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_forgotten_is_noticed(controls: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, text, replacement = BROKEN[what]
    source = inspect.getsource(module)
    assert source.count(text) == 1
    changed = types.ModuleType("broken")
    exec(compile(source.replace(text, replacement), "broken", "exec"), changed.__dict__)
    model = "frozen below" if module is specialize else "tied GPT"  # the first has dropout
    losses, params = train(model, "pretend")
    if module is specialize:
        monkeypatch.setattr("zfunc.engine.train_step.specialize", changed.specialize)
    else:
        monkeypatch.setattr("zfunc.engine.program.DeviceGraphs", changed.DeviceGraphs)
    try:
        again, same = train(model, "pretend", device_graphs=True)
    except (ExecutionError, NonFiniteError):  # noticed as well
        return
    assert repr(again) != repr(losses) or not torch.equal(same, params)
