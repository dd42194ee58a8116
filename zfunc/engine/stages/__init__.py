"""What each operation of a plan does: a stage function for each verb.

    metrics                 `Metrics`: what a step reports
    outputs                 what the last segment returns: its loss, and auxiliary outputs
    stage_context           the arguments of a stage function
    messages                messages between pipeline stages, as bytes
    clipping_stages         stages for the gradient's norm, clipping, skipping on overflow
    update_stages           stages that update parameters
    move_stages             stages that copy from one tier to another, and commit
    stages                  what each operation of a recipe does: `{verb: function}`

The arguments of every stage are the same: a `StepContext`, and the regions that its operation declares.
"""
