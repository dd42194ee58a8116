"""What is public, page by page: the prose of docs/api/*.md, and `::: name` where make_api.py puts that name.

`::: a as b` shows under the name b, by which it is used, what the sources call a.

The invariant: a name is on one page, once; a test holds `zfunc.__all__` and the modules in `COMPLETE` against this.
"""

INDEX = """\
# zfunc, by name

Every name that is meant to be used, with its signature and docstring. [The README](../../README.md) says what
zfunc is and has a loop to begin with; [the examples](../../examples) are read from top to bottom;
[design.md](../design.md) has the reasons.

`import zfunc` imports nothing else: a name is looked up when it is first used, so what plans, checks, simulates
and draws runs without torch. Sizes are in bytes, times in seconds and rates in units a second unless the name
says otherwise. Steps are counted from 1. Bad arguments are `ValueError` or `TypeError`, each with what was got,
what was expected and what to do; the [other errors](errors.md) have types of their own.

"""

TRAINING = """\
# Training

The calls of a training loop, in the order in which they are made. A [Program](#zfuncprogramprogram) holds no
training state; a [State](#zfuncstatestate) is a value that each step takes and the next one replaces.

```python
segments = [zfunc.segment(name, module) for name, module in modules.items()]
program = zfunc.compile(segments, optimizer=zfunc.AdamW(lr=3e-4), clip_norm=1.0)
state = zfunc.init(program, seed=0)
for batch in batches:
    state, metrics = zfunc.train_step(program, state, batch)
```

## A model

A model is a sequence of segments that run one after another. The last one takes the targets too, and returns
the mean loss.

::: zfunc.segment
::: zfunc.segments.Segment as zfunc.Segment
::: zfunc.layout.Parameter

## Compile and train

::: zfunc.compile
::: zfunc.program.Program
::: zfunc.init
::: zfunc.state.State
::: zfunc.train_step
::: zfunc.step.Metrics
::: zfunc.flush

## Read

::: zfunc.params
::: zfunc.evaluate
::: zfunc.apply

## The optimizer

::: zfunc.AdamW
::: zfunc.matrices_only
::: zfunc.adam.everything
::: zfunc.LossScale

## Save and load

A checkpoint is a folder of safetensors files and a manifest. Whatever saved it, any program of the same model
loads it: other ranks, bucket sizes, schedules, precisions and moments.

```python
path = zfunc.save("checkpoints", program, state, extra={"note": "before the sweep"})
state = zfunc.load("checkpoints", program)  # the newest that is whole
state, metrics = zfunc.train_step(program, state, batch, save="checkpoints")  # of the state before the step
```

::: zfunc.save
::: zfunc.Save
::: zfunc.saving.Saved
::: zfunc.load

## A DeepSpeed configuration

::: zfunc.from_deepspeed
::: zfunc.configured.Configured

## Tests of a training

::: zfunc.Jitter
::: zfunc.faults.Fault
"""

RATES = """\
# Learning rates: `zfunc.lr`

A learning rate is a function of the step, counted from 1. These return frozen values that can be called,
compared, printed and kept with a run. `zfunc.AdamW(lr=...)` takes one of them, any other function, or a number.

::: zfunc.lr.constant
::: zfunc.lr.linear_warmup
::: zfunc.lr.warmup_cosine
::: zfunc.lr.warmup_linear

## What they return

::: zfunc.lr.Constant
::: zfunc.lr.LinearWarmup
::: zfunc.lr.WarmupCosine
::: zfunc.lr.WarmupLinear
"""

HUGGING_FACE = """\
# Hugging Face models: `zfunc.hf`

Causal language models of transformers, cut into segments, filled from a local folder, and written back as one
that `from_pretrained` loads. `pip install "zfunc[hf]"` brings transformers; nothing is ever downloaded.

```python
config, segments = zfunc.hf.load("a-local-folder")
program = zfunc.compile(segments, clip_norm=1.0)
state = zfunc.init(program)  # reads the weights, a segment at a time
state, metrics = zfunc.train_step(program, state, zfunc.hf.batch(input_ids, labels))
zfunc.hf.save("a-new-folder", program, state, config="a-local-folder")
```

::: zfunc.hf.load
::: zfunc.hf.segments
::: zfunc.hf.batch
::: zfunc.hf.save
::: zfunc.hf.export
::: zfunc.export.Exported
"""

PLANNING = """\
# Planning a step that is not there yet

Does a step fit, how long does it take, what bounds it, what would help: before anything is allocated, and
without a GPU. `zfunc.plan` is a call and a module: what plans themselves are is in
[schedules.md](schedules.md#plans).

::: zfunc.planner.plan as zfunc.plan
::: zfunc.planner.Planned
::: zfunc.advice.Advice
::: zfunc.choices.Setup
::: zfunc.choices.Choice
::: zfunc.choices.Step

## Machines as profiles

::: zfunc.profile_file.names
::: zfunc.profile_file.load
::: zfunc.profile_file.parse
::: zfunc.profile_file.text
::: zfunc.profile.Profile
::: zfunc.profile.Figure
::: zfunc.calibrate.calibrate
"""

SCHEDULES = """\
# Schedules, and how to write one

A schedule is anything callable `Graph -> Plan`: it chooses lanes, and the order on each. It cannot change a
result, because the waits between lanes are derived from what the operations read and write, and `verify`
refuses a plan that could race. All of it runs without torch.

```python
from zfunc.plan import build


def one_copy_lane(graph):
    lanes = {}
    for i, op in enumerate(graph):
        lanes.setdefault("copies" if op.kind in ("d2h", "h2d") else op.kind, []).append(i)
    return build(graph, lanes)


program = zfunc.compile(segments, schedule=one_copy_lane)
```

[03_write_a_schedule.py](../../examples/03_write_a_schedule.py) writes one, checks it, times it and trains with
it.

## The schedules there are: `zfunc.schedules`

::: zfunc.schedules.Serial
::: zfunc.schedules.Overlapped
::: zfunc.schedules.Interleaved
::: zfunc.schedules.CriticalPath
::: zfunc.schedules.Search

## What a step does: graphs

::: zfunc.graph.Region
::: zfunc.graph.Op
::: zfunc.graph.Conflict
::: zfunc.graph.Graph
::: zfunc.graph.label

## Plans

::: zfunc.plan.build
::: zfunc.plan.Plan
::: zfunc.plan.Lane
::: zfunc.plan.parse
::: zfunc.plan.happens_before

## Is it right

::: zfunc.verify.verify
::: zfunc.verify.races
"""

SIMULATION = """\
# Time, memory and pictures of a plan

What a plan costs on given hardware, and how it looks. A timeline is one type for steps that were simulated and
steps that were measured (`train_step(..., trace=True)`), so everything here takes both. All of it runs without
torch.

## Hardware and time

::: zfunc.hardware.Hardware
::: zfunc.hardware.Measured
::: zfunc.hardware.ROUND
::: zfunc.simulate.simulate
::: zfunc.simulate.critical_path
::: zfunc.timeline.Timeline
::: zfunc.timeline.Event

## Memory

::: zfunc.memory.memory
::: zfunc.memory.Peak
::: zfunc.memory.kept
::: zfunc.memory.held

## Pictures

::: zfunc.draw.text
::: zfunc.draw.svg
::: zfunc.page.page
::: zfunc.chrome.chrome_trace
::: zfunc.chrome.read_chrome_trace

## What held a step up

::: zfunc.critical.critical
::: zfunc.critical.Link
::: zfunc.critical.bound_by
::: zfunc.compare.table
"""

RECIPES = """\
# Recipes and stages

A recipe says what a step does: a function `Job -> operations`, in serial order, each with the regions it reads
and writes. A stage is the function that does what an operation says. With an operation and a stage of your own,
waits, memory, checks, pictures and every schedule follow. [06_add_a_stage.py](../../examples/06_add_a_stage.py)
compresses gradients before their copy, in three operations and three functions.

## The recipes there are

::: zfunc.recipes.zero_offload
::: zfunc.recipes.delayed
::: zfunc.recipes.flush
::: zfunc.recipes.checkpoint

## What a recipe is told

::: zfunc.emit.Job
::: zfunc.emit.SegmentCost
::: zfunc.layout.make_layout
::: zfunc.layout.Layout
::: zfunc.layout.Bucket
::: zfunc.layout.Span

## The operations there are

`Emit(job)` makes each of them with the regions it touches; a recipe yields what it makes, changed or not.

::: zfunc.emit.Emit

## What a stage is given

A stage is a function of an operation, the memory that the operation declared (`mem[region]` for each region it
reads or writes) and the constants of the step; it returns nothing. `zfunc.compile(stages={verb: function})`
adds one. With `train_step(..., debug=True)` it is handed no other regions than those.

::: zfunc.stage.Step
::: zfunc.verdict.Verdict
"""

KERNEL = """\
# The host kernel

One Adam step over flat host buffers, as checked calls into the compiled kernel. A call that raises has touched
no buffer, and the number of threads never changes a bit.

::: zfunc.adam_update_
::: zfunc.sweeps.accumulate_
::: zfunc.sweeps.square_sum
::: zfunc.threads.default_threads

## Compact state

::: zfunc.compact.SplitMaster
::: zfunc.compact.Codes

## What it computes, in NumPy

The kernel equals these bit by bit.

::: zfunc.adam_reference.reference_update
::: zfunc.adam_reference.Updated
"""

ERRORS = """\
# Errors

Bad arguments are plain `ValueError` and `TypeError`. What else can go wrong has a type, to be caught. Each
message says what was got, what was expected and what to do.

::: zfunc.PlanError
::: zfunc.DonatedStateError
::: zfunc.NonFiniteError
::: zfunc.OutOfMemory
::: zfunc.ExecutionError
::: zfunc.LaneTimeout
::: zfunc.RankError
::: zfunc.CheckpointError
::: zfunc.UndeclaredAccess
::: zfunc.faults.InjectedFault
"""

# Modules of which every public name has to be here.
COMPLETE = ("graph", "hf", "lr", "recipes", "schedules", "timeline", "verify")

PAGES = {
    "training.md": TRAINING,
    "lr.md": RATES,
    "hf.md": HUGGING_FACE,
    "planning.md": PLANNING,
    "schedules.md": SCHEDULES,
    "simulation.md": SIMULATION,
    "recipes.md": RECIPES,
    "kernel.md": KERNEL,
    "errors.md": ERRORS,
}
