"""A decoder as a graph: tokens in, logits out, keys and values in states. One builder for all architectures.

Weights keep the precision of their file: matrices of small integers stay so and are multiplied as groups
(`ops.dequantize_groups`, or `ops.coded_matmul` where rows are rounded), half precision is converted where it
is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx import ops
from rlx.errors import FormatError
from rlx.ir.dim import Dim
from rlx.ir.dtype import LazyArray, ParamValue, dtype
from rlx.ir.graph import Graph, Node
from rlx.llm.config import Config
from rlx.llm.operands import (
    Part,
    coded_operands,
    coding_of,
    expert_coding,
    expert_parts,
    matrix_parts,
    plain_part,
)
from rlx.llm.rope import Rope
from rlx.llm.tensors import Entry, Tensors

_ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, approximate="tanh"),
}


def build(config: Config, tensors: Tensors, positions: int, values: bool = True) -> Graph:
    """The graph of a decoder whose caches hold `positions` tokens; without `values` its params have none.

    Inputs: `past`, how many tokens came before; `tokens` [new]; `wanted` [any], places among the new tokens.
    Outputs, for each wanted place: `logits` of the token that follows, and the `hidden` features.
    """
    return _Decoder(config, tensors, positions, values).build()


def build_paged(
    config: Config, tensors: Tensors, positions: int, page: int, most: int, values: bool = True
) -> Graph:
    """The same decoder for tokens of many sequences of at most `positions` tokens, which share pages.

    A page holds keys and values of `page` tokens; how many there are is the size `pages` of the states.
    Inputs, for each of the `tokens` [new]: its sequence's row of the `table` [slots, pages of a sequence],
    its position `at`, and its place in the pool, `places`. Outputs are `logits` of the tokens `wanted`, and
    `hidden` features of those `pooled`. A token sees those of its sequence up to itself, which earlier steps
    wrote, or this one. The sizes `new`, `answers` and `features` are the numbers of tokens, of those wanted
    and of those pooled, each at most `most`: memory is planned for that, and other numbers plan nothing.

    A token's numbers depend on its own sequence alone, bit for bit: not on what else is computed with it.
    """
    return PagedDecoder(config, tensors, positions, values, page, most).build()


class _Decoder:
    """A decoder for one sequence, whose keys and values are two caches per layer."""

    def __init__(self, config: Config, tensors: Tensors, positions: int, values: bool) -> None:
        self.config, self.tensors, self.positions, self.values = config, tensors, positions, values
        self.graph = Graph(config.architecture)
        self.before_tokens()
        self.tokens = self.graph.input("tokens", (self.count("new"),), "i64")
        self.new = self.tokens.shape[0]
        self.after_tokens()
        self.tables: dict[Rope, tuple[Node, Node]] = {}

    def before_tokens(self) -> None:
        self.past = self.graph.size("past", maximum=self.positions - 1)

    def after_tokens(self) -> None:
        """Other inputs."""

    def count(self, name: str) -> Dim | str:
        """How many there are of something."""
        return name

    def build(self) -> Graph:
        g, config = self.graph, self.config
        wanted = g.input("wanted", (self.count("wanted"),), "i64")
        x = self.embed(self.tokens)
        for i in range(config.layers):
            x = self.layer(x, i)
        hidden = self.norm(ops.embedding(x, wanted), "output_norm")
        logits = self.head(hidden)
        if config.logit_cap:
            logits = ops.tanh(logits * (1 / config.logit_cap)) * config.logit_cap
        g.output("hidden", self.shown(x, hidden))
        g.output("logits", logits)
        return g

    def shown(self, x: Node, hidden: Node) -> Node:
        """The features that are an output."""
        return hidden

    # -- weights

    def entry(self, name: str, *shape: int) -> Entry:
        """A tensor of the file, which must have this shape (-1: any size)."""
        entry = self.tensors[name]
        fits = len(entry.shape) == len(shape)
        if not fits or any(want not in (-1, n) for n, want in zip(entry.shape, shape, strict=True)):
            sizes = ", ".join("any" if n == -1 else str(n) for n in shape)
            raise FormatError(
                f"{self.tensors.path}: tensor {name!r} has the shape {list(entry.shape)}, not [{sizes}]"
            )
        return entry

    def param(self, part: Part) -> Node:
        known = self.graph.params.get(part.name)
        if known is not None:
            return known
        return self.graph.param(part.name, part.shape, part.dtype, value=self.value(part))

    def value(self, part: Part) -> ParamValue | None:
        """The value of a param, made when it is needed."""
        if not self.values:
            return None
        of, stored = dtype(part.dtype), self.tensors.params
        if stored is None:
            return LazyArray(of, part.shape, part.make)
        value = stored().get(part.name)
        if value is None or value.shape != part.shape or dtype(value.dtype) is not of:
            there = "no value" if value is None else f"{value.dtype}{list(value.shape)}"
            raise FormatError(
                f"{self.tensors.path}: param {part.name!r} is {of}{list(part.shape)}, and it has {there}"
            )
        return value

    def numbers(self, entry: Entry) -> Node:
        """A tensor of floating-point numbers, in f32."""
        return _as(self.param(plain_part(entry)), "f32")

    def vector(self, name: str, size: int) -> Node:
        return self.numbers(self.entry(name, size))

    def embed(self, tokens: Node) -> Node:
        """Rows of the table of tokens."""
        config = self.config
        entry = self.entry("token_embd.weight", -1, config.width)
        if entry.format.decode is None:
            x = ops.embedding(self.numbers(entry), tokens)
        else:
            x = ops.embedding(ops.transpose(self.codes(entry)), tokens)
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        if "position_embd.weight" in self.tensors:
            places = self.numbers(self.entry("position_embd.weight", -1, config.width))
            if int(places.shape[0]) < self.positions:
                raise FormatError(f"{self.tensors.path} has positions for {places.shape[0]} tokens only")
            x = x + self.rows_at_positions(places)
        return x

    def rows_at_positions(self, table: Node) -> Node:
        made: Node = ops.slice_axis(table, 0, self.past, self.new)
        return made

    def product(self, x: Node, entry: Entry) -> Node:
        """x @ matrix, whatever the matrix is stored as."""
        if entry.format.decode is None:
            matrix = self.numbers(entry)
            made: Node = ops.matmul(x, matrix if self.config.columns_first else ops.transpose(matrix))
            return made
        if self.config.activations == "i8":
            made = ops.coded_matmul(x, *self.parts(entry), **coding_of(entry.format))
            return made
        made = ops.matmul(x, self.codes(entry))
        return made

    def codes(self, entry: Entry) -> Node:
        """A matrix [in, out] of small integers with factors."""
        made: Node = ops.dequantize_groups(*self.parts(entry), **coding_of(entry.format))
        return made

    def parts(self, entry: Entry) -> list[Node]:
        """Codes and factors of such a matrix."""
        return coded_operands(entry.format, [self.param(part) for part in matrix_parts(entry)])

    def linear(self, x: Node, name: str, columns: int) -> Node:
        rows = int(x.shape[-1])
        shape = (rows, columns) if self.config.columns_first else (columns, rows)
        y = self.product(x, self.entry(f"{name}.weight", *shape))
        return y + self.vector(f"{name}.bias", columns) if f"{name}.bias" in self.tensors else y

    def head(self, x: Node) -> Node:
        """Logits, by a matrix of its own or by the table of tokens."""
        if "output.weight" in self.tensors:
            return self.linear(x, "output", self.tensors["output.weight"].shape[0])
        table = self.tensors["token_embd.weight"]
        if table.format.decode is not None:
            return self.product(x, table)
        made: Node = ops.matmul(x, ops.transpose(self.numbers(table)))
        return made

    def norm(self, x: Node, name: str) -> Node:
        weight = self.vector(f"{name}.weight", int(x.shape[-1]))
        if f"{name}.bias" in self.tensors:
            bias = self.vector(f"{name}.bias", int(x.shape[-1]))
            made: Node = ops.layer_norm(x, weight, bias, eps=self.config.eps)
            return made
        if self.config.norm_offset:
            weight = weight + self.config.norm_offset
        made = ops.rms_norm(x, weight, eps=self.config.eps)
        return made

    # -- layers

    def layer(self, x: Node, i: int) -> Node:
        before, after = f"blk.{i}.ffn_norm", f"blk.{i}.post_attention_norm"
        if f"{before}.weight" not in self.tensors:  # GGUF files of gpt-oss call the norm before the MLP so
            before, after = after, ""
        x = x + self.after(self.attend(self.norm(x, f"blk.{i}.attn_norm"), i), after)
        return x + self.after(self.mlp(self.norm(x, before), i), f"blk.{i}.post_ffw_norm")

    def after(self, x: Node, name: str) -> Node:
        """A norm that only some architectures have."""
        return self.norm(x, name) if f"{name}.weight" in self.tensors else x

    def mlp(self, x: Node, i: int) -> Node:
        if f"blk.{i}.ffn_gate_inp.weight" in self.tensors:
            return self.experts(x, i)
        act = _ACTIVATIONS[self.config.activation]
        down = self.tensors[f"blk.{i}.ffn_down.weight"]
        hidden = down.shape[0 if self.config.columns_first else -1]
        if f"blk.{i}.ffn_gate.weight" in self.tensors:
            inner = act(self.linear(x, f"blk.{i}.ffn_gate", hidden)) * self.linear(
                x, f"blk.{i}.ffn_up", hidden
            )
        elif self.tensors[f"blk.{i}.ffn_up.weight"].elements == 2 * down.elements:  # gate and up in one
            both = self.linear(x, f"blk.{i}.ffn_up", 2 * hidden)
            inner = act(ops.slice_axis(both, 1, 0, hidden)) * ops.slice_axis(both, 1, hidden, hidden)
        else:
            inner = act(self.linear(x, f"blk.{i}.ffn_up", hidden))
        return self.linear(inner, f"blk.{i}.ffn_down", self.config.width)

    def experts(self, x: Node, i: int) -> Node:
        """The experts that each token chooses, weighted by their shares."""
        config, act = self.config, _ACTIVATIONS[self.config.activation]
        scores = self.linear(x, f"blk.{i}.ffn_gate_inp", config.experts)
        if config.shares_of_chosen:
            best, choice = ops.top_k(scores, config.chosen)
            shares = ops.softmax(best, axis=-1)
        else:
            shares, choice = ops.top_k(ops.softmax(scores, axis=-1), config.chosen)
        hidden = self.tensors[f"blk.{i}.ffn_down_exps.weight"].shape[-1]
        gate = self.by_expert(x, choice, f"blk.{i}.ffn_gate_exps", hidden)
        up = self.by_expert(x, choice, f"blk.{i}.ffn_up_exps", hidden)
        if config.gate_limit:
            gate, up = (
                ops.minimum(gate, config.gate_limit),
                ops.clip(up, -config.gate_limit, config.gate_limit),
            )
            inner = gate * ops.sigmoid(gate * config.gate_slope) * (up + 1.0)
        else:
            inner = act(gate) * up
        each = self.by_expert(inner, choice, f"blk.{i}.ffn_down_exps", config.width)
        made: Node = ops.sum(each * ops.reshape(shares, (self.new, config.chosen, 1)), axis=1)
        return made

    def by_expert(self, x: Node, choice: Node, name: str, columns: int) -> Node:
        """[new, chosen, columns]: rows times the matrices that they chose."""
        entry = self.entry(f"{name}.weight", self.config.experts, columns, int(x.shape[-1]))
        weights, *factors = [self.param(part) for part in expert_parts(entry)]
        if factors:
            coding, group = expert_coding(entry.format), entry.format.group
            made: Node = ops.expert_matmul(x, choice, weights, *factors, coding=coding, group=group)
        else:
            made = ops.expert_matmul(x, choice, weights)
        if f"{name}.bias" in self.tensors:
            biases = self.numbers(self.entry(f"{name}.bias", self.config.experts, columns))
            made = made + ops.embedding(biases, choice)
        return made

    def queries_keys_values(self, x: Node, i: int) -> list[Node]:
        """Each as `arranged` has it."""
        config = self.config
        counts = (config.heads, config.kv_heads, config.kv_heads)
        if f"blk.{i}.attn_qkv.weight" in self.tensors:
            joined = self.linear(x, f"blk.{i}.attn_qkv", sum(counts) * config.depth)
            starts = (0, counts[0], counts[0] + counts[1])
            parts = [
                ops.slice_axis(joined, 1, start * config.depth, count * config.depth)
                for start, count in zip(starts, counts, strict=True)
            ]
        else:
            parts = [
                self.linear(x, f"blk.{i}.attn_{name}", count * config.depth)
                for name, count in zip("qkv", counts, strict=True)
            ]
        made = []
        for name, part, count in zip("qkv", parts, counts, strict=True):
            heads = ops.reshape(part, (self.new, count, config.depth))
            made.append(self.arranged(self.after(heads, f"blk.{i}.attn_{name}_norm")))
        return made

    def arranged(self, x: Node) -> Node:
        """[new, heads, depth] as attention takes it."""
        made: Node = ops.transpose(x, (1, 0, 2))
        return made

    def turned(self, x: Node, rope: Rope | None) -> Node:
        if rope is None:
            return x
        if rope not in self.tables:
            self.tables[rope] = self.angles(rope)
        made: Node = ops.rope(x, *self.tables[rope], interleaved=rope.interleaved)
        return made

    def angles(self, rope: Rope) -> tuple[Node, Node]:
        """Cosines and sines of the positions of the new tokens, which broadcast to what is `arranged`."""
        frequencies = self.graph.constant(rope.frequencies().astype(np.float32))
        angles = self.column_of_positions() * frequencies
        if rope.magnitude == 1:
            return ops.cos(angles), ops.sin(angles)
        return ops.cos(angles) * rope.magnitude, ops.sin(angles) * rope.magnitude

    def column_of_positions(self) -> Node:
        with self.graph.building():
            at = ops.arange(self.new) + ops.dim_value(self.past)
        made: Node = ops.reshape(ops.cast(at, "f32"), (self.new, 1))
        return made

    def attend(self, x: Node, i: int) -> Node:
        q, k, v = self.queries_keys_values(x, i)
        rope = self.config.rope_of(i)
        k = self.turned(k, rope)
        flat = ops.reshape(self.context(q, k, v, i), (self.new, self.config.heads * self.config.depth))
        return self.linear(flat, f"blk.{i}.attn_output", self.config.width)

    def sinks(self, i: int) -> Node | None:
        """A score for each head beside those of keys, if the layer has them."""
        name = f"blk.{i}.attn_sinks.weight"
        return self.vector(name, self.config.heads) if name in self.tensors else None

    def window(self, i: int) -> int:
        """How many tokens before its own a token of a layer sees; -1 for all."""
        window = self.config.window_of(i)
        return window - 1 if window and window < self.positions else -1

    def context(self, q: Node, k: Node, v: Node, i: int) -> Node:
        """Causal attention of new tokens to all before them, whose keys and values are states."""
        config, g, new = self.config, self.graph, self.new
        seen = []
        for name, rows in (("k", k), ("v", v)):
            shape = (config.kv_heads, self.positions, config.depth)
            cache = g.state(f"{name}{i}", shape, config.attention_dtype)
            updated, filled = ops.append(cache, self.attended(rows), self.past, axis=1)
            g.set_state(f"{name}{i}", updated)
            seen.append(ops.reshape(filled, (1, config.kv_heads, self.past + new, config.depth)))
        turned = self.turned(q, config.rope_of(i))
        query = ops.reshape(self.attended(turned), (1, config.heads, new, config.depth))
        window, sinks = self.window(i), self.sinks(i)
        context = ops.attention(
            query,
            *seen,
            causal=True,
            window=None if window < 0 else (window, -1),
            scale=config.scale,
            softcap=config.score_cap,
            offset=self.past,
            sinks=None if sinks is None else self.attended(sinks),
        )
        return _as(ops.transpose(context, (0, 2, 1, 3)), "f32")

    def attended(self, x: Node) -> Node:
        """Queries, keys or values as attention takes them."""
        return _as(x, self.config.attention_dtype)


class PagedDecoder(_Decoder):
    """A decoder for tokens of many sequences, whose keys and values are in pages."""

    def __init__(
        self, config: Config, tensors: Tensors, positions: int, values: bool, page: int, most: int
    ) -> None:
        self.page, self.most = page, most
        super().__init__(config, tensors, positions, values)

    def before_tokens(self) -> None:
        """`past` is an input of single sequences."""

    def count(self, name: str) -> Dim:
        return self.graph.size({"wanted": "answers", "pooled": "features"}.get(name, name), self.most)

    def after_tokens(self) -> None:
        g = self.graph
        self.at, self.slots, self.places = (
            g.input(name, (self.new,), "i64") for name in ("at", "slots", "places")
        )
        self.table = g.input("table", ("slots", -(-self.positions // self.page)), "i64")
        self.pooled = g.input("pooled", (self.count("pooled"),), "i64")
        self.lengths = self.at + 1

    def shown(self, x: Node, hidden: Node) -> Node:
        return self.norm(ops.embedding(x, self.pooled), "output_norm")

    def rows_at_positions(self, table: Node) -> Node:
        made: Node = ops.embedding(table, self.at)
        return made

    def arranged(self, x: Node) -> Node:
        return x

    def column_of_positions(self) -> Node:
        made: Node = ops.reshape(ops.cast(self.at, "f32"), (self.new, 1, 1))
        return made

    def pool(self, name: str, rows: Node, axis: int) -> Node:
        """The state of pages for such rows; `axis` is that of positions."""
        inner = [rows.shape[2]] * 2
        inner[axis - 2] = self.page
        return self.graph.state(name, ("pages", self.config.kv_heads, *inner), rows.dtype.name)

    def written(self, name: str, rows: Node, axis: int) -> Node:
        """A pool of pages with rows of the new tokens in their places."""
        state = self.pool(name, rows, axis)
        pool: Node = ops.write_pages(state, rows, self.places, axis=axis)
        self.graph.set_state(name, pool)
        return pool

    def context(self, q: Node, k: Node, v: Node, i: int) -> Node:
        config = self.config
        pools: list[Node] = []
        scales: dict[str, Node] = {}
        for name, rows, axis in (("k", k, 3), ("v", v, 2)):
            if config.kv == "i8":
                rows, factors = _rounded(rows)
                scales[f"{name}_scales"] = self.written(f"{name}{i}.scales", factors, axis)
            pools.append(self.written(f"{name}{i}", rows, axis))
        keys, stored_values = pools
        made: Node = ops.paged_attention(
            self.turned(q, config.rope_of(i)),
            keys,
            stored_values,
            self.table,
            self.slots,
            self.lengths,
            scale=config.scale,
            softcap=config.score_cap,
            window=self.window(i),
            sinks=self.sinks(i),
            **scales,
        )
        return made


def _rounded(rows: Node) -> tuple[Node, Node]:
    """Rows as codes of 8 bits, and their scales [..., 1]: the largest size of a row over 127."""
    scales = ops.max(ops.abs(rows), axis=-1, keepdims=True) * (1 / 127)
    levels = ops.round(rows / ops.where(ops.equal(scales, 0.0), 1.0, scales))
    return ops.cast(ops.clip(levels, -127, 127), "i8"), scales


def _as(x: Node, dtype: str) -> Node:
    """x in another precision, if it has one."""
    made: Node = x if x.dtype.name == dtype else ops.cast(x, dtype)
    return made
