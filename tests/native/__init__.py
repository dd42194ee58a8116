"""The host kernel alone: a C program built in several ways, and its buffers next to the NumPy reference.

The invariant: nothing here needs torch or the extension module; NumPy and a C compiler are enough.
`python -m tests.native` lists the builds, `python -m tests.native sanitize` runs a group of them.
"""
