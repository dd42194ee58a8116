"""The record may take its name before the files in it have theirs for good.

Says: FileNotFoundError: there is no file '1.0'
Breaks: old_or_new, goes_on, thousand_cuts, little_room
"""

import passes
from passes import recover  # noqa: F401


def commit(drive, state):
    renamed = []

    def rename(old, new):
        renamed.append(old)
        drive.rename(old, new)

    def sync_names():
        if renamed:
            drive.sync_names()

    passes.commit(drive._replace(rename=rename, sync_names=sync_names), state)
