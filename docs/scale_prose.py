"""What docs/scale.md says in sentences: the setting, the findings, what follows from them, each with its
figure.

The invariant: where a sentence depends on which of two figures is larger, that is checked here; if it is no
longer
so, the page is not written.
"""

import re
import textwrap

from attrs import evolve
from scale_steps import (
    EVERY_BUCKET,
    SEQ_LENGTH,
    WORLDS,
    Case,
    Figures,
    NormsApart,
    found,
    hardware,
    most_layers,
    setup,
    simulated,
)
from scale_tables import CASES, GH200, H100, H200, V100, constant_batch, four, gain

from zfunc.planner.profile_toml import load_profile

LAST = WORLDS[-1]
FULL = evolve(H200, num_layers=86)  # 70 B to the letter
LARGE = 500_000_000
ITEM = re.compile(r"(- |\d\. )")


def _fills(case: Case) -> str:
    """How much of a card one step of this takes."""
    made = simulated(case, LAST)
    needed, there = made.memory["device"] / 1e9, made.room["device"] / 1e9
    lacks = f", so {needed - there:.1f} GB are missing" if made.lacking else ""
    return f"needs {needed:.1f} GB of the {there:.1f} that such a card has for tensors{lacks}"


def setting() -> str:
    """What was planned, what is assumed, and what cannot be known."""
    tokens = LAST * H100.rows * SEQ_LENGTH / 1e6
    return f"""\
No step of this page was run: all of it is simulated, by the code behind `zfunc plan`, on profiles of machines.

- **10 B**: {_shape(H100)}; {H100.rows} sequences of {SEQ_LENGTH:,} tokens a rank, on `h100`, `v100-32gb`, and
  `gh200`, whose nodes have one GPU.
- **65 B**: {_shape(H200)}: the shape of models that are called 70 B, with the blocks of a GPT-2.
  {H200.rows} sequences a rank on `h200`, the only card of this page that has room for it.
- **70 B** to the letter, {_shape(FULL)}, {_fills(FULL)}.
- The plain step: Overlapped, buckets of 50 M parameters, clipping, all of forward recomputed, ZeRO stage 2,
  and the
  16 bits the card is fast in.

**What is assumed.** Peaks are from data sheets. Which share of them is reached is a figure of the profile,
most often
an assumption with its reason beside it (`zfunc/planner/profiles/*.toml`): {_reached(H100)} of the H100's 16-bit
arithmetic,
{_reached(V100)} of the V100's, 80 % of copies, host memory and network, on the GH200 what others
measured. A collective is a ring. Inside a node
it runs
at the speed of NVLink; between nodes at that of all ports of a node together, because NCCL's rings enter a
node by
every port ([nccl#495](https://github.com/NVIDIA/nccl/issues/495)): {_rate(H100)} on the H100, {_rate(V100)}
on the
V100, {_rate(GH200)} on the GH200. It takes the latency of log2(ranks) hops; today's rings pass more
([nccl#1594](https://github.com/NVIDIA/nccl/issues/1594)). What changes with these two is in a table below.

**What this cannot know.** No rank is slower than the others, nobody else is on the network, nothing fails, no
data is
waited for. A GPU is as efficient with one sequence as with {H100.rows}. The network's part was never held
against a
cluster. And whether a batch of {tokens:.1f} M tokens, which {LAST:,} ranks of 10 B make, still trains well."""


def in_short() -> str:
    """The findings."""
    best = max(WORLDS, key=lambda n: simulated(H100, n).per_gpu)
    last = {case: simulated(case, LAST) for case in CASES}
    _hold(all(f.bound["network"] < f.bound["compute"] for f in last.values()), "network and compute")
    shares = [_percent(f.bound["network"]) for f in last.values()]
    few = gain(simulated(H100, 8, speculate=EVERY_BUCKET), simulated(H100, 8))
    many = gain(simulated(H100, LAST, speculate=EVERY_BUCKET), last[H100])
    return f"""\
- **Few ranks wait for the host, many for the network.** More of the critical path is network than host and
  copies
  from {_overtakes(H100)} ranks on with 10 B on H100, from {_overtakes(V100)} on V100, from
  {_overtakes(GH200)} on
  GH200, and from {_overtakes(H200)} with 65 B on H200. It does not overtake compute: at {LAST:,} ranks it
  bounds
  {shares[0]}, {shares[1]}, {shares[2]} and {shares[3]} of the step.
- **The best world** for 10 B on H100 has {best} ranks: {simulated(H100, best).per_gpu:,.0f} tokens/s a GPU.
  With
  {LAST:,} it is {last[H100].per_gpu:,.0f}, {LAST * last[H100].per_gpu / 1e6:.1f} M in all.
- **Recipes that hide the host are for a node or two.** The speculative update buys {few} among 8 ranks and
  {many}
  among {LAST:,}, where the host has nearly nothing to do. There, larger buckets do:
  {gain(simulated(H100, LAST, bucket_size=LARGE), last[H100])}.
- **So is offload itself.** With one H100, the fastest has {_ratio(H100, 1)} of the state of 10 B on the host;
  with 8 it is {_ratio(H100, 8)}, which is ZeRO-2.
- **A schedule buys most where nothing waits for the norm.** Without clipping, among 8 ranks of 10 B on H100,
  Overlapped is at {_without_clipping("Overlapped")}, Interleaved at {_without_clipping("Interleaved")},
  CriticalPath at
  {_without_clipping("CriticalPath")}. With clipping, order matters once the network does: then CriticalPath is at
  {gain(simulated(H200, LAST, schedule="CriticalPath"), last[H200])} with 65 B at {LAST:,} ranks.
- **The device is the limit to size.** Parameters are whole on every rank: {2 * H200.parameters / 1e9:.0f} GB
  of the
  {last[H200].memory["device"] / 1e9:.0f} that 65 B needs. Ranks do not help."""


def conclusions() -> str:
    """What would be built next, and the figure that says so."""
    a, b = simulated(H100, LAST), simulated(H200, LAST)
    _hold(b.held_up["square_sum"] > 0.5 * sum(b.held_up.values()), "what holds up backward")
    gathered = 2 * H200.parameters / _network(H200)
    _hold(gathered < b.compute_seconds, "parameters gathered once more")
    apart = gain(simulated(H200, LAST, schedule=NormsApart()), b)
    both = gain(simulated(H200, LAST, schedule=NormsApart(), bucket_size=LARGE), b)
    hops = simulated(H100, LAST, network="every hop")
    large = simulated(H100, LAST, network="every hop", bucket_size=LARGE)
    faster = constant_batch(H100, 16).seconds / constant_batch(H100, LAST).seconds
    none = simulated(H100, LAST, recompute="none")
    return f"""\
1. **ZeRO-3.** At {LAST:,} ranks, one needs {_host(b) / 1e9:.1f} GB on the host for 65 B and
   {b.memory["device"] / 1e9:.0f} GB on the device. Of layers as wide, {_most("h100")} fit on an H100 and
   {_most("h200")} on an H200. With parameters divided too, gathering them once more takes {gathered:.2f} s of
   network,
   beside {b.compute_seconds:.2f} s of compute to hide it.
2. **Sums of squares out of backward's way.** `square_sum` of a bucket waits for its `reduce_scatter`, on the
   lane of
   backward, and so does all that follows: {b.held_up["square_sum"]:.2f} of {b.seconds:.2f} s with 65 B at
   {LAST:,}
   ranks. On a lane of its own ({apart} tokens/s) and with buckets of 500 M ({both}), a schedule can do that
   today:
   `NormsApart` in `docs/scale_steps.py`.
3. **All-gathers under the next forward.** At {LAST:,} ranks a step goes on for {a.after_backward:.2f} s after
   backward
   with 10 B, {_percent(a.after_backward / a.seconds)} of it, and for {b.after_backward:.2f} s with 65 B,
   {_percent(b.after_backward / b.seconds)}. Most of that is `all_gather`, and the next forward begins with
   one segment.
4. **Fewer and shallower collectives.** If a ring's every hop counts, {LAST:,} ranks of 10 B on H100 are at
   {gain(hops, a)}, and with buckets of 500 M at {gain(large, a)}. Buckets that grow with the world come first,
   hierarchical collectives next. No figure of this page is less certain: measure a `reduce_scatter` before
   either.
5. **Activations to the host.** 65 B has room for {H200.rows} sequences a rank, and sends every gradient for
   {H200.rows * SEQ_LENGTH:,} tokens; four such micro-batches buy {gain(four(H200, LAST, 2), b)}. The lanes of
   copies
   are busy for {100 * b.busy["d2h"]:.1f} % of the step each way, so they are free for that. With 10 B on
   H100, keeping
   all activations would buy {gain(none, a)} and needs {none.memory["device"] / 1e9:.1f} of
   {none.room["device"] / 1e9:.0f} GB.
6. **Layers divided over ranks.** With a constant batch {LAST:,} ranks of 10 B are {faster:.0f} times as fast
   as 16, not
   {LAST // 16}: one sequence is too little work for all that is sent. Beyond that, tensor parallelism."""


def reflowed(text: str, width: int = 112) -> str:
    """Markdown with its paragraphs and items wrapped anew: figures are not as long as what stands for them."""
    blocks: list[list[str]] = []
    for line in text.split("\n"):
        if blocks and _is_prose(line) and _is_prose(blocks[-1][-1]) and not ITEM.match(line):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return "\n".join(_wrapped(block, width) for block in blocks)


def _is_prose(line: str) -> bool:
    return bool(line.strip()) and line[0] not in "|!<#"


def _wrapped(block: list[str], width: int) -> str:
    if not _is_prose(block[0]):
        return block[0]
    item = ITEM.match(block[0])
    indent = " " * len(item[0]) if item else ""
    words = " ".join(" ".join(block).split()).replace(" %", "\0%")  # a number and its % stay together
    return textwrap.fill(words, width, subsequent_indent=indent, break_on_hyphens=False).replace("\0%", " %")


def _shape(case: Case) -> str:
    return f"{case.num_layers} layers of {case.hidden_size:,}, {case.parameters / 1e9:.1f} B parameters"


def _reached(case: Case) -> str:
    return _percent(load_profile(case.profile).value("reached", setup(case, 1).precision))


def _network(case: Case) -> float:
    return hardware(load_profile(case.profile), setup(case, LAST).precision, LAST).rates["network"]


def _rate(case: Case) -> str:
    return f"{_network(case) / 1e9:.0f} GB/s"


def _without_clipping(schedule: str) -> str:
    return gain(simulated(H100, 8, clip_norm=None, schedule=schedule), simulated(H100, 8))


def _most(profile: str) -> int:
    return most_layers(evolve(H200, profile=profile), LAST)


def _host(figures: Figures) -> int:
    return figures.memory["host"] + figures.memory["pinned"]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _overtakes(case: Case) -> int:
    """From how many ranks on more of the step is bound by the network than by the host and the copies."""
    for n in WORLDS:
        bound = simulated(case, n).bound
        if bound.get("network", 0.0) > sum(bound.get(kind, 0.0) for kind in ("host", "d2h", "h2d")):
            return n
    raise ValueError(
        f"docs/scale.md: got no world in which {case.name} waits for the network: rewrite what it says"
    )


def _ratio(case: Case, world: int) -> str:
    return _percent(found(case, world, ratios_only=True)[0].offload_ratio)


def counted_on() -> str:
    """What `zfunc plan` has for a rank of several nodes, where it is less than the tables."""
    planned = load_profile(H100.profile).hardware("bf16", LAST).rates["network"]
    return " `zfunc plan --world` counts on that." if planned < _network(H100) else ""


def _hold(so: bool, what: str) -> None:
    if not so:
        raise ValueError(f"docs/scale.md: got figures that say otherwise about {what}: rewrite what it says")
