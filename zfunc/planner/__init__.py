"""Before you run: does a step fit, how long does it take, what bounds it, what would help.

    plan_step            `zfunc.plan`, and the most layers, sequences or tokens that fit
    profile              a machine as figures, each with its source; `profiles/` has those that zfunc brings
    cost_model           costs of a model under any settings
    traced_costs         costs of any segments, traced; refuses a training that does not fit this machine
    kept_costs           costs of a Hugging Face model, kept on the disk
    candidate            one choice of settings, simulated; many micro-batches from a few
    pipelines            orders of several devices that are worth a simulation
    search               the fastest settings that fit, and which are tried
    suggestions          what would help, each simulated
    planned              its result: figures, what is asked of the drives, and the report as text or HTML
    calibrate            measures this machine by training on it, and makes a profile of that
    bandwidth            measures the host's memory

A new machine: one file in `profiles/`; `zfunc calibrate` writes one of the machine it runs on.
"""
