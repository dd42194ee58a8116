"""Any module as segments: what is refused, and what leaves one segment, each with the line and what to change."""

import logging
import random
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from any_models import SPEECH, Transcriber, ids, speech, spoken, transformers
from module_law import Block, Late, Tied, batch, check
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zfunc


class Branch(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) if x.sum() > 0 else x


class Nested(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(torch.nested.nested_tensor([*x]).to_padded_tensor(0.0), table)


@torch.library.custom_op("zfunc_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Custom(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(doubled(x), table)


class Differentiated(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + torch.func.grad(lambda z: z.sin().sum())(x)


def test_what_a_trace_would_lose_leaves_one_segment(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Tied(block=Differentiated)
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, batch())
    assert [s.name for s in segments] == ["model"]
    why = r"has a torch.func.grad at .*test_any_model_refused.py:\d+$"
    assert re.search(f"one segment, because its trace .*{why}", caplog.messages[-1])
    check(segments, model, batch(), None)


class Transformed(Block):
    """What torch.func makes in another grad mode, which is a graph in the trace's."""

    def __init__(self, p: float, make: Any) -> None:
        super().__init__(p)
        self.make = make

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.make(x)
        return super().forward(x, table) + made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.vmap(lambda row: row - row.mean()), "its trace has lazy_load_decompositions at"),
        (torch.func.grad(lambda x: x.sin().sum()), "its trace has a torch.func.grad at"),
    ],
)
def test_what_a_trace_would_lose_in_another_grad_mode_leaves_one_segment(
    make: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """These failed in torch's text, in a step or in evaluation."""
    torch.manual_seed(0)
    model = Tied(num_layers=1, block=lambda p: Transformed(p, make))
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, batch())
    assert len(segments) == 1
    assert why in caplog.text
    check(segments, model, batch(), None)


class Looped(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(super().forward(x))
        return F.mse_loss(x, y)


class Cast(Late):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Looped(8, 8), r"Looped in .*test_any_model_refused.py reads its parameters .*several times"),
        (Cast, r"torch.autocast .* at .*module_law.py:\d+$"),
    ],
)
def test_a_model_of_one_segment_says_why(model: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zfunc"):
        assert len(zfunc.segments(model(), (torch.randn(4, 8), torch.randn(4, 8)))) == 1
    assert re.search(f"^model: one segment, because .*{why}", caplog.messages[-1])


class Counted(Block):
    calls = 0

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, table) * self.calls


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(y, targets) * self.scale


class Penalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x.requires_grad_()))
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Decoder(nn.TransformerDecoder):
    """Reads a mask to see whether it is causal."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, memory, tgt_mask=x[0] @ memory[0].mT).mean()


class Neighbours(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), super().forward(x, table).flatten(1)).view_as(x)


def annealed() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss whose weight, a tensor that it closes over, is another one in each call."""
    kept = {"weight": torch.ones(())}

    def loss(y: Tensor, targets: Tensor) -> Tensor:
        kept["weight"] = kept["weight"] * 0.9
        return F.mse_loss(y, targets) * kept["weight"]

    return loss


class Smoothed(nn.Module):
    """A loss that is divided by its own average, a buffer, which it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, y: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(y, targets)
        self.mean = self.mean * 0.9 + loss.detach() * 0.1
        return loss / self.mean


class Assigned(Tied):
    """Assigns to .data of its buffer, or of a parameter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("scale", torch.ones(61, 8))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        {"scale": self.scale, "embed.weight": self.embed.weight}[self.name].data = torch.ones(61, 8)
        return super().forward(input_ids, labels) * self.scale.mean()


class Adversary(nn.Module):
    """Two networks, of which the second is frozen in forward for a part of the loss, or called `detached`."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.made = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.judge = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.made(x)
        loss = F.softplus(self.judge(made.detach())).mean() + F.softplus(-self.judge(y)).mean()
        if self.detached:
            own = {name: p.detach() for name, p in self.judge.named_parameters()}
            return loss + F.softplus(-torch.func.functional_call(self.judge, own, (made,))).mean()
        self.judge.requires_grad_(False)
        loss = loss + F.softplus(-self.judge(made)).mean()
        self.judge.requires_grad_(True)
        return loss


def test_a_part_whose_parameters_are_detached_trains_as_one_that_is_frozen_in_forward() -> None:
    torch.manual_seed(0)
    data, frozen = (torch.randn(4, 8), torch.randn(4, 8)), Adversary(detached=False)
    detached = Adversary(detached=True)
    detached.load_state_dict(frozen.state_dict())
    check(zfunc.segments(detached, data), frozen, data, None)
    with pytest.raises(ValueError, match=r"False for 'judge.0.weight' at .*_refused.py:\d+, .*detached"):
        zfunc.segments(frozen, data)


class CountedWhole(Tied):
    calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input_ids, labels) * self.calls


class Averaged(Tied):
    """Keeps an average, in a tensor that is no buffer, replaced or `written` in place."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.written, self.mean = written, torch.zeros(())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels) * (1 + self.mean)
        if self.written:
            self.mean.add_(0.1)
        else:
            self.mean = self.mean + 0.1
        return loss


class Kept(Late):
    """What a first call alone computes, or makes of a weight and keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.kept = kind, True, None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kept is None and self.kind == "kept":
            self.kept = self.layers[0].weight.detach() * 2
        more = x @ self.kept if self.kind == "kept" else 2 * y if self.first and self.kind == "first" else 0
        self.first = False
        return super().forward(x, y + more)


class Lost(Block):
    """It runs in a context of torch, or calls a function, that a trace lacks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        found = self.make()
        with found if hasattr(found, "__enter__") else nullcontext():
            return super().forward(x, table)


class Caught(Block):
    """A branch on a value, of which the model takes the other way if it fails."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with suppress(Exception):
            return super().forward(x, table) if x.sum() > 0 else x
        return -x


class GradRead(Block):
    """It scales by a gradient of the step before, which no step in segments keeps."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        grad = self.up.weight.grad
        return super().forward(x, table) * (1.0 if grad is None else grad.norm())


class Chosen(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (super().forward(x, table),))


class Viewed(nn.Linear):
    """A row of the weight, or of a buffer that forward writes, is kept in an attribute, which forward reads."""

    scale: Tensor

    def __init__(self, name: str, kept: Callable[[Tensor], Tensor], read: Callable[[Tensor], Any]) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.row, self.read = kept(getattr(self, name)), read

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        return super().forward(x) * self.read(self.row)


class Averages(nn.Linear):
    """One buffer is a view of another, which forward writes."""

    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("a", torch.ones(16))
        self.register_buffer("b", self.a[:8])

    def forward(self, x: Tensor) -> Tensor:
        self.a.mul_(0.5)
        return super().forward(x) * self.b


@pytest.mark.parametrize("name", ["weight", "scale"])
def test_the_shape_of_a_kept_view_is_read(name: str) -> None:
    def shape(x: Tensor) -> float:
        return (x.shape[0] + x.size(0) + x.dim() + len(x) + x.numel() + x.is_floating_point()) / 100

    model = Viewed(name, lambda w: w.detach()[:4], shape)
    check(zfunc.segments(model, ONES, F.mse_loss), model, ONES, F.mse_loss)


class Drawn(Block):
    """A number of a generator beside torch's, or of a function that draws from one."""

    def __init__(self, generator: Any, _: float) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + getattr(self.generator, "random", self.generator)()


class Generated(Block):
    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.generator = torch.Generator()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) + torch.rand(x.shape, generator=self.generator)


def speaker(**given: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SPEECH | given))
    return model.train(), {name: x for name, x in speech().items() if "mask" not in name}


class Noisy(Block):
    """What random numbers select, whose values no input decides."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        drop = torch.zeros_like(y[..., 0]).uniform_() > 0.5
        y[drop] = y[drop] * 2
        return y


class Written(Block):
    """A parameter that forward changes, as of a teacher that follows."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.bias.mul_(0.9)
        return super().forward(x, table)


class Decayed(Block):
    """Parameters that a method of a module changes in place."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        self.down._apply(lambda t: t.mul_(0.9))
        return super().forward(x, table)


class Limited(Block):
    """A write that autograd does not know of."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table).exp()
        y.data[y > 2] = 2
        return y


LOCAL = threading.local()
LOCAL.factor = 2.0


class Threaded(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x, table) * getattr(LOCAL, "factor", 1.0)


class Widened(Block):
    """A value in fp32, which meets another."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.lerp(x.float(), super().forward(x, table), 0.5)


class Squared(nn.Linear):
    """A model that returns its loss."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.mse_loss(super().forward(x), targets)


class Filter(nn.Module):
    """A model that trains a complex tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(torch.fft.irfft(torch.fft.rfft(x) * self.kernel, n=x.shape[-1]), targets)


class Packed(nn.GRU):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return super().forward(packed)[1].square().mean()


ALONE, ONES = nn.Linear(8, 8), (torch.ones(2, 8), torch.ones(2, 8))  # of inputs alone, without a loss


class Hooked(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        y.register_hook(lambda grad: 0.1 * grad) if y.requires_grad else None
        return y


def test_a_batch_that_does_not_fit_is_called_one() -> None:
    program = zfunc.compile(zfunc.segments(ALONE, ONES, F.mse_loss), precision="fp32", device="cpu")
    state = zfunc.init(program)
    wrong, targetless = (torch.ones(2, 7), ONES[1]), ONES[:1]
    for call in (zfunc.train_step, zfunc.evaluate):
        with pytest.raises(ValueError, match=r"batch: got one that does not fit the model .*2, 7\]"):
            call(program, state, wrong)
        with pytest.raises(ValueError, match="batch: got no targets for mse_loss"):
            call(program, state, targetless)


class NodeHooked(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = super().forward(x, table)
        y.grad_fn.register_prehook(lambda grads: (0.1 * grads[0],)) if y.grad_fn is not None else None
        return y


class Scaling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y * 0.5 if func is torch.ops.aten.relu.default else y


class Scaled(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        with Scaling():
            return super().forward(x, table)


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] ** 2 * grads[0]


class Mapped(Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.vmap(Cubed.apply)(super().forward(x, table))  # pyright: ignore


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Hooked, r"may set a gradient hook at .*_refused.py:\d+"),
        (NodeHooked, r"may set a gradient hook at .*_refused.py:\d+"),
        (Scaled, r"a Scaling at .*_refused.py:\d+ sees operations"),
        (Mapped, "torch.vmap or torch.func is around the autograd function Cubed"),
    ],
)
def test_what_sees_gradients_or_operations_leaves_one_segment(
    block: type[Block], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Tied(num_layers=1, block=block)
    with caplog.at_level(logging.WARNING, "zfunc"):
        segments = zfunc.segments(model, batch())
    assert [s.name for s in segments] == ["model"]
    assert re.search(why, caplog.text)
    check(segments, model, batch(), None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zfunc.segments(ALONE, ONES, 3), "^loss: got an object of class int, expected a function"),  # type: ignore[arg-type]
        (lambda: zfunc.plan(ALONE, ONES, loss=3), "^loss: got an object of class int, expected a function"),  # type: ignore[arg-type]
        (
            lambda: zfunc.segments(ALONE, ONES, nn.MSELoss),
            r"^loss: got the class MSELoss, .*: pass MSELoss\(\)",
        ),
        (
            lambda: zfunc.compile(ALONE, example=ONES, loss=F.mse_loss),
            r"^loss: got an unknown setting, expected one of [^?]*: pass the segments of zfunc.segments\(",
        ),
        (
            lambda: zfunc.compile(Tied, example=batch()),
            r"^segments: got the class Tied, .*: call it, as Tied\(...\)",
        ),
        (
            lambda: zfunc.segments(Tied, batch()),
            r"^model: got the class Tied, expected an nn.Module: call it",
        ),
        (
            lambda: zfunc.segments(ALONE, torch.utils.data.DataLoader([1])),
            r"^example: got \['DataLoader'\] in it, expected tensors, .*: pass next\(iter\(loader\)\)$",
        ),
        (
            lambda: zfunc.plan(ALONE, ONES, F.mse_loss),
            "^settings: got a function.*: pass .* by name, as .loss.$",
        ),  # type: ignore[arg-type]
    ],
)
def test_a_loss_that_is_none_is_blamed_by_its_name(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (lambda block=block: zfunc.segments(Tied(block=block), batch()), says)
            for block, says in {
                Branch: r"branch on the value of a tensor.*test_any_model_refused.py",
                Nested: r"^model: got an operation without a fake kernel at .*_refused.py:\d+ "
                r"\(aten._nested_tensor",
                Custom: r"^model: got an operation without a fake kernel at .*_refused.py:\d+ .*register_fake",
                Caught: r"branch on the value of a tensor.*test_any_model_refused.py",
                GradRead: r"got .grad of 'layers.0.up.weight' at .*test_any_model_refused.py:\d+, .*norms",
                Chosen: r"got torch's cond at .*test_any_model_refused.py:\d+, .*torch.where\(mask, a, b\)",
                Decayed: r"\.grad of 'layers.0.down.weight' at .*test_any_model_refused.py:\d+",
                Limited: r"write into .data of what has a gradient at .*test_any_model_refused.py:\d+",
                Threaded: "got global LOCAL, a threading.local, expected .*ContextVar",
                Noisy: r"number of a tensor's value at .*test_any_model_refused.py",
                Written: r"write into the parameter 'layers.0.down.bias' at .*test_any_model_refused.py:\d+.*"
                "register_buffer",
            }.items()
        ),
        *(
            (lambda make=make: zfunc.segments(Tied(block=lambda _: Lost(make)), batch()), says)
            for make, says in {
                lambda: torch.manual_seed(
                    0
                ): r"got torch.manual_seed at .*_refused.py:\d+, .* default generator",
                torch.random.fork_rng: r"got torch.set_rng_state at .*_refused.py:\d+, which a trace lacks",
                lambda: saved_tensors_hooks(abs, abs): r"saved_tensors_hooks at .*: let activations_on say",
            }.items()
        ),
        (lambda: zfunc.segments(Kept("kept"), ONES), r"keeps from call to call at .*_refused.py:\d+, which"),
        (
            lambda: zfunc.segments(Kept("first"), ONES),
            r"another operation \(aten.mul.Tensor at .*_refused.py:\d+, then",
        ),
        (
            lambda: zfunc.segments(Packed(4, 4), (torch.ones(2, 3, 4), torch.tensor([3, 2]))),
            r"branch on the value of a tensor.*test_any_model_refused.py:\d+.*mask.*none that are packed",
        ),
        (
            lambda: zfunc.compile(Tied(block=Widened), example=batch(), precision="bf16", device="cpu"),
            r"parameters and inputs in bfloat16 \(.*test_any_model_refused.py:\d+.*precision='fp32'",
        ),
        (
            lambda: zfunc.compile(Transcriber(), example=spoken(), precision="bf16", device="cpu"),
            r"inputs in bfloat16 \(TypeError at .*any_models.py:\d+: ctc_loss: .*use log_probs.float\(\)",
        ),
        (
            lambda: zfunc.segments(Filter(), ONES),
            "parameter 'kernel' of torch.complex64, expected floating point: train torch.view_as_real of it, and",
        ),
        *(
            (
                lambda name=name, kept=kept: zfunc.segments(
                    Viewed(name, kept, lambda x: x), ONES, F.mse_loss
                ),
                f"got a view of '{name}' that was made before, which would keep its first values, .* loss: make it",
            )
            for name, kept in (
                *(("weight", f) for f in (lambda w: w[0], lambda w: w.detach()[0])),
                ("scale", lambda x: x[:]),
            )
        ),
        (
            lambda: zfunc.segments(Averages(), ONES, F.mse_loss),
            "segment 'model': got 'b' and 'a' in the same memory.* in forward",
        ),
        (lambda: zfunc.segments(nn.Sequential(nn.LazyLinear(4)), ids()), r"'0\.weight' of a lazy module"),
        (
            lambda: zfunc.segments(
                nn.Sequential(torch.jit.trace(nn.Linear(8, 8), ONES[0])), ONES, F.mse_loss
            ),  # pyright: ignore
            r"^segment 'model': got a module of torch.jit, .*: leave torch.jit.script out",
        ),
        (lambda: zfunc.segments(torch.compile(Tied()), batch()), "that torch.compile returned"),  # pyright: ignore
        *(
            (
                lambda generator=generator: zfunc.segments(Tied(block=partial(Drawn, generator)), batch()),
                r"another number \(.* at .*_refused.py:\d+\) when called again.*kept outside.*or NumPy",
            )
            for generator in (random.random, np.random.random)
        ),
        *(
            (
                lambda generator=generator: zfunc.segments(Tied(block=partial(Drawn, generator)), batch()),
                "got (random numbers from|another number .*) Python's random module or NumPy, expected torch's",
            )
            for generator in (random.Random(0), np.random.default_rng(0))
        ),
        (lambda: zfunc.segments(Tied(block=Generated), batch()), "got a torch.Generator of its own"),
        (
            lambda: zfunc.segments(*speaker(apply_spec_augment=True, mask_time_prob=0.5, mask_time_length=2)),
            r"another tensor .*modeling_wav2vec2.py:\d+\) .*\(of transformers, apply_spec_augment=False\)",
        ),
        (
            lambda: zfunc.segments(*speaker(layerdrop=0.5)),
            r"branch on the value .*modeling_wav2vec2.py:\d+, .*\(of transformers, layerdrop=0.0, apply",
        ),
        (lambda: zfunc.segments(Tied(block=Counted), batch()), r"calls \(.*changes from call to call"),
        (
            lambda: zfunc.segments(ALONE, (*ONES[:1], *ONES[:1]), Weighted()),
            r"^loss: got a Weighted that trains 'scale', expected .*: call it in forward",
        ),
        (
            lambda: zfunc.segments(
                ALONE, ONES, lambda y, _: torch.cond(y[0, 0] > 0, torch.sin, torch.cos, (y,))
            ),
            "got torch's cond at a line of the loss",
        ),
        (
            lambda: zfunc.segments(Penalized(4, 4), (torch.ones(2, 4),) * 2, F.mse_loss),
            r"torch.autograd.grad, read at .*test_any_model_refused.py:\d+.*expected .*torch.func.grad$",
        ),
        (
            lambda: zfunc.segments(nn.Sequential(nn.Embedding(9, 4, sparse=True)), ids()),
            r"got '0' with sparse=True, expected a dense gradient: leave sparse out",
        ),
        *(
            (
                lambda written=written: zfunc.segments(Averaged(written=written), batch()),
                r"tensor that forward keeps from call to call at .*_refused.py:\d+, .*register_buffer",
            )
            for written in (False, True)
        ),
        *(
            (
                lambda loss=loss: zfunc.segments(ALONE, ONES, loss()),
                r"tensor that forward keeps from call to call at .*_refused.py:\d+, .*loss that has one",
            )
            for loss in (annealed, Smoothed)
        ),
        *(
            (
                lambda name=name: zfunc.segments(Assigned(name), batch()),
                rf"assignment to .data of '{name}' at .*_refused.py:\d+, expected .*buffer with copy_\(\)",
            )
            for name in ("scale", "embed.weight")
        ),
        (
            lambda: zfunc.segments(Tied(block=Neighbours), batch()),
            r"tensor of torch.sparse_coo at .*_refused.py:\d+, expected dense ones: call to_dense\(\)",
        ),
        (
            lambda: zfunc.segments(nn.Sequential(nn.BatchNorm1d(8, momentum=None)), ONES, F.mse_loss),
            r"momentum=None of the BatchNorm1d '0', .*: set its momentum",
        ),
        (
            lambda: zfunc.segments(
                nn.Embedding(61, 4, max_norm=1.0), (ids(), ONES[0]), lambda y, _: y.mean()
            ),
            r"max_norm of an embedding .* weight 'weight' in forward, .*: leave max_norm out",
        ),
        (
            lambda: zfunc.segments(Decoder(), (torch.ones(2, 2, 8),) * 2),
            r"branch on the value of a tensor at .*_refused.py:\d+.*to nn.Transformer, tgt_is_causal",
        ),
        (lambda: zfunc.segments(CountedWhole(), batch()), r"attribute calls \(.*changes from call to call"),
        (lambda: zfunc.segments(Tied(), {"input_ids": ids()}), r"does not fit the model .*labels"),
        (
            lambda: zfunc.segments(ALONE, ONES[:1], F.mse_loss),
            r"^example: got no targets for mse_loss, a loss of \(output, targets\), expected \(inputs, targets\)",
        ),
        (
            lambda: zfunc.segments(ALONE, ONES[:1], lambda y: F.mse_loss(y)),  # type: ignore[arg-type]
            r"^example: got one that does not fit the model \(TypeError at .*test_any_model_refused.py",
        ),
        (lambda: zfunc.segments(Late(), (torch.ones(2, 9), torch.ones(2, 8))), r"fit the model .*2, 9\]"),
        (
            lambda: zfunc.segments(nn.Linear(4, 4), (torch.ones(2, 4), None)),
            r"^loss: got none, and Linear returns no scalar.*\(a tensor of shape \[2, 4\]\).*pass zfunc.segments",
        ),
        (
            lambda: zfunc.compile(ALONE, example=ONES, device="cpu"),
            "^loss: got none with a Linear.*pass zfunc.segments",
        ),
        (lambda: zfunc.plan(ALONE, {"input": ONES[0], "labels": ONES[1]}), "^loss: got none with a Linear"),
        (lambda: zfunc.segments(nn.Linear(4, 4, device="meta"), (torch.ones(2, 4), None)), "meta device"),
        (lambda: zfunc.compile(Tied()), "example: got none with a Tied"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch.compile
def test_what_cannot_be_traced_says_what_to_change(
    make: Callable[[], Any], says: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=says):
        make()
    assert not caplog.messages
    assert capfd.readouterr() == ("", "")


def test_batches_for_a_batch_are_blamed_and_not_the_loss_that_the_model_has() -> None:
    given = torch.ones(2, 4), torch.ones(2, 1)
    program = zfunc.compile(Squared(4, 1), example=given, precision="fp32", device="cpu")
    state = zfunc.init(program)
    with pytest.raises(ValueError, match="batch: got one that does not fit the model .*4 were given"):
        zfunc.evaluate(program, state, [given, given])


class Merging(nn.Module):
    """A layer with an adapter that eval() merges into the weight, in place or as a new parameter."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight, self.more = (nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(2))
        self.in_place = in_place

    def train(self, mode: bool = True) -> "Merging":
        if self.training and not mode:
            with torch.no_grad():
                w = self.weight.data.add_(self.more) if self.in_place else self.weight + self.more
            self.weight = self.weight if self.in_place else nn.Parameter(w)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.weight + self.more if self.training else self.weight)).tanh()


@pytest.mark.parametrize("in_place", [True, False])
def test_what_eval_merges_into_parameters_is_refused_by_evaluation(in_place: bool) -> None:
    """It evaluated the weights without the adapters; training has none of it."""
    torch.manual_seed(0)
    model, given = nn.Sequential(*(Merging(in_place) for _ in range(3))), (torch.randn(4, 8),) * 2
    segments = zfunc.segments(model, given, F.mse_loss)
    check(segments, model, given, F.mse_loss)
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    with pytest.raises(ValueError, match=r"buffers that its train\(\) or eval\(\) changes.*merge_weights"):
        zfunc.evaluate(program, zfunc.init(program), given)
