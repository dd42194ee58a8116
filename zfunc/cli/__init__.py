"""The command line: `zfunc train`, `plan`, `draw`, `calibrate`, `top`, `report`, `export`, `doctor`.

    main, parser, catalogue     exit codes and errors on one screen; arguments; every command and its help
    completion, terminal        shell completion; signals, and what a terminal may be shown
    commands                    what each command does
    console, panel, deepspeed_lines   a training as lines, as a live panel, as DeepSpeed's log
    plan_settings, planning, plan_report   `zfunc plan`
    draw_settings, sketch, pictures        `zfunc draw`
    calibrate                   `zfunc calibrate`
    top, sensors                `zfunc top`
    report_settings, report, report_tables, charts   `zfunc report` and other small commands
    doctor, machine, devices    `zfunc doctor`

A new command: its settings, a function in `commands`, a row in `catalogue`.
"""
