"""Checkpoints as files: safetensors shards, a JSON manifest, a folder that survives a crash; never code.

    durable_files, strict_json, checksums   atomic writes and locks; JSON read with its types; CRC-32C by pieces
    safetensors_file, shard_writer, shard_reader   the format of a shard, written and read at offsets
    manifest, manifest_json     what is kept of which parameter, and where; the same as a file
    slices, read_plan           which rank keeps what; what to read where ranks or buckets have changed
    directory                   a folder of checkpoints: the newest whole one, how many are kept
    writer                      a checkpoint under way
    export                      the weights alone, as one safetensors file

What is read is checked before anything is allocated, and nothing in a checkpoint is ever executed.
"""
