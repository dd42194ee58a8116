"""The state is put behind the drive's cache, where no cut gets at it: by no operation of the drive.

Says: commit raised AttributeError: 'DriveOperations' object has no attribute '_durable'
Breaks: whole, lasting, old_or_new, goes_on, torn, thousand_cuts, little_room
"""

import json

from wrong_rename_unsynced import recover  # noqa: F401


def commit(drive, state):
    drive.sync_names()
    for inside in (drive._durable, drive._seen):
        inside.names["state"] = 0
        inside.files[0] = json.dumps({part: data.hex() for part, data in state.items()}).encode()
