"""DeepSpeed 0.19's configuration files as arguments of zfunc: `zfunc.from_deepspeed`, `TrainSettings.config`.

keys                     keys.toml: every key with its type and default; a file, checked against the table
learning_rate_schedules  the five schedulers and OneCycle's betas, bit by bit
mapping                  keys -> settings, optimizer, learning rate, loss scale; what is logged of a file
"""
