"""One file with all, whose bytes are lasting, and its name is not.

Says: rename('next', 'state')   lost
Breaks: lasting, goes_on, thousand_cuts, little_room
"""

import wrong_rename_unsynced
from wrong_rename_unsynced import commit, recover  # noqa: F401


def finish(drive):
    drive.sync("next")
    drive.rename("next", "state")


wrong_rename_unsynced.finish = finish
