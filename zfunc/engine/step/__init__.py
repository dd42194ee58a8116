"""What is done to a State with its Program: the first State, a step, evaluation, checkpoints.

    swap_state              a program's swap space: new, opened again, committed
    release                 `zfunc.release`: a State off the device between steps, and back
    flush                   `flush`: the update that the last step deferred; running a plan on a State
    init                    `init`: the first State; `replace`
    evaluate                loss, outputs and parameters without a step
    save_load               `zfunc.save`, `zfunc.load`
    train_step              `train_step`, and the check that all ranks are about to make the same step

What users call, they call as `zfunc.train_step`, `zfunc.save` and so on.
"""
