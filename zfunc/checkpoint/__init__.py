"""Checkpoints as files: safetensors shards, a JSON manifest, a folder that survives a crash; never code.

    durable_files      atomic replace, fsync and locks, for everybody who writes files
    strict_json        JSON read with its types
    checksums          CRC-32 of a tensor's chunks
    safetensors_file   the format of a shard
    shard_writer       writes a shard at offsets
    shard_reader       reads slices of a shard
    manifest           what is kept of which parameter, and where
    manifest_json      the same as a file
    slices             which rank keeps what
    read_plan          what to read where ranks or buckets have changed
    directory          a folder of checkpoints: publishes, finds the newest complete one, drops old ones
    writer             a checkpoint under way
    export             the weights alone, as one safetensors file

What is read is checked before anything is allocated, and nothing in a checkpoint is ever executed.
"""
