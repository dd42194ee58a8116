"""The application behind `zfunc train`: settings, data, the loop, and what it leaves on disk.

    settings     settings of `zfunc train`: those of the step, of the model, the data and the run
    setup        settings -> data, program, model
    pretrained   the Hugging Face model of the setting `hf`
    loop         the loop, as a generator of events
    events       what happens in a training
    evaluations  the best checkpoint, and when to stop early, by held-out losses
    reference    the log-probabilities that DPO compares with, computed once and kept
    resume       when a run ends, and from which checkpoint it continues
    run_files    the names of a run's files
    run_folder   the files of a run, written
    run_history  the files of a run, read back while they grow
    tracking     events as scalars for TensorBoard, Weights & Biases and trackio
    data         corpora, documents, tokenizers, packing, batches
    deepspeed    DeepSpeed's configuration files (public as `zfunc.from_deepspeed`)
    trainer      the arguments of transformers' Trainer and of TRL's

A new setting: a field of `TrainSettings`, and its use. A new tracker: `log`, `close`, and its row in `tracking`.
A new DeepSpeed key: a row in `deepspeed/keys.toml`, with the setting that it `sets`; what several keys decide is in
`deepspeed/mapping.py`.
"""
