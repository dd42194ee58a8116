"""The record may take its name before the files in it have theirs for good.

Says: FileNotFoundError: there is no file '1.0'
Breaks: old_or_new, goes_on, thousand_cuts, little_room
"""

import passes
from passes import recover  # noqa: F401


class Hasty:
    """A drive that syncs no names before there is a record."""

    def __init__(self, drive):
        self.drive, self.renamed = drive, False

    def __getattr__(self, name):
        return getattr(self.drive, name)

    def rename(self, old, new):
        self.renamed = True
        self.drive.rename(old, new)

    def sync_names(self):
        if self.renamed:
            self.drive.sync_names()


def commit(drive, state):
    passes.commit(Hasty(drive), state)
