"""Rotary pairs apart: GGUF files of llama have the two features of a pair side by side, kernels like halves.

Scores are products of queries with keys, so the features of both may come in another order if it is the same.
Rows of the matrices that make them are reordered as they are read: even features, then odd ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlx.llm.blocks import Groups
from rlx.llm.config import Config
from rlx.llm.tensors import Array, Entry, Tensors
from rlx.records import dataclass


@dataclass(frozen=True, eq=False)
class Reordered(Entry):
    """A tensor whose rows come in another order."""

    order: Array

    def groups(self) -> Groups | None:
        found = super().groups()
        if found is None:
            return None
        least = None if found.minimums is None else found.minimums[self.order]
        return Groups(found.codes[self.order], found.scales[self.order], least)

    def array(self) -> Array:
        found = super().array()  # of groups, which have their order
        return found[self.order] if self.format.decode is None else found


def unwoven(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The same decoder with halves instead of pairs, where all features of a head turn."""
    rope = config.rope
    if rope is None or not rope.interleaved or rope.features != config.depth or config.local_rope is not None:
        return config, tensors
    names = [f"blk.{i}.attn_{name}" for i in range(config.layers) for name in "qk"]
    if any(f"{name}_norm.weight" in tensors or f"{name}.weight" not in tensors for name in names):
        return config, tensors
    entries = dict(tensors.entries)
    for name in (f"{name}.{kind}" for name in names for kind in ("weight", "bias")):
        entry = entries.get(name)
        if entry is not None and entry.shape[0] % config.depth == 0:
            order = in_halves(entry.shape[0], config.depth)
            entries[name] = Reordered(
                entry.name, entry.shape, entry.format, entry.source, entry.offset, order
            )
    return replace(config, rope=replace(rope, interleaved=False)), Tensors(tensors.path, entries)


def in_halves(rows: int, depth: int) -> Array:
    """The rows of all heads, of each the even ones first.

    >>> in_halves(8, 4).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(-1, depth // 2, 2).swapaxes(1, 2).ravel()
