"""Bad arguments: what was got, what was expected, what to do; and nothing lost."""

import logging
import random
from typing import Any

import pytest
import torch
from attrs import evolve
from small_models import Loss, regression, tied_gpt
from torch import Tensor, nn

import zfunc
from zfunc import schedules
from zfunc.core.layout import Parameter
from zfunc.core.plan import Plan, PlanError


def parts(width: int = 8) -> list[zfunc.Segment]:
    torch.manual_seed(0)
    return [zfunc.segment("body", nn.Linear(8, width)), zfunc.segment("loss", Loss(width))]


def compiled(segments: list[zfunc.Segment] | None = None, **settings: Any) -> Any:
    return zfunc.compile(segments or parts(), **{"device": "cpu", "precision": "fp32", **settings})


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"schedule": "Overlaped"}, ValueError, "schedule: got 'Overlaped'.*did you mean 'Overlapped'"),
    ({"schedule": 3}, TypeError, "schedule: got a int, expected something callable"),
    ({"precision": "fp61"}, ValueError, "precision: got 'fp61'.*did you mean 'fp16'"),
    ({"precision": None}, ValueError, "precision: got None, expected one of fp32, bf16, fp16"),
    ({"device": "cuad"}, ValueError, "device: got 'cuad'.*did you mean 'cuda'"),
    ({"device": "meta"}, ValueError, "device: got 'meta', expected 'cpu'"),
    ({"bucket_size": 0}, ValueError, "bucket_size: got 0, expected a whole number of at least 1"),
    ({"bucket_size": 1.5}, ValueError, "bucket_size: got 1.5"),
    ({"micro_batches": 0}, ValueError, "micro_batches: got 0"),
    ({"micro_batches": 10**400}, ValueError, "micro_batches: got 1000.* and at most 65536"),
    ({"grad_slots": 0}, ValueError, "grad_slots: got 0"),
    (
        {"clip_norm": 0.0},
        ValueError,
        "clip_norm: got 0.0, expected a finite number above 0: pass None not to clip",
    ),
    ({"clip_norm": float("nan")}, ValueError, "clip_norm: got nan"),
    ({"recompute": "min_cut"}, ValueError, "recompute: got 'min_cut'.*did you mean 'min-cut'"),
    ({"recompute": "none", "compile_segments": True}, ValueError, "compile_segments"),
    ({"group": "all of them"}, TypeError, "group: .*a process group"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        compiled(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device: got 'cuda', expected 'cpu', the types of this machine"):
        compiled(device="cuda")


def test_no_segments_and_no_segment() -> None:
    with pytest.raises(ValueError, match="segments: got none"):
        zfunc.compile([], device="cpu")
    with pytest.raises(TypeError, match=r"segments: got a Linear.*zfunc\.segment\(name, module\)"):
        zfunc.compile([nn.Linear(2, 2)], device="cpu")  # type: ignore[list-item]


def test_two_segments_with_one_name() -> None:
    with pytest.raises(ValueError, match="got two named 'x'"):
        compiled([zfunc.segment("x", nn.Linear(8, 8)), zfunc.segment("x", Loss(8))])


def test_a_share_that_points_nowhere() -> None:
    with pytest.raises(ValueError, match=r"share names 'wieght'.*\['bias', 'weight'\]"):
        zfunc.segment("a", nn.Linear(8, 8), share={"wieght": "b.weight"})
    tied = zfunc.segment("a", nn.Linear(8, 8), share={"weight": "loss.out.wieght"})
    with pytest.raises(ValueError, match=r"'loss.out.wieght', which no segment has.*did you mean"):
        compiled([tied, zfunc.segment("loss", Loss(8))])


def test_a_share_of_another_shape() -> None:
    tied = zfunc.segment("a", nn.Linear(8, 8), share={"weight": "loss.out.weight"})
    with pytest.raises(ValueError, match=r"weight has shape \(8, 8\), 'loss.out.weight'.* \(1, 8\)"):
        compiled([tied, zfunc.segment("loss", Loss(8))])


def test_a_model_without_anything_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter is trainable"):
        compiled([zfunc.segment("loss", Loss(8).requires_grad_(False))])


@pytest.mark.parametrize(
    ("loss", "got"),
    [(lambda x: x, r"shape \(4, 8\)"), (lambda x: [x.sum()], "list"), (lambda x: 1.0, "float")],
)
def test_a_last_segment_that_returns_no_scalar(loss: Any, got: str) -> None:
    weight = Parameter("l.w", (8, 8))
    last = zfunc.Segment(
        "l",
        lambda p, x, targets: loss(x @ p["w"]),
        (weight,),
        ("w",),
        initial=lambda _: {"l.w": torch.ones(8, 8)},
    )
    program = compiled([last])
    with pytest.raises(ValueError, match=rf"segment 'l': got {got}.*expected a scalar"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_an_in_place_change_of_a_captured_tensor() -> None:
    total = torch.zeros(8)

    def counts(p: dict[str, Tensor], x: Tensor) -> Tensor:
        total.add_(x.detach().sum(0))
        return x @ p["w"]

    body = zfunc.Segment(
        "body", counts, (Parameter("body.w", (8, 8)),), ("w",), initial=lambda _: {"body.w": torch.eye(8)}
    )
    program = compiled([body, zfunc.segment("loss", Loss(8))])
    state = zfunc.init(program)
    with pytest.raises(ValueError, match="segment 'body': got an in-place change.*expected a pure function"):
        zfunc.train_step(program, state, regression(4)(0))
    assert torch.equal(total, torch.zeros(8))


def test_an_in_place_change_of_the_input() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    program = compiled([zfunc.segment("twice", InPlace()), *parts()])
    with pytest.raises(ValueError, match="segment 'twice': got an in-place change"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_running_statistics_cannot_be_kept() -> None:
    norm = zfunc.segment("norm", nn.BatchNorm1d(8))
    program = compiled([norm, *parts()])
    with pytest.raises(ValueError, match="segment 'norm': got an in-place change.*running statistics"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_a_branch_on_data_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    program = compiled([zfunc.segment("branches", Branches()), *parts()])
    with pytest.raises(ValueError, match="segment 'branches': got a branch on the value of a tensor"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_a_segment_that_cannot_take_its_input() -> None:
    program = compiled([zfunc.segment("body", nn.Linear(9, 8)), zfunc.segment("loss", Loss(8))])
    with pytest.raises(ValueError, match=r"segment 'body': got an error on inputs of shape \[\(4, 8\)\]"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_an_error_of_shapes_is_told_once_without_torchs_log() -> None:
    told: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = told.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        program = compiled([zfunc.segment("body", nn.Linear(9, 8)), zfunc.segment("loss", Loss(8))])
        with pytest.raises(ValueError, match="segment 'body': got an error"):
            zfunc.train_step(program, zfunc.init(program), regression(4)(0))
    finally:
        logger.removeHandler(handler)
    assert not told
    assert not logger.filters


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


def test_a_schedule_that_drops_an_operation_is_refused() -> None:
    def drops(graph: Any) -> Plan:
        plan = schedules.Serial()(graph)
        (lane,) = plan.lanes
        return evolve(plan, lanes=(evolve(lane, ops=lane.ops[:-1]),))

    with pytest.raises(PlanError, match="got it on the lanes 0 times"):
        compiled(schedule=drops)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_compiled_segments_give_the_same_losses() -> None:
    compiler = pytest.importorskip("torch._inductor.cpp_builder", exc_type=ImportError)
    try:
        compiler.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"torch.compile needs a C++ compiler: {error}")

    def losses(**settings: Any) -> list[float]:
        program = compiled(**settings)
        state, seen = zfunc.init(program), []
        for i in range(3):
            state, m = zfunc.train_step(program, state, regression(4)(i))
            seen.append(m.loss)
        return seen

    assert losses(compile_segments=True) == pytest.approx(losses(), rel=1e-5)


def test_two_parameters_of_one_name_from_nested_segment_names() -> None:
    nested = nn.Module()
    nested.b = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"two parameters named 'a\.b\.weight'"):
        compiled([zfunc.segment("a", nested), zfunc.segment("a.b", nn.Linear(8, 8)), *parts()[1:]])


def test_one_tensor_in_two_segments_has_to_be_said() -> None:
    one, two = nn.Linear(8, 8), nn.Linear(8, 8)
    two.weight = one.weight
    with pytest.raises(ValueError, match=r"one tensor as 'one\.weight' and 'two\.weight', expected tied"):
        compiled([zfunc.segment("one", one), zfunc.segment("two", two), *parts()[1:]])
    said = zfunc.segment("two", two, share={"weight": "one.weight"})
    compiled([zfunc.segment("one", one), said, *parts()[1:]])


def test_a_schedule_that_plans_another_graph_is_refused() -> None:
    other = compiled(micro_batches=1).plan
    with pytest.raises(PlanError, match="a plan of another graph"):
        compiled(micro_batches=2, schedule=lambda _: other)


def test_a_complex_tensor_between_segments_is_refused() -> None:
    class Fourier(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.fft.fft(x)

    class First(Loss):
        def forward(self, x: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
            return super().forward(x[0] + x[1].real, targets)

    program = compiled([parts()[0], zfunc.segment("f", Fourier()), zfunc.segment("loss", First(8))])
    with pytest.raises(ValueError, match=r"segment 'loss': got a complex tensor.*view_as_real"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_an_integer_parameter_is_refused() -> None:
    module = nn.Module()
    module.index = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(ValueError, match="parameter 'index' of torch.int64.*register_buffer"):
        zfunc.segment("s", module)


def captures() -> nn.Module:
    inner, outer = nn.Linear(8, 8), nn.Module()
    outer.forward = inner.forward  # of another module: its parameters are not the outer one's
    return outer


def own_generator() -> nn.Module:
    generator, module = torch.Generator(), nn.Module()
    module.forward = lambda x: x + torch.rand(x.shape, generator=generator)
    return module


@pytest.mark.parametrize(("module", "message"), [(captures, "captured"), (own_generator, "generator")])
def test_what_a_function_must_not_reach_for(module: Any, message: str) -> None:
    program = compiled([zfunc.segment("s", module()), *parts()])
    with pytest.raises(ValueError, match=rf"segment 's': got .*{message}"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_pythons_random_numbers_are_refused() -> None:
    class Rolls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random()

    program = compiled([zfunc.segment("s", Rolls()), *parts()])
    with pytest.raises(ValueError, match="segment 's': got random numbers from Python"):
        zfunc.train_step(program, zfunc.init(program), regression(4)(0))


def test_a_batch_of_arrays_or_under_inference_mode() -> None:
    program = compiled()
    state = zfunc.init(program)
    x, y = regression(4)(0)
    with pytest.raises(TypeError, match=r"\['ndarray'\].*from_numpy"):
        zfunc.train_step(program, state, (x.numpy(), y))
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
