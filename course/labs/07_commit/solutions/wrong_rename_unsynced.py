"""One file with all, renamed into place before its bytes are lasting.

Says: rename('next', 'state')   kept
Breaks: lasting, old_or_new, goes_on, torn, thousand_cuts, little_room
"""

import json


def commit(drive, state):
    if "next" in drive.names():
        drive.delete("next")
    drive.create("next")
    drive.write("next", 0, json.dumps({part: data.hex() for part, data in state.items()}).encode())
    finish(drive)


def finish(drive):
    drive.rename("next", "state")
    drive.sync_names()


def recover(drive):
    if "state" not in drive.names():
        return None
    return {part: bytes.fromhex(data) for part, data in json.loads(drive.read("state")).items()}
