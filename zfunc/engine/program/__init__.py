"""The Program: segments and settings, their traces, the verified plan, the sizes of its buffers.

    step_spec               settings -> `StepSpec`; checks of a recipe
    passes                  the passes of all segments, and what equal segments share
    program                 `Program`: the verified plan, staging buffers, checks of memory
    traced_spec             a micro-batch through all segments: the costs of a step
    specialize              a program for the shapes of a batch
    fit_to_memory           the offload ratio and the places that fit, where settings are "auto"

`compile` calls the phases in their order; a setting that changes a trace takes effect in `traced_spec`.
"""
