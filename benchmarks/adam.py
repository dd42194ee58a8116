"""How close is the host update to the memory limit, and how far are the others?

Everybody updates the same parameters: bf16 gradients come in, are unscaled, go through AdamW with weight decay,
and a 16-bit copy comes out. The contenders take turns inside every repeat, so a noisy machine disturbs all of them
alike; a ratio is the median over repeats of the ratios within one repeat. The yardsticks are skeletons: loops that
move the bytes of such a step, each once, without arithmetic: 28 a parameter with fp32 moments (26 if the master is
split, which needs no copy), 18 with 16 bits, 14 with 8. "into" leaves the old state as it is and writes the new one
elsewhere: the same bytes again. "on" another instruction set than this CPU's best: for CPUs that lack that. SGD
with momentum, Lion and Adagrad have skeletons of one buffer less. Adafactor's moves the weights alone, though it
reads the gradient four times and the weights twice; that of Muon's first part the momentum and the direction.

    python -m benchmarks.adam --sizes 1Mi,16Mi --threads 1,2 --json benchmarks/results
    python -m benchmarks.adam --sizes 1Mi,64Mi --threads 2 --isa all --only skeleton,zfunc
    python -m benchmarks.adam --from benchmarks/results/adam-....json --plot docs/adam.svg
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from benchmarks.machine import describe, make_parser, write
from zfunc import SGD, Adafactor, Adagrad, AdamW, Lion, Muon
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import MOMENTS, STATE_FORMATS, moment_buffers
from zfunc.optim.kernel_loader import cpu_adam
from zfunc.optim.updates import host_update_
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.thread_budget import default_threads

SCALE, LR, DECAY, STEP = 0.5, 1e-4, 0.1, 10
DENORMAL = 1e-40  # what moments decay to in thousands of steps without a gradient
YARDSTICK = "skeleton fp32"
AT_ONCE = 16 << 20  # elements, of all the runs that are timed together
SIZES = "1Mi,4Mi,16Mi,64Mi,256Mi"


@frozen
class Contender:
    """A named implementation of the optimizer step: `run` makes one step. With `idle`, it is measured on
    moments that have had no gradient for thousands of steps."""

    run: Callable[[], object]
    idle: bool = False
    skeleton: str = ""  # the one of its own bytes


class Memory:
    """The buffers of `n` elements (weights, gradients, moments in every format) that all implementations use
    in turn; a set for each would not fit in memory."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        fp32, bf16, uint8 = torch.float32, torch.bfloat16, torch.uint8

        def new(dtype: torch.dtype, size: int = n) -> Tensor:
            return alloc_host(size, dtype)

        self.n = n
        self.master, self.exp_avg, self.exp_avg_sq, self.grad32 = (new(fp32) for _ in range(4))
        self.grad, self.out = new(bf16), new(bf16)
        self.halves = new(bf16), new(torch.int16)
        self.bf16 = new(bf16), new(bf16)
        self.codes = new(uint8), new(uint8), new(torch.int16, -(-n // 64))
        self.shadow = tuple(new(fp32) for _ in range(3))
        self.weights = new(bf16)
        self.weights.copy_(self.master.normal_(generator=generator))
        self.grad.copy_(self.grad32.normal_(0, 1e-3, generator=generator))

    def elsewhere(self, moments: str) -> tuple[Any, ...]:
        """A state in format `moments`, as views of the `shadow` buffers, which no other state uses."""
        if moments == "fp32":
            return self.shadow
        n, (high, m, v) = self.n, (x.view(torch.bfloat16) for x in self.shadow)
        halves = high[:n], high[n:].view(torch.int16)
        if moments == "fp32-split":
            return *halves, *self.shadow[1:]
        if moments == "16bit":
            return *halves, m[:n], v[:n]
        m, v = (x.view(torch.uint8) for x in self.shadow[1:])
        return *halves, m[:n], v[:n], self.shadow[2].view(torch.int16)[n : n + -(-n // 64)]

    def fill(self, *, idle: bool) -> None:
        """Fill the buffers before a run: weights, which a skeleton overwrites with NaN, and the moments of a
        running training, or, if `idle`, moments that thousands of steps without a gradient have made small.
        """
        for x in (self.master, self.halves[0]):
            x.copy_(self.weights)
        self.halves[1].zero_()
        if not idle:
            self.exp_avg.copy_(self.grad).mul_(0.1)
            torch.square(self.grad, out=self.bf16[1])
            self.exp_avg_sq.copy_(self.bf16[1])
            self.bf16[0].copy_(self.exp_avg)
            exp_avg, exp_avg_sq, scales = self.codes
            exp_avg.fill_(0x10)  # a quarter of the root
            exp_avg_sq.fill_(0xA0)
            scales.fill_(0x3188)  # 5 mantissa bits, up to some 1e-6
        else:
            for x in (self.exp_avg, self.exp_avg_sq, *self.bf16):
                x.fill_(DENORMAL)


def zfunc_step(
    memory: Memory,
    moments: str,
    state: tuple[Tensor, ...],
    threads: int,
    *,
    into: tuple[Tensor, ...] | None = None,
    idle: bool = False,
    isa: int = -1,
) -> Callable[[], None]:
    grad = torch.zeros_like(memory.grad) if idle else memory.grad
    out = memory.out if moments == "fp32" else None
    adam = AdamW(LR, weight_decay=DECAY, split_master=moments == "fp32-split")
    adam = adam.with_moments(moments.removesuffix("-split"), split_master=False)  # pyright: ignore
    step = adam.rule_step(StepDecision(False, SCALE, STEP, adam.factors(STEP)), 0)
    names = [x.name for x in STATE_FORMATS[moments]]
    old, new = (None if x is None else dict(zip(names, x, strict=True)) for x in (state, into))
    assert old is not None
    return lambda: host_update_(step, old, grad, out=out, into=new, threads=threads, isa=isa)


def one_buffer_step(memory: Memory, optimizer: Any, threads: int) -> Callable[[], None]:
    """A function that makes one step of SGD, Lion or Adagrad on the buffers in `memory`, with one of Adam's
    moments as its only moment: exp_avg_sq for Adagrad, whose moment has no sign, else exp_avg."""
    m, moments, squares = memory, optimizer.moments, isinstance(optimizer, Adagrad)
    codes = m.codes[1 if squares else 0], m.codes[2]
    fp32 = m.exp_avg_sq if squares else m.exp_avg
    buffers = {"fp32": (fp32,), "16bit": (m.bf16[squares],), "8bit": codes}[moments]
    weights = (m.master,) if moments == "fp32" else m.halves
    names = (x.name for x in STATE_FORMATS[optimizer.state_format()])
    state = dict(zip(names, (*weights, *buffers), strict=True))
    step = optimizer.rule_step(StepDecision(False, SCALE, STEP, optimizer.factors(STEP)), 0)
    out = m.out if moments == "fp32" else None
    return lambda: host_update_(step, state, m.grad, out=out, threads=threads)


def direction_step(memory: Memory, muon: Muon, threads: int) -> Callable[[], None]:
    """A function that makes the element-wise part of Muon's step: momentum and the update's direction."""
    m = memory
    kinds = moment_buffers(muon.state_format())
    buffers = {"fp32": (m.exp_avg,), "16bit": (m.bf16[0],), "8bit": (m.codes[0], m.codes[2])}
    state = dict(zip((x.name for x in kinds), buffers[muon.moments], strict=True))
    step = muon.direction_step(StepDecision(False, SCALE, STEP, muon.factors(STEP)))
    return lambda: host_update_(step, state, m.grad, out=m.out, threads=threads)


def adafactor_step(memory: Memory, optimizer: Adafactor, threads: int) -> Callable[[], None]:
    """A function that makes a step of Adafactor on the buffers in `memory`, as a matrix of 1,024 columns."""
    m, shape = memory, (memory.n // 1024, 1024)
    split = optimizer.moments != "fp32"
    group = optimizer.group("", shape)
    *_, means = STATE_FORMATS[optimizer.state_format(group)]
    state = {"master_high": m.halves[0], "master_low": m.halves[1]} if split else {"master": m.master}
    state[means.name] = torch.full((means.numel(m.n),), 1e-6)
    decision = StepDecision(False, SCALE, STEP, optimizer.factors(STEP))
    out = None if split else m.out
    how = {"group": group, "shape": shape, "out": out, "threads": threads}
    return lambda: optimizer.host_update(state, m.grad, decision, **how)


def skeleton(
    memory: Memory, tensors: tuple[Tensor, ...], out: Tensor | None, threads: int
) -> Callable[[], None]:
    state = [(t.data_ptr(), t.element_size()) for t in tensors]
    addresses = memory.grad.data_ptr(), 0 if out is None else out.data_ptr()
    return lambda: cpu_adam.skeleton(state, *addresses, memory.n, threads)


def with_optimizer(memory: Memory, optimizer: Any, *, idle: bool = False) -> Callable[[], None]:
    """A function that makes a step with an optimizer of torch's kind: unscale gradient, step, copy
    weights."""
    p, grad = memory.master, memory.grad
    p.grad = memory.grad32
    optimizer.step()  # makes its state, whose moments are then the shared ones
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = getattr(memory, name)
    scale = 0.0 if idle else SCALE

    def run() -> None:
        memory.grad32.copy_(grad)
        memory.grad32.mul_(scale)
        optimizer.step()
        memory.out.copy_(p)

    return run


def contenders(memory: Memory, threads: int, isas: tuple[str, ...]) -> dict[str, Contender]:
    """All implementations to measure, by name; zfunc's updates also on the instruction sets `isas`."""
    m = memory
    fp32 = (m.master, m.exp_avg, m.exp_avg_sq)
    states = {
        "fp32": fp32,
        "fp32-split": (*m.halves, m.exp_avg, m.exp_avg_sq),
        "16bit": (*m.halves, *m.bf16),
        "8bit": (*m.halves, *m.codes),
    }
    halves, sets = m.halves, cpu_adam.instruction_sets()

    def torch_adamw(**kind: bool) -> Any:
        return torch.optim.AdamW([m.master], lr=LR, weight_decay=DECAY, **kind)

    table = {
        YARDSTICK: Contender(skeleton(m, fp32, m.out, threads)),
        "skeleton fp32-split": Contender(skeleton(m, (*halves, m.exp_avg, m.exp_avg_sq), None, threads)),
        "skeleton 16bit": Contender(skeleton(m, (*halves, *m.bf16), None, threads)),
        "skeleton 8bit": Contender(skeleton(m, (*halves, m.codes[0], m.codes[1]), None, threads)),
        "skeleton weights, fp32": Contender(skeleton(m, (m.master,), m.out, threads)),
        "skeleton weights, 16bit": Contender(skeleton(m, halves, None, threads)),
        "skeleton direction, fp32": Contender(skeleton(m, (m.exp_avg,), m.out, threads)),
        "skeleton direction, 16bit": Contender(skeleton(m, (m.bf16[0],), m.out, threads)),
        "skeleton direction, 8bit": Contender(skeleton(m, (m.codes[0],), m.out, threads)),
        **{
            f"zfunc Adafactor, {moments}": Contender(
                adafactor_step(m, Adafactor(LR, weight_decay=DECAY, moments=moments), threads),
                skeleton=f"skeleton weights, {moments}",
            )
            for moments in ("fp32", "16bit")  # 8bit is 16bit's
        },
        **{
            f"zfunc Muon's direction, {moments}": Contender(
                direction_step(m, Muon(LR, moments=moments), threads),
                skeleton=f"skeleton direction, {moments}",
            )
            for moments in MOMENTS
        },
        "skeleton one buffer, fp32": Contender(skeleton(m, (m.master, m.exp_avg), m.out, threads)),
        "skeleton one buffer, 16bit": Contender(skeleton(m, (*halves, m.bf16[0]), None, threads)),
        "skeleton one buffer, 8bit": Contender(skeleton(m, (*halves, m.codes[0]), None, threads)),
        **{
            f"zfunc {name}": Contender(zfunc_step(m, name, state, threads), skeleton=f"skeleton {name}")
            for name, state in states.items()
        },
        **{
            f"zfunc {name}, into": Contender(
                zfunc_step(m, name, state, threads, into=m.elsewhere(name)), skeleton=f"skeleton {name}"
            )
            for name, state in states.items()
        },
        **{
            f"zfunc {name}, decayed": Contender(
                zfunc_step(m, name, states[name], threads, idle=True), idle=True, skeleton=f"skeleton {name}"
            )
            for name in ("fp32", "fp32-split", "16bit")  # 8 bits hold no denormal number
        },
        **{
            f"zfunc {name} on {isa}": Contender(
                zfunc_step(m, name, state, threads, isa=sets.index(isa)), skeleton=f"skeleton {name}"
            )
            for isa in isas
            for name, state in states.items()
        },
        **{
            f"zfunc {type(rule).__name__} {moments}": Contender(
                one_buffer_step(m, rule.with_moments(moments, split_master=False), threads),
                skeleton=f"skeleton one buffer, {moments}",
            )
            for rule in (SGD(LR, momentum=0.9, weight_decay=DECAY), Lion(LR, weight_decay=DECAY), Adagrad(LR))
            for moments in MOMENTS
        },
        "torch fused": Contender(with_optimizer(m, torch_adamw(fused=True))),
        "torch fused, decayed": Contender(with_optimizer(m, torch_adamw(fused=True), idle=True), idle=True),
        "torch foreach": Contender(with_optimizer(m, torch_adamw(foreach=True))),
        "torch for-loop": Contender(with_optimizer(m, torch_adamw(foreach=False))),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return table
    optimizer = DeepSpeedCPUAdam([m.master], lr=LR, weight_decay=DECAY, adamw_mode=True)
    return {**table, "deepspeed": Contender(with_optimizer(m, optimizer))}


def measure(memory: Memory, table: dict[str, Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds of one step of every implementation, by name, one number per repeat. A first round, to touch
    pages and start threads, does not count.

    Small steps, whose buffers fit in a cache, run several times per repeat, after one run that does not
    count.
    """
    runs = max(1, AT_ONCE // memory.n)
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for repeat in range(repeats + 1):
        for name, contender in table.items():
            memory.fill(idle=contender.idle)
            if contender.idle or runs > 1:  # what it makes of idle moments is what it has in the long run
                contender.run()
            start = time.perf_counter()
            for _ in range(runs):
                contender.run()
            if repeat:
                seconds[name].append((time.perf_counter() - start) / runs)
    return seconds


def summary(
    n: int, threads: int, table: dict[str, Contender], seconds: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Table rows, one per implementation: median ratios of its seconds to the yardstick's, to its skeleton's,
    to those of the same update in place, and of other libraries' to its own."""

    def ratio(name: str, base: str) -> float | None:
        if base not in seconds:
            return None
        return median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))

    def spread(name: str) -> list[float]:
        ratios = [a / b for a, b in zip(seconds[name], seconds[YARDSTICK], strict=True)]
        return [min(ratios), max(ratios)]

    rows = []
    for name in seconds:
        in_place = name.removesuffix(", into")
        theirs = ratio("deepspeed", name) if "deepspeed" in seconds else None
        rows.append(
            {
                "elements": n,
                "threads": threads,
                "name": name,
                "times_skeleton": ratio(name, YARDSTICK),
                "spread": spread(name),
                "times_own_skeleton": ratio(name, table[name].skeleton),
                "times_in_place": ratio(name, in_place) if in_place != name else None,
                "faster_than_deepspeed": theirs,
                "faster_than_torch_fused": ratio("torch fused", name) if "torch fused" in seconds else None,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'elements':>10} {'threads':>7}  {'contender':<28}{'x skeleton':>11}{'from':>7}{'to':>7}{'x own':>7}"
        f"{'x in place':>12}{'DeepSpeed / it':>16}{'fused / it':>12}"
    )
    for row in rows:
        low, high = row["spread"]
        keys = ("times_own_skeleton", "times_in_place", "faster_than_deepspeed", "faster_than_torch_fused")
        told = [row.get(key) for key in keys]  # older results lack some
        own, in_place, deepspeed, fused = (f"{x:.2f}" if x is not None else "" for x in told)
        print(
            f"{row['elements']:>10} {row['threads']:>7}  {row['name']:<28}{row['times_skeleton']:>11.2f}{low:>7.2f}"
            f"{high:>7.2f}{own:>7}{in_place:>12}{deepspeed:>16}{fused:>12}"
        )


def plot(results: dict[str, Any], machine: dict[str, Any], path: str) -> None:
    """Write a plot to `path`: time over the skeleton's, on the left by size with all threads, on the right by
    number of threads at one size."""
    from benchmarks.plots import COLORS, figure, save

    rows = results["rows"]
    most = max(row["threads"] for row in rows)
    size = sorted({row["elements"] for row in rows})[-2:][0]
    told = f"{machine['cpu']}, {machine['cores']} cores, {results['instruction_set']}"
    fig, (left, right) = figure(
        2, title=f"Host step over a loop that moves the bytes of fp32 moments ({told})"
    )
    shown = [
        "torch foreach",
        "deepspeed",
        "torch fused",
        YARDSTICK,
        "zfunc fp32",
        "zfunc 16bit",
        "zfunc 8bit",
    ]
    for name in shown:
        color = COLORS[name.removeprefix("zfunc ").split()[0]]
        style = {"color": color, "linewidth": 1.4, "linestyle": "--" if name == "torch foreach" else "-"}
        for axes, key, chosen in (
            (left, "elements", lambda row: row["threads"] == most),
            (right, "threads", lambda row: row["elements"] == size),
        ):
            points = [
                (row[key], row["times_skeleton"]) for row in rows if row["name"] == name and chosen(row)
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name, **style)
    left.set_xscale("log", base=2)
    left.set(xlabel=f"parameters, {most} threads", ylabel="time over the skeleton's", yscale="log")
    right.set(xlabel=f"threads, {size >> 20} Mi parameters", yscale="log")
    sizes = sorted({row["elements"] for row in rows})
    left.set_xticks(sizes, labels=[f"{n >> 20} Mi" for n in sizes])
    counts = sorted({row["threads"] for row in rows})
    right.set_xticks(counts, labels=[str(t) for t in counts])
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 5, 8]
    for axes in (left, right):
        axes.set_yticks(ticks, labels=[f"{x:g}" for x in ticks])
        axes.minorticks_off()
    right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save(fig, path)


def size(text: str) -> int:
    for suffix, factor in (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def thread_counts() -> str:
    """The default of --threads: powers of two up to the number of usable threads, and that number."""
    most = default_threads()
    return ",".join(map(str, sorted({*(1 << k for k in range(most.bit_length())), most})))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"elements, comma separated (default: {SIZES})")
    parser.add_argument("--threads", help="comma separated (default: 1, 2, 4, ... and all)")
    parser.add_argument("--repeats", type=int, default=11, help="fewer from 64 Mi elements on")
    parser.add_argument("--only", help="comma separated words; contenders without any of them are left out")
    parser.add_argument(
        "--isa", choices=("best", "all"), default="best", help="the instruction sets of zfunc"
    )
    parser.add_argument(
        "--from", dest="given", nargs="+", metavar="JSON", help="results to show and plot, not to measure"
    )
    parser.add_argument("--plot", metavar="SVG", help="draw the results; needs matplotlib")
    options = parser.parse_args()
    if options.given:
        kept = [json.loads(Path(path).read_text()) for path in options.given]
        results, machine = kept[0]["results"], kept[0]["machine"]
        results["rows"] = [row for x in kept for row in x["results"]["rows"]]
    else:
        machine, kind = describe(), cpu_adam.instruction_set()
        others = tuple(x for x in cpu_adam.instruction_sets() if x != kind)
        print(f"{machine}, {kind}", flush=True)
        rows = []
        for threads in map(int, (options.threads or thread_counts()).split(",")):
            torch.set_num_threads(threads)
            for n in map(size, options.sizes.split(",")):
                memory = Memory(n)
                table = contenders(memory, threads, others if options.isa == "all" else ())
                if options.only:
                    words = [YARDSTICK, *options.only.split(",")]
                    table = {name: x for name, x in table.items() if any(word in name for word in words)}
                repeats = options.repeats if n < 64 << 20 else max(3, options.repeats // 2)
                rows += summary(n, threads, table, measure(memory, table, repeats))
                print(f"measured: {n >> 20} Mi elements on {threads} threads", flush=True)
        results = {"instruction_set": kind, "repeats": options.repeats, "rows": rows}
    if options.json:
        write(options.json, "adam", results)
    show(results["rows"])
    if options.plot:
        plot(results, machine, options.plot)


if __name__ == "__main__":
    main()
