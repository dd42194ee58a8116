"""A step of a Program: what each operation of its plan does, and the functions that run one.

    batches                 a batch, and its equal parts
    metrics                 `Metrics`: what a step reports
    stage_context           the arguments of a stage function
    stages                  what each operation of a recipe does: `{verb: function}`
    clipping_stages         stages for the gradient's norm, clipping, skipping on overflow
    update_stages           stages that update parameters
    move_stages             stages that copy from one tier to another, and commit
    messages                what a pipeline stage sends to another, as bytes
    train_step              `train_step`; that all ranks are about to make the same one
    flush                   `flush`: the update that the last step deferred; running a plan on a State
    evaluate                loss, outputs and parameters without a step

The arguments of every stage are the same: a `StageContext`, and the regions that its operation declares.
"""
