"""Checkpoints as files: safetensors shards, a JSON manifest, a folder that survives a crash; never code.

    durable_files      atomic replace, fsync and locks, for everybody who writes files; reads and writes on threads
    strict_json        JSON read with its types, into classes by their annotations
    safetensors_file   a file of tensors: its format, its checksums, written and read in slices
    manifest           which state is kept of which parameter, and where: as values and as a file
    snapshot           what a checkpoint contains, and which rank writes it
    directory          a folder of checkpoints: publishes, finds the newest complete one, deletes old ones
    reader             reads slices of a checkpoint, whatever ranks and buckets wrote it
    writer             a checkpoint being written
    swap_file          the format of a swap space's files: header, records of commits, extents; checks all but data
    swap_stripes       buffers on several drives at once; checks the data
    swap_folders       checks what is in a swap space's folders: refused, or deleted
    swap_space         the optimizer state of a rank on its drives, a checkpoint after every commit
    swap_checkpoint    a swap space of all ranks, read as a checkpoint
    export             the weights alone, as one safetensors file

What is read is checked before anything is allocated, and nothing in a checkpoint is ever executed.
"""
