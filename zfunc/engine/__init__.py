"""The training step: segments become a Program and a State, and stages do what its operations say.

    segment                 nn.Module -> pure function
    sequential              nn.Sequential -> segments
    closure_facts           the Python values that a segment depends on
    purity                  refuses segments with hidden state
    vjp                     forward and backward of a segment, with or without recomputation
    tensor_memory           which part of a storage a tensor lies in
    cost_trace              FLOPs and bytes of a segment, traced without data
    batches                 a batch, and its equal parts
    compile                 segments and settings -> Program
    step_spec               settings -> `StepSpec`; checks of a recipe
    fit_to_memory           the offload ratio and the places that fit, where settings are "auto"
    loss_outputs            what the last segment returns: the loss, and auxiliary outputs
    metrics                 `Metrics`: what a step reports
    module_buffers          the buffers that forward changes, such as running statistics
    program                 `Program`: the verified plan, staging buffers, checks of memory
    specialize              a program for the shapes of a batch
    disk_memory             what lives on the disk: a state in a slot at a time, spilled gradients
    ownership               which State may use the buffers, and which deferred updates they lack
    state                   `State`, and the allocation of its memory
    weights                 fp32 weights: into a State and out of it
    init                    `init`: the first State
    stage_context           the arguments of a stage function
    stages                  what each operation of a recipe does: `{verb: function}`
    clipping_stages         stages for the gradient's norm, clipping, skipping on overflow
    update_stages           stages that update parameters
    disk_stages             stages that read and write the disk
    train_step              `train_step`
    flush                   `flush`: the update that the last step deferred; running a plan on a State
    evaluate                loss, outputs and parameters without a step
    rank_agreement          checks that all ranks make the same step
    save_load               `zfunc.save`, `zfunc.load`
    training_position       what a checkpoint says of a State beside its bytes
    swap_state              a program's swap space: new, opened again, committed
    restore                 reads a checkpoint into a State, on any number of ranks

A new stage: one function in `stages` and its row in `STAGES`; or your own recipe and stages, without a change here
(examples/06_add_a_stage.py).
"""
