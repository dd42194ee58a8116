"""The application behind `zfunc train`: settings, data, the loop, and what it leaves on disk.

    settings, setup, pretrained settings; what follows from them: data, program, model
    loop, events, pacing        the loop, what happens in it, how long it goes on
    resume                      where a run goes on
    run_folder, history         a run's files, written; read back, also while they grow
    tracking, sinks             TensorBoard, Weights & Biases, CSV
    data                        corpora, documents, tokenizers, packing, batches
    deepspeed                   DeepSpeed's configuration files (public as `zfunc.from_deepspeed`)

A new sink: one class and its row in `sinks`, one setting. A new DeepSpeed key: one row in `deepspeed/keys.toml`.
"""
