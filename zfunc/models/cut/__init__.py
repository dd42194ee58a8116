"""Any `nn.Module` as segments: traced, and cut between its blocks; tensors alive at a cut are passed on.

    modules        `segments`: a module's segments, each a piece of the trace for a batch's shapes
    module_traces  a module's traces, for other shapes, dtypes and eval mode, in the pieces of the first
    module_export  a module's graph by torch.export, or why there is none that computes what the module does
    spans          where a graph is cut, and what is alive there
    pieces         the part of a graph between two cuts as a function
    vmap           a vmap in a graph as the operations that it makes
    functions      calls of the user's autograd functions as nodes of a graph
    gradients      whether a trace has the gradients of its module
    inputs_read    on which inputs' values a trace depends, and which tensors eval mode alone reads
    called         a module called with a batch, which returns its loss
    ctc            the loss of CTC in sizes that a trace knows
    user_code      the user's code in a stack of calls: where, and whether it checks a value
    known          what a model computes from the values of a few inputs, beside its trace

The way in is `zfunc.compile(model, example=batch)`, or `zfunc.segments(model, batch)`.
"""
