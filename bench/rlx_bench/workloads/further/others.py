"""Quantised networks, gradient-boosted trees, a deep MLP."""

from __future__ import annotations

import numpy as np

from rlx_bench.workloads.further.layers import CONTRIB, ML, Layers, Made, Value

SPAN = 8.0
"""What a byte of an activation spans: four deviations to either side."""


class _Quantised(Layers):
    """Products between QuantizeLinear and DequantizeLinear, as quantisers of trained models write them."""

    def bytes(self, x: Value, span: float = SPAN, zero: int = 128) -> Value:
        """To bytes and back."""
        scale, at = self.number(span / 255), self.constant(np.asarray(zero, np.uint8))
        return self.map("DequantizeLinear", self.map("QuantizeLinear", x, scale, at), scale, at)

    def linear(self, x: Value, width: int, bias: bool = True) -> Value:
        """Weights are signed bytes with a scale per column."""
        inputs = x.shape[-1]
        codes = self.constant(self.whole(-127, 128, inputs, width, dtype=np.int8))
        scales = self.constant(self.uniform(0.8, 1.2, width) * np.float32(inputs**-0.5 / 74))
        zeros = self.constant(np.zeros(width, np.int8))
        weight = self.op("DequantizeLinear", codes, scales, zeros, shape=codes.shape, axis=1)
        y = self.matmul(self.bytes(x), weight)
        return self.add(y, self.weight(width, scale=0.1)) if bias else y

    def attend(self, q: Value, k: Value, v: Value, mask: Value | None = None, scaled: bool = True) -> Value:
        scores = self.matmul(self.bytes(q), self.transpose(self.bytes(k), 0, 1, 3, 2))
        scores = self.mul(scores, self.number(q.shape[-1] ** -0.5))
        share = self.bytes(self.softmax(scores), 1.0, 0)
        return self.matmul(share, self.bytes(v))


def qdq_transformer(length: int = 128, width: int = 384, heads: int = 12, layers: int = 6) -> Made:
    """An encoder of MiniLM's size whose products are of bytes."""
    net = _Quantised("qdq_transformer")
    x = net.noise("x", 1, length, width)
    for _ in range(layers):
        x = net.norm(net.add(x, net.attention(x, heads)))
        x = net.norm(net.add(x, net.linear(net.gelu(net.linear(x, 4 * width)), width)))
    return net.made(y=x)


def int4(width: int = 4096, group: int = 32) -> Made:
    """One product with weights of four bits in groups (MatMulNBits)."""
    net = Layers("int4")
    x = net.noise("x", 1, width)
    codes = net.constant(net.whole(0, 256, width, width // group, group // 2, dtype=np.uint8))
    scales = net.constant(net.uniform(0.01, 0.02, width * width // group))
    net.count((1, width), width)
    attrs = {"K": width, "N": width, "bits": 4, "block_size": group}
    return net.made(y=net.op("MatMulNBits", x, codes, scales, shape=(1, width), domain=CONTRIB, **attrs))


def mlp_of_widths(layers: int = 64, least: int = 64, step: int = 8) -> Made:
    """Layers of different widths: what a compiler that makes code per width takes long for."""
    net = Layers("mlp_of_widths")
    x = net.noise("x", 1, least)
    for layer in range(layers):
        x = net.relu(net.linear(x, least + step * ((layer * 37) % layers + 1)))
    return net.made(y=net.linear(x, 10))


def trees(rows: int = 1, count: int = 200, depth: int = 6, features: int = 32) -> Made:
    """Gradient-boosted trees, balanced, as a TreeEnsembleRegressor."""
    net = Layers("trees")
    x = net.noise("x", rows, features)
    inner, each = (1 << depth) - 1, (2 << depth) - 1
    at = np.tile(np.arange(each), count)
    leaf = at >= inner
    tree = np.repeat(np.arange(count), each)
    size = len(at)
    y = net.op(
        "TreeEnsembleRegressor",
        x,
        shape=(rows, 1),
        domain=ML,
        n_targets=1,
        nodes_treeids=tree,
        nodes_nodeids=at,
        nodes_featureids=np.where(leaf, 0, net.whole(0, features, size)),
        nodes_values=np.where(leaf, 0, net.uniform(-1.5, 1.5, size)).astype(np.float32),
        nodes_modes=np.where(leaf, "LEAF", "BRANCH_LEQ").tolist(),
        nodes_truenodeids=np.where(leaf, 0, 2 * at + 1),
        nodes_falsenodeids=np.where(leaf, 0, 2 * at + 2),
        target_treeids=tree[leaf],
        target_nodeids=at[leaf],
        target_ids=np.zeros(leaf.sum(), np.int64),
        target_weights=net.uniform(-0.1, 0.1, int(leaf.sum())),
    )
    return net.made(y=y)
