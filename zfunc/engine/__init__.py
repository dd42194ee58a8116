"""The step: segments become a Program, a State, and stages that the executor runs.

    segment                 nn.Module -> pure function
    closure_facts           the Python values a segment depends on
    purity                  refuses a segment that has other state
    vjp                     forward and backward of a segment, with or without recomputation
    cost_trace              FLOPs and bytes of a segment, traced without data
    compile                 segments and settings -> Program
    step_spec               settings -> `StepSpec`; checks of a recipe
    offload_ratio           how much of the optimizer's state stays on the device
    program                 a Program, and its plan once shapes are known
    state                   `State`, and its memory
    weights                 fp32 weights into a State and out of it
    init                    the first State
    stage_context           what a stage is given
    stages                  what each operation of a recipe does: `{verb: function}`
    clipping_stages         those that decide on a gradient: its norm, clipping, skipping on overflow
    update_stages           those that update parameters
    train_step              one step; `flush`
    evaluate                loss, outputs and parameters without a step
    rank_agreement          all ranks make the same call
    save_load               `zfunc.save`, `zfunc.load`
    restore                 a checkpoint into a State on any number of ranks

A new stage: one function in `stages` and its row in `STAGES`; or a recipe and stages of your own, without a change
here (examples/06_add_a_stage.py).
"""
