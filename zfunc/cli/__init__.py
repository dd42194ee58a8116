"""The command line: each command of `zfunc` is a module in `commands`.

    main                            exit codes, errors on one screen
    catalogue                       the list of commands
    commands                        a module for each: its settings, its help, what it does
    parser                          what a command is; arguments and help from the fields of its settings
    terminal                        signals, logs, and text that a terminal can show
    simulated_model                 the model and the hardware of `zfunc plan` and `draw`
    train_lines                     a training as lines, and on a terminal a progress bar below them
    report_page                     a run as one HTML page

A new command: a module in `commands` with its `COMMAND`, and its row in `catalogue`. A new flag: a field of the
command's settings; `parser` needs no change.
"""
