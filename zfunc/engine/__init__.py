"""The training step: segments become a Program and a State, and stages do what its operations say.

    compile                 segments and settings -> `Program`: traces, checks, the verified plan
    state                   `State`: its memory, initial weights, checkpoints
    step                    `train_step`, `flush`, `evaluate`, and the stage of each operation

A new stage: one function in `step/stages` and its row in `STAGES`; or your own recipe and stages, without a change
here (examples/06_add_a_stage.py).
"""
