"""DeepSpeed 0.19's configuration files as arguments of zfunc: `zfunc.from_deepspeed`, `zfunc train --config`.

    keys.toml, keys, value_types   every key: its type, its default, and whether it is supported, ignored or not
    reader, resolved            JSON with comments; the values of all keys, checked against the table
    arguments, lr               batch, precision, optimizer, offloading; schedulers and betas, to the bit
    convert, cli_merge          as arguments of `zfunc.compile` and `zfunc.init`; together with a command line
    messages, docs_table        what is logged of a file; the table in docs/deepspeed.md

Only `convert` needs torch, so a wrong file is refused before torch is loaded.
"""
