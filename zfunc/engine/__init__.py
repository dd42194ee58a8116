"""The step: segments become a Program, a State, and stages that the executor runs.

    segment, captured, purity   nn.Module -> pure function; what it closes over; that it has no other state
    vjp, cost_trace             forward and backward of a segment; its FLOPs and bytes, traced without data
    compile, jobs, offload_ratio, program   segments and settings -> Program
    state, weights, init        memory for a State; fp32 weights in and out of it; the first State
    stage_context, stages, update_stages   what each operation of a recipe does
    train_step, evaluate, rank_agreement   one step; loss and outputs without one; all ranks make the same call
    save_load, restore          a State to a checkpoint and back

A new stage: one function in `stages` for an operation of `zfunc.core.ops`, or a recipe and stages of your own
(examples/06_add_a_stage.py).
"""
