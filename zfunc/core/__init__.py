"""A training step as data, without torch: its operations, and when they run.

    dtypes            one table of dtypes: bytes, and their names in torch, NumPy and safetensors
    layout            parameters as spans of one flat buffer; buckets and shards of it
    optimizer_state   the buffers of each format of the optimizer state
    setting_values    the values a setting may have: words, limits, checks
    settings          `StepSettings`: every setting of a step, once
    setting_docs      the settings in the signature and docstring of a function that takes them by name
    shares            "device:0.25,host": the grammar of places and modes by share
    bucketing         the buckets that settings ask for
    places            `BucketPlaces`: where the data of a bucket is, answered once
    extents           where the disk has the state of a bucket
    pipeline          the passes of micro-batches through segments, on one device or several
    mesh              `DeviceMesh`: which device makes which pass, answered once
    graph             `Region`, `Op`, `Graph`: what each operation reads and writes, and the order that follows
    spec              `StepSpec`: what a recipe knows of a step
    slots             rings of staging slots, in classes of size
    region_table      the size, tier and lifetime of every region of a step: a region's name is a row
    regions           the regions that operations name, and the slot that each item has
    passes            the operations of passes through segments: a kind of pass is a row
    ops               one constructor for each operation that does more than copy
    moves             the operations that copy a thing from one tier to another: a verb is a row
    recipes           a training step as operations, in the paper's order
    step_graph        the graph of a step of equal segments, without a model
    decision          `StepDecision`: skip the step, or update with which factor
    plan              lanes and waits, their text form, vector clocks
    verifier          checks that a plan keeps the serial result
    hardware          rates, latencies and memory of a machine
    simulator         how long a plan takes on given hardware
    traffic           the bytes that the kernels of a pass move
    memory_model      how much memory a plan needs, on which tier, and when
    display           how values print
    methods           what core calls of modules above, such as the methods of plans and timelines
    timeline          when operations ran, simulated or measured
    critical_path     the chain of operations that bounded a step
    explain           why one plan of a graph is faster than another

A new operation: one method in `ops`, or a row of `moves` if it only copies; one line in `recipes`; one function in
`zfunc.engine.stages.stages` and its row in `STAGES`. A new setting: one field in `settings`, and the code where it
has an effect. A new schedule: one file in `schedules/`, named in its `__init__`.
"""
