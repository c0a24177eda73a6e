"""An encoder as a graph: tokens of many texts in, features out, by the builder of decoders."""

from __future__ import annotations

from rlx import ops
from rlx.errors import FormatError
from rlx.ir.graph import Graph, Node
from rlx.llm.config import Config
from rlx.llm.decoder import PagedDecoder
from rlx.llm.tensors import Tensors


def build_encoder(
    config: Config, tensors: Tensors, positions: int, page: int, most: int, values: bool = True
) -> Graph:
    """The graph of an encoder for tokens of many texts of at most `positions` tokens each.

    Inputs are those of `build_paged`, without `wanted`, and with `lengths`: how many tokens the text of each
    token has, which are all in the same step. The output is `hidden`, the features of the tokens `pooled`.
    Keys and values of all layers use the same pages, one layer after the other.

    A token's features depend on its own text alone, bit for bit.
    """
    return _Encoder(config, tensors, positions, values, page, most).build()


class _Encoder(PagedDecoder):
    """Norms follow what they normalise, and every token sees the whole text."""

    def after_tokens(self) -> None:
        super().after_tokens()
        self.lengths = self.graph.input("lengths", (self.new,), "i64")
        self.pools: dict[str, Node] = {}

    def build(self) -> Graph:
        x = self.norm(self.embed(self.tokens), "token_embd_norm")
        for i in range(self.config.layers):
            x = self.layer(x, i)
        self.graph.output("hidden", ops.embedding(x, self.pooled))
        for name, pool in self.pools.items():
            self.graph.set_state(name, pool)
        return self.graph

    def embed(self, tokens: Node) -> Node:
        x = super().embed(tokens)
        if "token_types.weight" in self.tensors:  # texts are alone: all of their tokens are of the first type
            types = self.numbers(self.entry("token_types.weight", -1, self.config.width))
            x = x + ops.slice_axis(types, 0, 0, 1)
        return x

    def rows_at_positions(self, table: Node) -> Node:
        first = self.config.first_position
        room = int(table.shape[0]) - first
        if room < self.positions:
            raise FormatError(f"{self.tensors.path} has positions for {room} tokens only")
        own = ops.slice_axis(table, 0, first, self.positions) if first else table
        return super().rows_at_positions(own)

    def layer(self, x: Node, i: int) -> Node:
        x = self.norm(x + self.attend(x, i), f"blk.{i}.attn_output_norm")
        return self.norm(x + self.mlp(x, i), f"blk.{i}.layer_output_norm")

    def written(self, name: str, rows: Node, axis: int) -> Node:
        kind = name[0]
        before = self.pools[kind] if kind in self.pools else self.pool(kind, rows, axis)
        pool: Node = ops.write_pages(before, rows, self.places, axis=axis)
        self.pools[kind] = pool
        return pool
