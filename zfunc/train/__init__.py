"""The application behind `zfunc train`: settings, data, the loop, and what it leaves on disk.

    settings     settings of `zfunc train`: those of the step, of the model, the data and the run
    setup        settings -> data, program, model
    gpt_flags    the GPT of a command's flags, without torch
    pretrained   the model of `--hf`
    loop         the loop, as a generator of events
    events       what happens in a training
    pacing       how many steps it takes
    resume       from which checkpoint a run continues
    run_folder   a run's files, written
    history      the same read back, also while they grow
    tracking     events as scalars
    sinks        TensorBoard, Weights & Biases and CSV files that take them
    data         corpora, documents, tokenizers, packing, batches
    deepspeed    DeepSpeed's configuration files (public as `zfunc.from_deepspeed`)

A new flag: a field of `TrainSettings`, and its use. A new sink: one class and its row in `sinks`. A new DeepSpeed
key: one row in `deepspeed/keys.toml`; a supported one is also translated, in `deepspeed/arguments.py` or
`convert.py`.
"""
