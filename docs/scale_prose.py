"""What docs/scale.md says in sentences: the setting, the findings, and what follows from them, each with its figure.

The invariant: a sentence that compares two figures is checked here; where it is no longer so, the page is not
written.
"""

from attrs import evolve
from scale_steps import (
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
from scale_tables import GH200, H100, H200, V100, constant_batch, four, gain

from zfunc.profile_file import load

LAST = WORLDS[-1]
FULL = evolve(H200, num_layers=86)  # 70 B to the letter


def setting() -> str:
    """What was planned, what is assumed, and what cannot be known."""
    return f"""\
No step of this page was run: all of it is simulated, by the code behind `zfunc plan`, on profiles of machines.

- **10 B**: {H100.num_layers} layers of {H100.hidden_size:,}, {_billions(H100)}, {H100.rows} sequences of \
{SEQ_LENGTH:,} tokens a rank; on `h100`, `v100-32gb`, and `gh200`, whose nodes have one GPU.
- **65 B**: {H200.num_layers} layers of {H200.hidden_size:,}, the shape of models called 70 B; with the blocks of GPT-2 \
{_billions(H200)}. {H200.rows} sequences a rank on `h200`, the one card it fits on. With {FULL.num_layers} layers it is \
{_billions(FULL)}, and {_lacking(FULL)} too large for that.
- A plain step: Overlapped, buckets of 50 M, clipping, everything recomputed, ZeRO stage 2, the 16 bits of the card.

**Assumed.** Peaks are from data sheets; the share of them that is reached is given in each profile, most of it an
assumption with its reason (`zfunc/profiles/*.toml`): {_reached(H100)} of 16-bit arithmetic on the H100,
{_reached(V100)} on the V100, 80 % of copies, host memory and network. Collectives are rings at bus bandwidth: inside a
node at NVLink's, beyond it at that of all ports of a node together, as NCCL's rings enter a node by every port
([nccl#495](https://github.com/NVIDIA/nccl/issues/495)); {_rate(H100)} on the H100, {_rate(V100)} on the V100,
{_rate(GH200)} on the GH200. `zfunc plan --world` may count on less: one port. A collective takes one hop's latency for
each of log2(ranks); a ring passes more ([nccl#1594](https://github.com/NVIDIA/nccl/issues/1594)).

**Not in it.** No rank is slower than another, no network is shared or fails, nothing waits for data. Arithmetic is as
efficient with one sequence as with {H100.rows}. Nobody has checked the network part against a cluster. And whether a
batch of {LAST * H100.rows * SEQ_LENGTH / 1e6:.1f} M tokens, as {LAST:,} ranks make of it, still trains well, no
simulation says."""


def in_short() -> str:
    """The findings."""
    best = max(WORLDS, key=lambda n: simulated(H100, n).per_gpu)
    a, b, g = simulated(H100, LAST), simulated(H200, LAST), simulated(GH200, LAST)
    speculative = simulated(H100, 8, speculate=1_000_000)
    _hold(a.bound["network"] < a.bound["compute"] and b.bound["network"] < b.bound["compute"], "the network")
    return f"""\
- **The host bounds few ranks, the network many.** More of a step's critical path is network than host and copies from
  {_overtakes(H100)} ranks on for 10 B on H100, from {_overtakes(V100)} on V100, {_overtakes(GH200)} on GH200, and
  {_overtakes(H200)} for 65 B on H200. It never overtakes compute: at {LAST:,} ranks it is
  {_share(a)}, {_share(simulated(V100, LAST))}, {_share(g)} and {_share(b)}.
- **A rank of 10 B is fastest among {best}** on H100: {simulated(H100, best).per_gpu:,.0f} tokens/s, and \
{a.per_gpu:,.0f} among {LAST:,}, {LAST * a.per_gpu / 1e6:.1f} M in all.
- **Recipes are for one node.** Among 8 ranks the speculative update buys {gain(speculative, simulated(H100, 8))}, among
  {LAST:,} {gain(simulated(H100, LAST, speculate=1_000_000), a)}: there is no host work left to hide. Larger buckets are
  for many nodes: {gain(simulated(H100, LAST, bucket_size=500_000_000), a)} at {LAST:,} ranks.
- **Offload itself is for few ranks.** Of the state of 10 B, a search leaves {_ratio(H100, 1)} on the host with one
  H100 and {_ratio(H100, 8)} with 8. What is left then is ZeRO-2.
- **70 B does not fit**, on any number of ranks: parameters are whole on every device."""


def conclusions() -> str:
    """What would be built next, and the figure that says so."""
    a, b = simulated(H100, LAST), simulated(H200, LAST)
    parameters = 2 * H200.parameters
    on = hardware(load("h200"), setup(H200, LAST).precision, LAST)
    gathered = parameters / on.rates["network"]
    many, few = four(H200, LAST, 2), simulated(H100, LAST, network="every hop")
    apart = simulated(H200, LAST, schedule=NormsApart())
    both = simulated(H200, LAST, schedule=NormsApart(), bucket_size=500_000_000)
    _hold(b.held_up["square_sum"] > 0.5 * sum(b.held_up.values()), "what holds up backward")
    _hold(gathered < b.compute_seconds, "parameters gathered once more")
    slowest = constant_batch(H100, LAST)
    return f"""\
1. **ZeRO-3.** Of the {b.memory["device"] / 1e9:.0f} GB that a rank of 65 B needs on the device, parameters are \
{parameters / 1e9:.0f}; its part of everything on the host is {_host(b) / 1e9:.1f} GB at {LAST:,} ranks. Whatever the
   ranks, {most_layers(evolve(H200, profile="h100"), LAST)} such layers fit on an H100 and \
{most_layers(H200, LAST)} on an H200. Gathering parameters once more takes {gathered:.2f} s of network, beside
   {b.compute_seconds:.2f} s of compute that could hide it.
2. **Sums of squares out of backward's way.** `square_sum` waits for its bucket's `reduce_scatter` on the lane of
   backward, and holds it up for {b.held_up["square_sum"]:.2f} of {b.seconds:.2f} s (65 B, {LAST:,} ranks). On a lane of
   its own it is {gain(apart, b)} tokens/s, with buckets of 500 M {gain(both, b)}. One line of a schedule does it today
   (`NormsApart` in `docs/scale_steps.py`); the recipe should.
3. **All-gathers under the next forward.** At {LAST:,} ranks a step goes on for {a.after_backward:.2f} s after backward
   with 10 B and {b.after_backward:.2f} s with 65 B: {a.after_backward / a.seconds:.0%} and \
{b.after_backward / b.seconds:.0%} of it, nearly all of it `all_gather`. A forward needs the first segment's alone.
4. **Fewer and shallower collectives.** If a ring's every hop counts, {LAST:,} ranks of 10 B lose \
{1 - few.per_gpu / a.per_gpu:.0%}; buckets of 500 M bring most of that back, hierarchical collectives would too, at
   {LAST // 8} hops between nodes and 7 inside. To be measured first: no figure here is less certain.
5. **Activations to the host.** A rank of 65 B has room for {H200.rows} sequences, so it moves every parameter for
   {H200.rows * SEQ_LENGTH:,} tokens; four such micro-batches buy {gain(many, b)}. Copies run for \
{b.busy["d2h"]:.1%} of the step each way: those lanes are free to take activations out and back.
6. **Not beyond the batch.** With a constant batch, {LAST:,} ranks of 10 B are \
{constant_batch(H100, 16).seconds / slowest.seconds:.0f} times as fast as 16, not 64: one sequence a rank does not hide
   {a.tokens // SEQ_LENGTH} sequences' worth of network. Splitting a layer over ranks (tensor parallelism) starts there."""


def _billions(case: Case) -> str:
    return f"{case.parameters / 1e9:.1f} B parameters"


def _lacking(case: Case) -> str:
    return f"{simulated(case, LAST).lacking['device'] / 1e9:.1f} GB"


def _reached(case: Case) -> str:
    return f"{load(case.profile).value('reached', setup(case, 1).precision):.0%}".replace("%", " %")


def _rate(case: Case) -> str:
    on = hardware(load(case.profile), setup(case, LAST).precision, LAST)
    return f"{on.rates['network'] / 1e9:.0f} GB/s"


def _host(figures: Figures) -> int:
    return figures.memory["host"] + figures.memory["pinned"]


def _share(figures: Figures) -> str:
    return f"{figures.bound['network']:.0%}".replace("%", " %")


def _overtakes(case: Case) -> str:
    """From how many ranks on more of the step is bound by the network than by the host and the copies."""
    for n in WORLDS:
        bound = simulated(case, n).bound
        if bound.get("network", 0.0) > sum(bound.get(kind, 0.0) for kind in ("host", "d2h", "h2d")):
            return f"{n}"
    return "no number of"


def _ratio(case: Case, world: int) -> str:
    return f"{found(case, world, ratios_only=True)[0].offload_ratio:.0%}".replace("%", " %")


def _hold(so: bool, what: str) -> None:
    if not so:
        raise ValueError(
            f"docs/scale.md: got figures that say otherwise about {what}: expected them as before, rewrite it"
        )
