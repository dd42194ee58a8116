"""The idea itself, without torch: what a training step is, and when its parts run.

    layout, optimizer_state     what is trained, in buckets and shards; what is kept of each parameter
    settings                    how a step is trained: each setting once
    dtypes                      the types of elements, with their names in torch, NumPy and safetensors
    graph, regions, ops         operations that declare what they read and write, and where
    recipes, decision           the step, in the order of the paper; whether it is applied
    plan, verifier              lanes and waits; is that right
    hardware, simulator         what a machine does in a second; how long a plan takes on it
    memory_model                how much memory a plan needs, and where
    timeline, critical_path     when operations ran, what bounded the step

A new operation: one method in `ops`, one line in `recipes`, one function in `zfunc.engine.stages`. A new schedule:
one file in `schedules/`, named in its `__init__`. A new setting: one field in `settings`, and the code where it has
an effect.
"""
