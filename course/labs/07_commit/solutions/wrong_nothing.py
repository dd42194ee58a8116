"""Nothing is written: after a cut there is the old state, as before.

Says: commit: got no operation of the drive
Breaks: whole, lasting, old_or_new, goes_on, torn, thousand_cuts, little_room
"""


def commit(drive, state):
    pass


def recover(drive):
    return None
