"""DeepSpeed's configuration files, read as they are: what every key means there, and what becomes of it here.

No torch here, so that a file is refused before anything is loaded. `zfunc.from_deepspeed` makes of it what
`zfunc.compile` and `zfunc.init` take. What is said of the other system is of its version 0.19.
"""
