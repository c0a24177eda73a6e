"""A native copy loop with non-temporal stores, eight vectors at a time."""

from __future__ import annotations

from rlx.codegen.native.irtypes import vector
from rlx.codegen.native.notation import native
from rlx.codegen.native.words import builder, byte_at, fence, i64, load, ptr, store

UNROLL = 8
LEAST_BYTES = 4 << 10  # what the loop copies at least
LINE = 64


@native
def rlx_copy_past_caches(to: ptr, source: ptr, count: i64, head: i64) -> None:
    """Copy `count` bytes, LEAST_BYTES or more; `head` of them come before the first whole line of `to`."""
    width = builder().module.target.vector_bytes
    step = UNROLL * width

    def block(start: i64 | int, is_aligned: bool) -> None:
        places = [start + i * width for i in range(UNROLL)]
        values = [load(vector("i8", width), byte_at(source, i)) for i in places]
        for i, value in zip(places, values, strict=True):
            store(value, byte_at(to, i), nontemporal=is_aligned)

    # The ends are copied by blocks that overlap what the loop does, so it starts and stores at whole lines.
    last = count - step
    block(0, is_aligned=False)
    for i in range(head, last, step):
        block(i, is_aligned=True)
    block(last, is_aligned=False)
    fence()
