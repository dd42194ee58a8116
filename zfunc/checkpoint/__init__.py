"""Checkpoints as files: safetensors shards, a JSON manifest, a folder that survives a crash; never code.

    durable_files      atomic replace, fsync and locks, for everybody who writes files
    strict_json        JSON read with its types
    parallel_io        reads and writes on a few threads
    safetensors_file   the format of a shard, and the checksums of its tensors
    shard_writer       writes a shard at offsets
    shard_reader       reads slices of a shard
    manifest           which state is kept of which parameter, and where
    manifest_json      the manifest as a file
    snapshot           what a checkpoint contains, and which rank writes it
    directory          a folder of checkpoints: publishes, finds the newest complete one, deletes old ones
    reader             reads slices of a checkpoint, whatever ranks and buckets wrote it
    writer             a checkpoint being written
    striped_io         buffers on several drives at once, with checksums
    swap_file          the format of a swap space's files: header, records of commits, extents
    swap_folders       what a swap space finds in its folders: refused, or deleted
    swap_space         the optimizer state of a rank on its drives, a checkpoint after every commit
    swap_checkpoint    a swap space of all ranks, read as a checkpoint
    export             the weights alone, as one safetensors file

What is read is checked before anything is allocated, and nothing in a checkpoint is ever executed.
"""
