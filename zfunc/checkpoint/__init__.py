"""Checkpoints as files, without torch: safetensors shards, a JSON manifest, a folder that survives a crash.

From below: `checksums`, `disk`, `strict_json`; then `shards` with `shard_writer` and `shard_reader`, the format
by offset; then `manifest`, `manifest_file` and `reads`, what is kept of which parameter and where; then
`checkpoints`, the folder. A checkpoint is data: what is read is checked before anything is allocated, and nothing
in it is ever executed.
"""
