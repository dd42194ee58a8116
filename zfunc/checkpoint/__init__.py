"""Checkpoints as files: safetensors shards, a JSON manifest, a folder that survives a crash; never code.

    durable_files      atomic replace, fsync and locks, for everybody who writes files
    strict_json        JSON read with its types, into classes by their annotations
    safetensors_file   a file of tensors: its format, its checksums, written and read in slices
    manifest           the state that is kept of each parameter, and where; the part that each rank writes
    directory          a folder of checkpoints: publishes, finds the newest complete one, deletes old ones
    reader             reads slices of a checkpoint, whatever ranks and buckets wrote it
    writer             a checkpoint being written
    swap_file          the files of a swap space: header, buffers in stripes, records of commits; checks all of it
    swap_space         the optimizer state of a rank on its drives, a checkpoint after every commit
    swap_checkpoint    a swap space of all ranks, read as a checkpoint
    export             the weights alone, as one safetensors file
    hf_files           names of transformers' and peft's files of weights
    foreign_run        a run of another program, its tensors by name, read one by one
    dcp                checkpoints of torch.distributed.checkpoint, read and written
    torchtitan         its names, and rows of its queries and keys, as transformers has them
    deepspeed_files    checkpoints of DeepSpeed: ZeRO of each stage, and universal ones
    trainer_files      checkpoints of transformers' Trainer in whole files, and of adapters
    import_run         a run of another program as a checkpoint of zfunc

What is read is checked before anything is allocated, and nothing in a checkpoint is ever executed,
but pickles of DeepSpeed and Trainer where `allow_pickle` says so.
"""
