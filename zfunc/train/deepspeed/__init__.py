"""DeepSpeed 0.19's configuration files as arguments of zfunc: `zfunc.from_deepspeed`, `TrainSettings.config`.

    keys        keys.toml: every key with its type and default, and whether it is supported
    reader      JSON with comments; the values of all keys, checked against the table
    lr          the five schedulers and OneCycle's betas, bit by bit
    settings    the settings that a file decides, merged with a command line; what is logged of it
    convert     arguments of `zfunc.compile` and `zfunc.init`

Only `convert` needs torch, so a wrong file is refused before torch is loaded.
"""
