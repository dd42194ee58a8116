"""Before you run: does a step fit, how long does it take, what bounds it, what would help.

    plan_step            `zfunc.plan`
    profile              a machine as figures, each with its source; `profiles/` has those of zfunc
    disk_traffic         what a step asks of the drives, and how they wear
    cost_model           costs of a model under any settings
    traced_costs         those of any segments, traced
    kept_costs           those of a Hugging Face model, kept on the disk
    candidate            one choice of settings, simulated; many micro-batches from a few
    search               the fastest settings that fit
    moves                which settings are tried
    suggestions          what would help, each simulated
    largest              the most layers, sequences or tokens that fit
    planned              its result: figures, and the report as text or HTML
    memory_check         refuses, before training starts, a step that does not fit this machine
    calibrate            measures this machine by training on it, and makes a profile of that
    bandwidth            measures the host's memory

A new machine: one file in `profiles/`; `zfunc calibrate` writes one of the machine it runs on.
"""
