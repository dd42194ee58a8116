"""A file for each part, each renamed into place when it is whole: nothing says which belong together. And the file
of a part that is gone stays, so an empty state changes nothing.

Says: expected the state before
Breaks: whole, lasting, old_or_new, goes_on, torn, thousand_cuts, little_room
"""


def commit(drive, state):
    for part, data in state.items():
        if "next" in drive.names():
            drive.delete("next")
        drive.create("next")
        drive.write("next", 0, data)
        drive.sync("next")
        drive.sync_names()
        drive.rename("next", f"part-{part}")
        drive.sync_names()


def recover(drive):
    found = {x.removeprefix("part-"): drive.read(x) for x in drive.names() if x.startswith("part-")}
    return found or None
