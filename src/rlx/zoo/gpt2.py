"""A GPT-2 decoder as a graph whose keys and values live in states: one program for prompts and for tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlx import ops
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph, Node
from rlx.records import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder; the defaults are those of the smallest GPT-2. `positions` tokens fit its caches."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024

    @property
    def depth(self) -> int:
        """Features of a head."""
        return self.width // self.heads


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names of weights, as in GPT-2's own files, and their shapes."""
    width = config.width
    out: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocabulary, width),
        "wpe.weight": (config.positions, width),
    }
    for i in range(config.layers):
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            out[f"h.{i}.{name}.weight"], out[f"h.{i}.{name}.bias"] = (rows, columns), (columns,)
        for name in ("ln_1", "ln_2"):
            out[f"h.{i}.{name}.weight"] = out[f"h.{i}.{name}.bias"] = (width,)
    out["ln_f.weight"] = out["ln_f.bias"] = (width,)
    return out


def random_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of the size that GPT-2 starts its training with."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(config).items():
        if name.endswith("bias"):
            out[name] = np.zeros(shape, np.float32)
        elif ".ln_" in name or name.startswith("ln_"):
            out[name] = np.ones(shape, np.float32)
        else:
            out[name] = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return out


def build(config: Config, weights: Mapping[str, np.ndarray]) -> Graph:
    """Tokens `tokens` that follow `past` others in; logits of the next token and the likeliest one out.

    A step appends the keys and values of its tokens to the states in place, and attends to what is filled.

    >>> import rlx
    >>> small = Config(layers=2, width=32, heads=2, vocabulary=50, positions=16)
    >>> program = rlx.compile(build(small, random_weights(small)))
    >>> stream, first = program.stream(), np.array([3, 1, 4])
    >>> _ = stream.step({"tokens": first, "past": 0}, epilogue=False)
    >>> stream.step({"tokens": np.array([1]), "past": 3})["logits"].shape
    (50,)
    """
    g = Graph("gpt2")
    past = g.size("past", maximum=config.positions - 1)
    tokens = g.input("tokens", ("new",), "i64")
    return _Decoder(g, config, weights, past, tokens).build()


class _Decoder:
    def __init__(
        self, graph: Graph, config: Config, weights: Mapping[str, np.ndarray], past: Dim, tokens: Node
    ) -> None:
        self.graph, self.config, self.weights = graph, config, weights
        self.past, self.tokens, self.new = past, tokens, tokens.shape[0]

    def param(self, name: str) -> Node:
        if name not in self.graph.params:
            value = self.weights[name]
            self.graph.param(name, value.shape, value.dtype, value=value)
        return self.graph.params[name]

    def norm(self, x: Node, name: str) -> Node:
        made: Node = ops.layer_norm(x, self.param(f"{name}.weight"), self.param(f"{name}.bias"), eps=1e-5)
        return made

    def linear(self, x: Node, name: str) -> Node:
        made: Node = ops.linear(x, self.param(f"{name}.weight"), self.param(f"{name}.bias"))
        return made

    def build(self) -> Graph:
        g = self.graph
        words = ops.embedding(self.param("wte.weight"), self.tokens)
        x: Node = words + ops.slice_axis(self.param("wpe.weight"), 0, self.past, self.new)
        for i in range(self.config.layers):
            x = x + self.linear(self.attend(self.norm(x, f"h.{i}.ln_1"), i), f"h.{i}.attn.c_proj")
            inner = ops.gelu(self.linear(self.norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
            x = x + self.linear(inner, f"h.{i}.mlp.c_proj")
        last = self.norm(ops.slice_axis(x, 0, self.new - 1, 1), "ln_f")
        logits = ops.reshape(ops.matmul(last, ops.transpose(self.param("wte.weight"))), (-1,))
        g.output("logits", logits)
        g.output("next", ops.argmax(logits, axis=0))
        return g

    def attend(self, x: Node, layer: int) -> Node:
        """Causal attention of new tokens to all before them, whose keys and values are states."""
        config, g = self.config, self.graph
        heads, depth, new = config.heads, config.depth, self.new
        joined = ops.reshape(self.linear(x, f"h.{layer}.attn.c_attn"), (new, 3, heads, depth))

        def part(number: int) -> Node:
            one = ops.reshape(ops.slice_axis(joined, 1, number, 1), (new, heads, depth))
            made: Node = ops.transpose(one, (1, 0, 2))
            return made

        seen = []
        for name, rows in (("k", part(1)), ("v", part(2))):
            cache = g.state(f"{name}{layer}", (heads, config.positions, depth), "f32")
            updated, filled = ops.append(cache, rows, self.past, axis=1)
            g.set_state(f"{name}{layer}", updated)
            seen.append(ops.reshape(filled, (1, heads, self.past + new, depth)))
        query = ops.reshape(part(0), (1, heads, new, depth))
        context = ops.attention(query, *seen, causal=True, offset=self.past)
        made: Node = ops.reshape(ops.transpose(context, (0, 2, 1, 3)), (new, config.width))
        return made
