"""Fully pipelined distributed transformer: a row of millions of tokens, of which a chunk is on the device.

Attention needs the keys and values of all earlier tokens, and nothing else does. So a row passes a layer in
chunks. Keys and values of a chunk go to the host once they are made, and come back, a chunk at a time into one
of two slots, while the pair before is computed; a running softmax adds up what each brings. Arithmetic of a
pair grows with the square of a chunk and its copy with the chunk, so chunks that are long enough hide every
copy.

The graph is forward of one layer. `zfunc.compile(tiles=8, keys_on="host", activations_on="host")` trains a
model so, both ways, inside the operations of a segment.

Published: rows 16 times as long on the same hardware. There several GPUs also share the heads of a row
(Ulysses), which changes nothing in this picture of one.
No row of docs/published.md, as times are of such GPUs alone.

Yao et al., "Training Ultra Long Context Language Model with Fully Pipelined Distributed Transformer" (2024),
arXiv 2408.16978.
"""

from collections.abc import Iterator

from zfunc.core.graph import Op, Region

CHUNKS, TOKENS, HIDDEN = 8, 16_384, 4_096  # of a row, of a chunk, and features of a token, 2 bytes each
PUBLISHED = ()


def fpdt(chunks: int = CHUNKS, tokens: int = TOKENS, hidden: int = HIDDEN) -> Iterator[Op]:
    """The operations of a layer's forward in serial order."""
    nbytes, weights, taken = 2 * tokens * hidden, tokens * hidden * hidden, 0  # bytes of a chunk

    def region(name: str, *index: int, host: bool = False, times: int = 1) -> Region:
        kept = "value" if name in ("input_on_host", "output_on_host") else "operation"  # beyond this layer
        return Region(name, index, times * nbytes, "pinned" if host else "device", kept)

    def copy(verb: str, index: tuple[int, ...], source: Region, target: Region) -> Op:
        return Op(
            verb,
            index,
            "d2h" if target.tier == "pinned" else "h2d",
            (source,),
            (target,),
            nbytes=source.nbytes,
        )

    for c in range(chunks):
        x, queries, sums, out = (region(name, c) for name in ("input", "queries", "sums", "output"))
        own = region("own_keys", c, times=2)  # and values
        yield copy("load", (c,), region("input_on_host", c, host=True), x)
        yield Op("project", (c,), "compute", (x,), (queries, own), flops=6 * weights)
        yield copy("store_keys", (c,), own, region("keys_on_host", c, host=True, times=2))
        yield Op("attend_self", (c,), "compute", (queries, own), (sums,), flops=2 * nbytes * tokens // 2)
        for j in range(c):
            slot, taken = region("key_slot", taken % 2, times=2), taken + 1
            yield copy("fetch_keys", (c, j), region("keys_on_host", j, host=True, times=2), slot)
            yield Op("attend", (c, j), "compute", (queries, slot, sums), (sums,), flops=2 * nbytes * tokens)
        yield Op("rest", (c,), "compute", (x, sums), (out,), flops=18 * weights)
        yield copy("store", (c,), out, region("output_on_host", c, host=True))
