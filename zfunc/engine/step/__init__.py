"""What is done to a State with its Program: the first State, a step, evaluation, checkpoints.

    swap_state              a program's swap space: new, opened again, committed
    release                 `zfunc.release`: a State off the device between steps, and back
    run                     what a call on a State begins with; running a plan on the State's memory
    flush                   `flush`: the update that the last step deferred
    init                    `init`: the first State; `replace`
    evaluate                loss, outputs and parameters without a step
    save_load               `zfunc.save`, `zfunc.load`
    agreement               the check that all ranks are about to make the same step
    train_step              `train_step`: from a State to the next

What users call, they call as `zfunc.train_step`, `zfunc.save` and so on.
"""
