"""Before you run: does a step fit, how long does it take, what bounds it, what would help.

    plan_step            `zfunc.plan`
    profile              a machine as figures, each with its source
    profile_toml         the same as a file; `profiles/` has those that come with zfunc
    disk_traffic         what a step asks of the drives, and how they wear
    cost_model           costs of a model under any settings
    traced_costs         those of any segments, traced
    candidate            one choice of settings, simulated
    steady_state         many micro-batches from a few
    search               the fastest settings that fit
    search_space         which settings are tried
    suggestions          what would help, each simulated
    max_layers           the largest model of a family that fits
    max_batch            the largest batch, or the longest sequences, that fit
    planned              its result: figures, and the report as text or HTML
    memory_check         refuses, before training starts, a step that does not fit this machine
    calibrate            measures this machine by training on it
    bandwidth            measures the host's memory
    fit_rates            rates and latencies from timed operations
    calibrated_profile   the measured machine as a profile

A new machine: one file in `profiles/`; `zfunc calibrate` writes one of the machine it runs on.
"""
