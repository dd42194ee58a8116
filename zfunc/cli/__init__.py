"""The command line: `zfunc train`, `plan`, `draw`, `calibrate`, `top`, `report`, `export`, `doctor`.

    main                                       exit codes, errors on one screen
    parser                                     arguments from the fields of settings
    catalogue                                  every command with its help and examples
    commands                                   what each command does
    completion                                 completion for shells
    terminal                                   signals, logs, and what a terminal may be shown
    console                                    a training as lines
    panel                                      a training as a live panel
    deepspeed_lines                            a training as DeepSpeed's log
    plan_settings, planning, plan_report       `zfunc plan`
    draw_settings, unrun_step, step_pictures   `zfunc draw`
    calibrate                                  `zfunc calibrate`
    top, sensors                               `zfunc top`
    report, report_tables, charts              `zfunc report`
    report_settings                            settings of `report`, `top`, `export` and `doctor`
    doctor, doctor_host, doctor_cuda           `zfunc doctor`

A new command: its settings, a function in `commands`, a row in `catalogue`. A new flag: a field of the command's
settings; `parser` needs no change.
"""
