"""The training step: segments become a Program and a State, and stages do what its operations say.

From the ground up: a folder imports those that are named before it.

    trace                   one segment: a pure function, its forward, backward and costs
    rows                    rows of tokens in tiles, and their attention
    state                   `State`: its memory, its weights
    stages                  what each operation of a plan does to that memory
    program                 `Program`: segments and settings, the verified plan, a batch's shapes
    step                    a Program and a State: `init`, `train_step`, `evaluate`, `save`, `load`
    compile                 `compile`: all arguments checked, segments and settings -> `Program`

A new stage: one function in `stages` and its row in `STAGES` there; or your own recipe and stages, without a change
here (examples/06_add_a_stage.py).
"""
