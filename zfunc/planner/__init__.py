"""Before you run: does a step fit, how long does it take, what bounds it, what would help.

    plan_step                   `zfunc.plan`
    profile, profile_toml       machines as figures with sources; `profiles/` has those that come with zfunc
    cost_model, candidate       costs of a traced model under any settings; a setting played through
    search, search_space        the fastest settings that fit
    suggestions, max_layers     what would help; the largest model of a family that fits
    memory_check                the same question before a training starts
    calibrate, bandwidth, fit_rates, calibrated_profile   this machine, measured, as a profile

A new machine: one file in `profiles/`; `zfunc calibrate` writes one of the machine it runs on.
"""
