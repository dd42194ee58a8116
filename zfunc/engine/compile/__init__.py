"""Segments and settings become a Program: its traces, its verified plan, its buffers' sizes.

    segment                 nn.Module -> pure function; the segments of a model, checked together
    purity                  refuses segments with hidden state, and values that change
    vjp                     forward and backward of a segment, traced or by torch.func.vjp
    recompute               what backward recomputes: their joint graph, cut in two; pieces of any graph
    halves                  a block as two segments, cut at the sum after attention
    tiles                   a segment whose rows of tokens pass in tiles
    tile_cut                their forward, cut at attention; what cannot pass in tiles
    tile_trace              which operations are known to keep tokens apart
    tile_check              what is not known is tried before it trains
    tile_attention          attention of a tile of queries over all keys so far
    row_attention           attention of rows with documents or a window, as one operation
    tile_keys               keys and values of their rows, by parts
    tensor_memory           which part of a storage a tensor lies in
    cost_trace              FLOPs and bytes of a segment, traced without data
    compile                 segments and settings -> Program
    step_spec               settings -> `StepSpec`; checks of a recipe
    fit_to_memory           the offload ratio and the places that fit, where settings are "auto"
    passes                  the passes of all segments; what the last one returns: loss and auxiliary outputs
    program                 `Program`: the verified plan, staging buffers, checks of memory
    specialize              a program for the shapes of a batch

`compile.compile` calls the phases in their order; a setting that changes a trace takes effect in `specialize`.
"""
