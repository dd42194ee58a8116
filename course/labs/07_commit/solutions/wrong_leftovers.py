"""What a commit that was cut off has left behind is not expected.

Says: FileExistsError: create: there is a file 'next' already
Breaks: goes_on, thousand_cuts, little_room
"""

import json

from wrong_rename_unsynced import recover  # noqa: F401


def commit(drive, state):
    drive.create("next")
    drive.write("next", 0, json.dumps({part: data.hex() for part, data in state.items()}).encode())
    drive.sync("next")
    drive.rename("next", "state")
    drive.sync_names()
