"""The idea itself, without torch: what a training step is, and in what order its operations run.

    dtypes            one table of number formats: bytes, and their names elsewhere
    layout            parameters as spans of one flat buffer; buckets and shards of it
    optimizer_state   which buffers the optimizer keeps of a parameter, for each format
    settings          `StepSettings`: every setting of a step, once
    graph             `Region`, `Op`, `Graph`: who reads and writes what, and the order that follows
    spec              `StepSpec`: what a recipe knows of a step
    regions           how large each region of a step is, and where it lives
    ops               one constructor for each operation
    recipes           a training step as operations, in the paper's order
    decision          what a step decided: skip it, or clip by what factor
    plan              lanes and waits, their text form, vector clocks
    verifier          does a plan keep the serial result
    hardware          what a machine does in a second
    simulator         how long a plan takes on it
    memory_model      how much memory a plan needs, on which tier, and when
    timeline          when operations ran, simulated or measured
    bottleneck        what bounded a timeline

A new operation: one method in `ops`, one line in `recipes`, one function in `zfunc.engine.stages` and its row in
`STAGES`. A new setting: one field in `settings`, and the code where it has an effect. A new schedule: one file in
`schedules/`, named in its `__init__`.
"""
