"""One segment: an nn.Module becomes a pure function, its forward, its backward and their costs.

    tensor_memory           which part of a storage a tensor lies in
    fake_tensors            tensors without data, with the strides of real ones
    graph_cuts              what backward recomputes: a joint graph, cut in two; pieces of any graph
    pass_options            what passes depend on beside their function: arguments, key and sharing
    segment_vjp             forward and backward of a segment as a value: what they take, return and leave
    joint_graph             forward and backward traced as one graph
    traced_passes           passes as graphs cut from it, cached by shapes
    autograd_functions      the user's autograd functions within torch.func.vjp
    vjp                     `make_vjp`: the passes of a function, traced or by torch.func.vjp
    host_keys               host memory for keys and values of rows, which a trace only counts
    operation_flops         FLOPs of an operation, and what is counted in its place
    operation_kernels       what kernels of an operation launch and allocate beside computing
    cost_trace              FLOPs and bytes of a segment, traced without data
    thread_modes            modes of the calling thread that training refuses
    facts                   the attributes that a segment's behavior depends on, as values to be compared
    outside                 what its functions read from closures, globals and classes, likewise
    user_caches             caches of the user's code keep none of a trace's tensors
    look                    whether such values may have changed since the step before, at little cost
    purity                  refuses segments with hidden state, and values that change
    module_buffers          the buffers that forward changes, such as running statistics
    module_copies           a module without memory, or with other tensors
    segment                 nn.Module -> pure function
    model_segments          the segments of a model: of an nn.Sequential, and checks of them together
    traced_values           tensors of a batch on whose values a trace depends
    batches                 a batch, and its equal parts

No module of this package knows a plan, or a State.
"""
