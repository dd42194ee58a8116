"""Bad arguments: what was got, what was expected, what to do; and nothing lost."""

from collections.abc import Callable
from itertools import count
from typing import Any

import fuzz_models
import pytest
import torch
from attrs import evolve
from small_models import Loss, regression, rows_of, tied_gpt
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zfunc
from zfunc import schedules
from zfunc.core.graph import Graph
from zfunc.core.layout import Parameter
from zfunc.core.plan import Plan, PlanError
from zfunc.engine.program.program import kept_in


def parts(width: int = 8) -> list[zfunc.Segment]:
    torch.manual_seed(0)
    return [zfunc.segment("body", nn.Linear(8, width)), zfunc.segment("loss", Loss(width))]


def compiled(segments: list[zfunc.Segment] | None = None, **settings: Any) -> Any:
    return zfunc.compile(segments or parts(), **{"device": "cpu", "precision": "fp32", **settings})


def drops_the_last(graph: Any) -> Plan:
    plan = schedules.Serial()(graph)
    (lane,) = plan.lanes
    return evolve(plan, lanes=(evolve(lane, ops=lane.ops[:-1]),))


CALLS = count()


def each_time_another(*given: int) -> Any:
    return schedules.GPipe()(*given)[:: -1 if next(CALLS) % 2 else 1]


X = torch.zeros(4, 8)
SEVERAL = {"devices": 2, "micro_batches": 2, "example": (X, X[:, 0])}
# Numbers of the wrong type or out of range are in test_values.py.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"schedule": "Overlaped"}, ValueError, "schedule: got 'Overlaped'.*did you mean 'Overlapped'"),
    ({"schedule": 3}, TypeError, "schedule: got a int, expected a callable"),
    ({"order": None}, TypeError, "order: got a NoneType, expected a callable"),
    ({"accumulate": 2}, TypeError, "accumulate: got a setting that is gone, .*: pass it as `order`"),
    (
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
        TypeError,
        r"optimizer: got a torch.optim.SGD, expected the methods of .*base.Optimizer: pass zfunc.SGD\(",
    ),
    ({"optimizer": zfunc.Lion}, TypeError, r"got the class Lion, expected the methods .* zfunc.Lion\("),
    ({"optimizer": "adamw"}, TypeError, r"got a str, expected the methods .* zfunc.AdamW\("),
    ({"schedule": drops_the_last}, PlanError, "got it on the lanes 0 times"),
    ({"schedule": lambda _: compiled(micro_batches=2).plan}, PlanError, "a plan of another graph"),
    ({**SEVERAL, "order": each_time_another}, PlanError, "order: got other passes than when"),
    ({"precision": "fp61"}, ValueError, "precision: got 'fp61'.*did you mean 'fp16'"),
    ({"device": "cuad"}, ValueError, "device: got 'cuad'.*did you mean 'cuda'"),
    ({"device": "meta"}, ValueError, "device: got 'meta', expected 'cpu'"),
    ({"bucket_size": 0}, ValueError, "bucket_size: got 0, expected a whole number of at least 1"),
    ({"micro_batches": 10**400}, ValueError, "micro_batches: got 1000.* and at most 65536"),
    (
        {"clip_norm": -1.0},
        ValueError,
        "clip_norm: got -1.0, expected a finite .* of at least 0: pass 0 to go without",
    ),
    ({"recompute": "min_cut"}, ValueError, "recompute: got 'min_cut'.*did you mean 'min-cut'"),
    ({"recompute": "none", "compile_segments": True}, ValueError, "compile_segments"),
    ({"fp32_params": 3}, TypeError, "fp32_params: got 3, expected globs of names: pass such as"),
    ({"state_on": "disk", "swap": [""]}, TypeError, "swap: got '', expected the path of a folder"),
    ({"group": "all of them"}, TypeError, "group: .*process group"),
]
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"params_on": "host", "recompute": "none"}, "params_on: got 'host' with recompute='none'"),
    ({"activations_on": "host", "recompute": "none"}, "activations_on: got 'host'"),
    ({"activations_on": ("host", "device"), "recompute": "all,none"}, "got 'host,device' with"),
    ({"activations_on": "host,auto"}, "activations_on: got 'host,auto', expected 'auto' alone"),
    ({"recompute": "all,,all"}, "recompute: got '', expected one of all, none, min-cut"),
    (
        {"recompute": ["all"] * 9},
        "recompute: got 'all,.* for 2 segments, expected shares that have a segment each",
    ),
    ({"stage": 1, "params_on": "host"}, "stage: got 1 with params_on='host'"),
    ({"stage": 1, "order": 2, "micro_batches": 2}, "stage: got 1 with order=2"),
    (
        {"order": "diagonal", "devices": 2},
        "order: got 'diagonal', expected one of GPipe, .*, horizontal, vertical",
    ),
    (
        {"order": "OneFOneB"},
        "order: got 'OneFOneB' with devices=1, expected horizontal, vertical or a number",
    ),
    (
        {"order": schedules.make_order(2), "devices": 2},
        "order: got 2 with devices=2, expected an order of several",
    ),
    ({"order": 0}, "order: got 0, expected a whole number of at least 1"),
    ({"order": "2", "devices": 2}, "order: got 2 with devices=2, expected an order of several devices"),
    ({"order": "vertical", "pp": 2}, "order: got 'vertical' with pp=2, expected an order of several devices"),
    ({"persistent_params": "pairs,"}, "persistent_params: got 'pairs,', expected names of segments or"),
    ({"fp32_params": "pairs,"}, "fp32_params: got 'pairs,', expected globs joined by commas"),
    ({"fp32_params": "*.norm", "precision": "fp32"}, r"fp32_params: got '\*.norm', expected a glob of names"),
    ({"persistent_params": "last"}, "persistent_params: got 'last', expected a number of elements, or"),
    ({"params_on": "disc"}, "params_on: got 'disc', expected one of device, host, disk"),
    ({"params_on": "disk"}, "params_on: got 'disk' with state_on='host', expected state_on='disk'"),
    ({"swap": "somewhere"}, "with state_on='host', expected state_on='disk' or activations_on='disk'"),
    ({"state_on": "disk"}, "swap: got no folder"),
    ({"activations_on": "host,disk"}, "swap: got no folder with activations_on='host,disk'"),
    ({"state_on": "device:0.5,disk"}, "state_on: got 'device:0.5,disk', expected one of device, host, disk"),
    ({"state_on": "host:2,disk"}, "state_on: got 'host:2,disk', expected the share of the host, 0 to 1"),
]
BAD += [(settings, ValueError, message) for settings, message in TOGETHER]


@pytest.mark.parametrize(("settings", "kind", "message"), BAD, ids=[x[-1] for x in BAD])
def test_bad_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        compiled(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device: got 'cuda', expected 'cpu': torch sees no other device"):
        compiled(device="cuda")


def linear(name: str, share: str | None = None) -> zfunc.Segment:
    return zfunc.segment(name, nn.Linear(8, 8), share={"weight": share} if share else None)


def nested() -> nn.Module:
    module = nn.Module()
    module.b = nn.Linear(8, 8)
    return module


def one_tensor(share: str | None) -> list[zfunc.Segment]:
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    two.weight = one.weight
    return [zfunc.segment("one", one), zfunc.segment("two", two, share={"weight": share} if share else None)]


def loss() -> zfunc.Segment:
    return zfunc.segment("loss", Loss(8))


SEGMENTS: dict[str, tuple[Callable[[], list[Any]], type[Exception], str]] = {
    "none": (lambda: [], ValueError, "segments: got none"),
    "a module": (
        lambda: [nn.Linear(2, 2)],
        TypeError,
        r"segments: got a Linear.*zfunc\.segment\(name, module\)",
    ),
    "two of one name": (lambda: [linear("x"), zfunc.segment("x", Loss(8))], ValueError, "got two named 'x'"),
    "parameters of one name": (
        lambda: [zfunc.segment("a", nested()), linear("a.b"), loss()],
        ValueError,
        r"two parameters named 'a\.b\.weight'",
    ),
    "a share of no segment": (
        lambda: [linear("a", "loss.out.wieght"), loss()],
        ValueError,
        r"'loss.out.wieght', which no segment has.*did you mean",
    ),
    "a share of another shape": (
        lambda: [linear("a", "loss.out.weight"), loss()],
        ValueError,
        r"weight has shape \(8, 8\), but 'loss.out.weight'.* \(1, 8\)",
    ),
    "one tensor in two": (
        lambda: [*one_tensor(None), loss()],
        ValueError,
        r"one tensor as 'one\.weight' and 'two\.weight', expected tied",
    ),
    "nothing to train": (
        lambda: [zfunc.segment("loss", Loss(8).requires_grad_(False))],
        ValueError,
        "no parameter is trainable",
    ),
}


@pytest.mark.parametrize("what", SEGMENTS)
def test_bad_segments(what: str) -> None:
    make, error, message = SEGMENTS[what]
    with pytest.raises(error, match=message):
        zfunc.compile(make(), device="cpu", precision="fp32")


def test_a_shared_tensor_is_named() -> None:
    compiled([*one_tensor("one.weight"), loss()])
    with pytest.raises(ValueError, match=r"share with 'wieght', .*\['bias', 'weight'\]"):
        zfunc.segment("a", nn.Linear(8, 8), share={"wieght": "b.weight"})


# --- what the first step refuses of a segment; impure ones are in test_purity.py --------------------------------


def last(value: Callable[[Tensor], Any]) -> zfunc.Segment:
    return zfunc.Segment(
        "s",
        lambda p, x, targets: value(x @ p["w"]),
        (Parameter("s.w", (8, 8)),),
        ("w",),
        initial=lambda _: {"s.w": torch.ones(8, 8)},
    )


def calling(forward: Callable[[Any], Any]) -> zfunc.Segment:
    module = nn.Module()
    module.forward = forward
    return zfunc.segment("s", module)


class OfPair(Loss):
    def forward(self, x: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return super().forward(x[0] + x[1].real, targets)


def complex_between() -> list[zfunc.Segment]:
    return [calling(lambda x: (x, torch.fft.fft(x))), zfunc.segment("loss", OfPair(8))]


GENERATOR, CALLS = torch.Generator(), count()
REFUSED: dict[str, tuple[Callable[[], list[zfunc.Segment]], str]] = {
    "a matrix as the loss": (lambda: [last(lambda x: x)], r"'s': got shape \(4, 8\).*expected a scalar"),
    "a list as the loss": (lambda: [last(lambda x: [x.sum()])], "'s': got list.*expected a scalar"),
    "a number as the loss": (lambda: [last(lambda x: 1.0)], "'s': got float.*expected a scalar"),
    "a loss without a gradient": (
        lambda: [last(lambda x: x.sum().detach())],
        r"'s': got a loss without a gradient.*leave out detach\(\)",
    ),
    "an output of integers alone": (
        lambda: [parts()[0], calling(lambda x: x.int()), *parts()[1:]],
        "'s': got no floating-point output",
    ),
    "an auxiliary output of a shape": (
        lambda: [last(lambda x: (x.sum(), {"hits": (x > 0).T}))],
        r"'s': auxiliary output 'hits': got shape \(8, 4\) for 4 rows, expected a scalar.*hits\.mean\(\), or rows",
    ),
    "a list as an auxiliary output": (
        lambda: [last(lambda x: (x.sum(), {"hits": [1]}))],
        "'s': auxiliary output 'hits': got list, expected a scalar",
    ),
    "an auxiliary output that is named as the loss": (
        lambda: [last(lambda x: (x.sum(), {"loss": x.sum()}))],
        "'s': auxiliary output 'loss': .*rename it",
    ),
    "an auxiliary output of another name in every call": (
        lambda: [last(lambda x: (x.sum(), {f"hits{next(CALLS)}": x.sum()}))],
        "'s': got other arguments in .* .what it returns. when called again",
    ),
    "three results": (
        lambda: [last(lambda x: (x.sum(), x.sum(), x.sum()))],
        r"'s': got \(shape \(\).*expected a scalar.*return \(loss, \{",
    ),
    "an input changed": (lambda: [calling(lambda x: x.mul_(2)), *parts()], "'s': got an in-place change"),
    "a branch on data": (
        lambda: [calling(lambda x: x if x.sum() > 0 else -x), *parts()],
        "'s': got a branch on the value of a tensor",
    ),
    "parameters of another module": (
        lambda: [calling(nn.Linear(8, 8).forward), *parts()],
        "'s': got .*captured",
    ),
    "a generator": (
        lambda: [calling(lambda x: x + torch.rand(x.shape, generator=GENERATOR)), *parts()],
        "'s': got .*generator",
    ),
    "an input of another shape": (
        lambda: [zfunc.segment("s", nn.Linear(9, 8)), *parts()],
        r"'s': got an error on inputs of shape \[\(4, 8\)\]",
    ),
    "a complex tensor between segments": (
        lambda: [parts()[0], *complex_between()],
        "'loss': got a complex tensor.*view_as_real",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_segment_the_first_step_refuses(what: str) -> None:
    make, message = REFUSED[what]
    program = compiled(make())
    with pytest.raises(ValueError, match=f"segment {message}"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_a_captured_tensor_changed_in_place_is_refused_unchanged() -> None:
    total = torch.zeros(8)
    program = compiled([calling(lambda x: x + total.add_(x.detach().sum(0))), *parts()])
    with pytest.raises(ValueError, match="segment 's': got an in-place change.*expected a pure function"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))
    assert torch.equal(total, torch.zeros(8))


def test_batches_that_cannot_be_split() -> None:
    program = compiled(micro_batches=3)
    state = zfunc.init(program)
    with pytest.raises(ValueError, match="got 4 rows for 3 micro-batches.*give 3 rows"):
        zfunc.train_step(program, state, regression(4)(0))
    with pytest.raises(TypeError, match="expected a pair"):
        zfunc.train_step(program, state, torch.zeros(3, 8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows, expected one number"):
        zfunc.train_step(program, state, (torch.zeros(3, 8), torch.zeros(6)))
    with pytest.raises(ValueError, match="rows, expected one number"):
        zfunc.train_step(program, state, (torch.zeros(0, 8), torch.zeros(0)))
    zfunc.train_step(program, state, regression(6)(0))


def test_a_state_of_another_program() -> None:
    one, other = compiled(), compiled()
    with pytest.raises(ValueError, match="a state made by another program"):
        zfunc.train_step(one, zfunc.init(other), regression(4)(0))


def test_initial_values_by_name() -> None:
    program = compiled()
    with pytest.raises(ValueError, match=r"'body.wieght', which the program does not have.*'body.weight'"):
        zfunc.init(program, params={"body.wieght": torch.zeros(8, 8)})
    with pytest.raises(ValueError, match=r"'body.weight' of shape \(8,\), expected \(8, 8\)"):
        zfunc.init(program, params={"body.weight": torch.zeros(8)})
    given = {"body.weight": torch.full((8, 8), 0.3)}
    assert torch.equal(
        zfunc.params(program, zfunc.init(program, params=given))["body.weight"], given["body.weight"]
    )


def test_a_schedule_may_be_a_name_a_class_or_an_object() -> None:
    digests = {compiled(schedule=s).plan.digest for s in ("Serial", schedules.Serial, schedules.Serial())}
    assert len(digests) == 1


def test_an_example_plans_memory_before_anything_runs() -> None:
    segments, data = tied_gpt()
    without = zfunc.compile(segments, device="cpu")
    planned = zfunc.compile(segments, device="cpu", example=data(0))
    on_meta = zfunc.compile(segments, device="cpu", example=tuple(t.to("meta") for t in data(0)))
    assert max(op.flops for op in planned.plan.graph) > 0 == max(op.flops for op in without.plan.graph)
    assert planned.plan == on_meta.plan


def test_a_step_is_planned_once_with_an_example_or_without() -> None:
    segments, data = tied_gpt()
    for example in (None, data(0)):
        graphs = list[Graph]()
        schedule = lambda graph, seen=graphs: (seen.append(graph), schedules.Serial()(graph))[1]  # noqa: E731
        program = zfunc.compile(segments, device="cpu", example=example, schedule=schedule)
        assert [program.plan.graph] == graphs


def test_recurrent_layers_need_the_same_memory_in_every_trace() -> None:
    """Also in a first one, for which torch has cached no fake results: two ranks may not have different plans."""
    model = fuzz_models.Model(
        (("lstm with dropout", "every other", "causal"),), ("nested",), "mean", seed=906
    )
    batch = rows_of(model.batch(0), 0, 2)
    FakeTensorMode.cache_clear()
    graphs = [compiled(list(model.built()[0]), example=batch).plan.graph for _ in range(2)]
    assert [op.workspace for op in graphs[0]] == [op.workspace for op in graphs[1]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("reduce-overhead", "aot_eager"),
        *(pytest.param(x, None, marks=pytest.mark.slow) for x in (True, "reduce-overhead")),
    ],
)
def test_compiled_segments_give_the_same_losses(
    how: bool | str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every pass is compiled in the mode that is named: by day to a graph, whose operations torch runs."""
    if backend is None:
        compiler = pytest.importorskip("torch._inductor.cpp_builder", exc_type=ImportError)
        try:
            compiler.get_cpp_compiler()
        except Exception as error:
            pytest.skip(f"torch.compile needs a C++ compiler: {error}")

    def losses(**settings: Any) -> list[float]:
        program = compiled(parts()[1:], **settings)  # of which each pass takes the C++ compiler seconds
        state, seen = zfunc.init(program), []
        for i in range(3):
            state, m = zfunc.train_step(program, state, regression(4)(i))
            seen.append(m.loss)
        return seen

    modes, real = list[Any](), torch.compile

    def compiling(function: Any, **given: Any) -> Any:
        modes.append(given.get("mode", True))
        return real(function, **(given if backend is None else {"backend": backend}))

    monkeypatch.setattr(torch, "compile", compiling)
    assert losses(compile_segments=how) == pytest.approx(losses(), rel=1e-5)
    assert {*modes} == {how}


def test_an_integer_parameter_is_refused() -> None:
    module = nn.Module()
    module.index = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(ValueError, match="parameter 'index' of torch.int64.*register_buffer"):
        zfunc.segment("s", module)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_batch_of_odd_tensors_or_under_inference_mode() -> None:
    program = compiled()
    state = zfunc.init(program)
    x, y = regression(4)(0)
    refused = {
        r"\['ndarray'\].*from_numpy": (x.numpy(), y),
        "layout torch.sparse_coo, expected dense": (x.to_sparse(), y),
        "a nested tensor, expected dense": (torch.nested.nested_tensor([*x], layout=torch.strided), y),
        "an empty tuple, expected inputs": (),
    }
    for message, batch in refused.items():
        with pytest.raises(TypeError, match=message):
            zfunc.train_step(program, state, batch)
    for call in (zfunc.train_step, zfunc.evaluate):
        with pytest.raises(
            ValueError, match="batch: got a tensor on the device 'meta', expected one with values"
        ):
            call(program, state, (x.to("meta"), y))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        zfunc.train_step(program, state, (x, y))
    zfunc.train_step(program, state, (x, y))


def test_values_that_initial_leaves_out_have_to_come_from_somewhere() -> None:
    def make() -> zfunc.Segment:
        return zfunc.Segment(
            "l",
            lambda p, x, targets: (x @ p["w"] - targets[:, None]).square().mean(),
            (Parameter("l.w", (8, 1)),),
            ("w",),
            initial=lambda _: {},
        )

    program = compiled([make()])
    with pytest.raises(ValueError, match=r"segment 'l': got no initial value for \['l\.w'\]"):
        zfunc.init(program)
    given = nn.Parameter(torch.ones(8, 1))
    state = zfunc.init(program, params={"l.w": given})
    assert torch.equal(zfunc.params(program, state)["l.w"], torch.ones(8, 1))
    assert not state.buffers.state(0)["master"].requires_grad


def test_repeated_names_in_a_hand_made_segment() -> None:
    w = Parameter("l.w", (2,))
    with pytest.raises(ValueError, match=r"the parameters \['l\.w'\] more than once"):
        zfunc.Segment("l", lambda p, x: x, (w, w), ("a", "b"), initial=lambda _: {})


def test_torchs_default_dtype_does_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        program = compiled([zfunc.segment("body", nn.Linear(8, 8)), zfunc.segment("loss", Loss(8))])
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_of_torch_is_taken(dtype: Any) -> None:
    segments, _ = tied_gpt()
    program = zfunc.compile(segments, precision=dtype, device="cpu")
    assert program.dtype == dtype
    weights = zfunc.weights(program, zfunc.init(program), dtype=dtype)
    assert all(t.dtype == dtype for _, t in weights)
    for other in (torch.int8, "torch.float32"):
        with pytest.raises(ValueError, match=r"precision: got '?torch\..*, expected one of fp32"):
            zfunc.compile(segments, precision=other, device="cpu")  # pyright: ignore


def test_an_input_that_forward_refuses_has_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Without the lines that torch logs before."""
    program = zfunc.compile(
        [zfunc.segment("body", nn.Linear(9, 8)), zfunc.segment("loss", Loss(8))], device="cpu"
    )
    with pytest.raises(ValueError, match="segment 'body': got an error on inputs of shape"):
        zfunc.train_step(program, zfunc.init(program), regression()(0))
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_lack_of_memory_names_what_is_kept_there_by_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.engine.program.program.available_host_bytes", lambda: 1)
    given = {
        "state_on": "device:0.5,host",
        "params_on": "host",
        "activations_on": "host",
        "persistent_params": 64,
        "bucket_size": 300,
    }
    program = zfunc.compile(tied_gpt()[0], device="cpu", **given)
    host, device = (
        "params_on='host' and activations_on='host'",
        "state_on='device:0.5,host' and persistent_params=",
    )
    kept = f"{host} and {device}.*64"
    everything = f"{kept} keeps state"
    with pytest.raises(zfunc.errors.OutOfMemory, match=everything):
        zfunc.init(program)
    monkeypatch.setattr("zfunc.engine.program.program.on_accelerator", lambda _: True)
    assert str(zfunc.errors.Message(kept_in(program, "host"))).startswith(f"; {host} keeps")
    assert str(zfunc.errors.Message(kept_in(program, "device"))).startswith(f"; {device}")
    plain = zfunc.compile(tied_gpt()[0], device="cpu")
    assert kept_in(plain, "host") == kept_in(plain, "device") == ""
