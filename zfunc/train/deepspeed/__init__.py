"""DeepSpeed 0.19's configuration files as arguments of zfunc: `zfunc.from_deepspeed`, `zfunc train --config`.

    keys, value_types           keys.toml: every key with its type and default, and whether it is supported
    reader, resolved            JSON with comments; the values of all keys, checked against the table
    arguments, lr               batch, precision, optimizer, offloading; schedulers and betas, bit by bit
    convert, cli_merge          arguments of `zfunc.compile` and `zfunc.init`; a file merged with a command line
    messages                    what is logged of a file

Only `convert` needs torch, so a wrong file is refused before torch is loaded.
"""
