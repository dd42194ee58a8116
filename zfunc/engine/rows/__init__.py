"""Rows of tokens: a segment in tiles of its row, attention of rows and tiles.

    keys                    keys and values of a row, by parts, on the device or on the host
    tile_attention          attention of a tile of queries over all keys so far
    row_attention           attention of rows with documents or a window, as one operation
    token_operations        which operations are known to keep tokens apart
    constants               what forward makes of no input: for the row, and a tile has its slice
    cut                     the forward of a segment, cut at attention; what cannot pass in tiles
    expressions             whether two graphs return the same
    tiles                   the passes of a segment whose rows of tokens pass in tiles
    check                   what is not known to keep tokens apart is tried before it trains
    tiled_vjp               forward and backward of a segment in tiles; its evaluation

Before and after attention no token of a segment in tiles depends on another; a segment not known to be so is tried.
"""
