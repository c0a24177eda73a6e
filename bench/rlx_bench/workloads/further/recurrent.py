"""Networks with recurrent layers: taggers, a recogniser of text in images, an LSTM of bytes."""

from __future__ import annotations

import numpy as np

from rlx_bench.workloads.further.layers import CONTRIB, Layers, Made, Value

GATES = {"LSTM": 4, "GRU": 3}


def _both_ways(net: Layers, kind: str, x: Value, hidden: int) -> Value:
    """A layer over [steps, batch, width] in both directions, side by side: [steps, batch, 2 hidden]."""
    steps, batch, width = x.shape
    gates = GATES[kind] * hidden
    scale = hidden**-0.5
    weights = (
        net.weight(2, gates, width, scale=scale),
        net.weight(2, gates, hidden, scale=scale),
        net.weight(2, 2 * gates, scale=0.1),
    )
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    net.count((2, steps, batch, gates), width + hidden)
    y = net.op(
        kind,
        x,
        *weights,
        shape=(steps, 2, batch, hidden),
        hidden_size=hidden,
        direction="bidirectional",
        **more,
    )
    return net.reshape(net.transpose(y, 0, 2, 1, 3), steps, batch, 2 * hidden)


def _tagger(kind: str, steps: int, hidden: int, layers: int, vocabulary: int, tags: int) -> Made:
    net = Layers(f"bi{kind.lower()}")
    x = net.embed(net.tokens("ids", steps, vocabulary), vocabulary, hidden)
    x = net.transpose(x, 1, 0, 2)
    for _ in range(layers):
        x = _both_ways(net, kind, x, hidden)
    return net.made(y=net.softmax(net.linear(x, tags)))


def bilstm(
    steps: int = 128, hidden: int = 256, layers: int = 2, vocabulary: int = 10000, tags: int = 17
) -> Made:
    """A tagger of words."""
    return _tagger("LSTM", steps, hidden, layers, vocabulary, tags)


def bigru(
    steps: int = 128, hidden: int = 256, layers: int = 2, vocabulary: int = 10000, tags: int = 17
) -> Made:
    """The same with gated recurrent units."""
    return _tagger("GRU", steps, hidden, layers, vocabulary, tags)


def crnn(columns: int = 320, width: int = 64, hidden: int = 256, letters: int = 97) -> Made:
    """Text in images, read column by column; the scores are for a CTC decoder."""
    net = Layers("crnn")
    x = net.noise("x", 1, 1, 32, columns)
    x = net.max_pool(net.relu(net.conv(x, width, 3)), 2, 2)
    x = net.max_pool(net.relu(net.conv(x, 2 * width, 3)), 2, 2)
    x = net.relu(net.conv(net.relu(net.conv(x, 4 * width, 3)), 4 * width, 3))
    x = net.max_pool(x, 2, (2, 1), (0, 1))
    x = net.relu(net.conv(net.relu(net.conv(x, 8 * width, 3)), 8 * width, 3))
    x = net.max_pool(x, 2, (2, 1), (0, 1))
    x = net.relu(net.conv(x, 8 * width, 2, pad=0))
    assert x.shape[2] == 1
    x = net.transpose(net.reshape(x, 1, x.shape[1], x.shape[3]), 2, 0, 1)
    x = net.linear(_both_ways(net, "LSTM", x, hidden), hidden)
    x = _both_ways(net, "LSTM", x, hidden)
    return net.made(y=net.softmax(net.linear(x, letters)))


def byte_lstm(steps: int = 128, width: int = 256, hidden: int = 256) -> Made:
    """One layer whose weights are bytes: DynamicQuantizeLSTM, which quantises what it reads at every step."""
    net = Layers("byte_lstm")
    x = net.noise("x", steps, 1, width)
    w, r = (
        net.constant(net.whole(-127, 128, 1, rows, 4 * hidden, dtype=np.int8)) for rows in (width, hidden)
    )
    scale = net.constant(np.full((1, 4 * hidden), hidden**-0.5 / 74, np.float32))  # bytes vary by 74
    zero = net.constant(np.zeros((1, 4 * hidden), np.int8))
    net.count((steps, 4 * hidden), width + hidden)
    y = net.op(
        "DynamicQuantizeLSTM",
        x,
        w,
        r,
        net.weight(1, 8 * hidden, scale=0.1),
        None,
        None,
        None,
        None,
        scale,
        zero,
        scale,
        zero,
        shape=(steps, 1, 1, hidden),
        domain=CONTRIB,
        hidden_size=hidden,
    )
    return net.made(y=y)
