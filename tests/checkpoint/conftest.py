"""A disk of its own for any test of this folder."""

from bad_disks import small_disk  # noqa: F401
