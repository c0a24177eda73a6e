"""Ops on text, a host value: these are computed while importing, for the text that the inputs hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs, Strings
from rlx.ir.graph import Node

WHY = "text exists on the host only"


def texts(values: Sequence[object], shape: Sequence[int]) -> Strings:
    out = np.empty(len(values), dtype=np.object_)
    out[:] = list(values)
    return Strings(out.reshape(shape))


@onnx_op("StringConcat")
def string_concat(n: Call) -> Outputs:
    n.on_host(WHY)
    a, b = np.broadcast_arrays(n.strings(0), n.strings(1))
    return texts([x + y for x, y in zip(a.flat, b.flat, strict=True)], a.shape)


@onnx_op("StringSplit")
def string_split(n: Call) -> Outputs:
    n.on_host(WHY)
    x = n.strings(0)
    delimiter, most = n.attr("delimiter", None) or None, n.attr("maxsplit", None)
    parts = [s.split(delimiter, -1 if most is None else int(most)) for s in x.flat]
    width = max(map(len, parts), default=0)
    padded = [p for row in parts for p in [*row, *[""] * (width - len(row))]]
    counts = np.array([len(row) for row in parts], np.int64).reshape(x.shape)
    return texts(padded, (*x.shape, width)), n.constant(counts)


@onnx_op("StringNormalizer", ignored=("locale",))
def string_normalizer(n: Call) -> Outputs:
    n.on_host(WHY)
    x = n.strings(0)
    action = n.choice("case_change_action", "NONE", ("NONE", "LOWER", "UPPER"))
    cases: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    case = cases[action]
    sensitive = n.flag("is_case_sensitive")
    stop = n.attr("stopwords", [])
    same = str if sensitive else str.lower
    dropped = {same(w) for w in stop}
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    if rows.ndim != 2 or (len(rows) != 1 and stop):
        raise ModelImportError(f"its input has shape {list(x.shape)}; it must be [C] or [1,C]")
    kept = [[case(w) for w in row if same(w) not in dropped] for row in rows]
    kept = [row or [""] for row in kept]
    return texts(
        [w for row in kept for w in row], (len(kept[0]),) if x.ndim == 1 else (len(kept), len(kept[0]))
    )


@onnx_op("RegexFullMatch")
def regex_full_match(n: Call) -> Outputs:
    n.on_host(WHY)
    x, pattern = n.strings(0), re.compile(n.attr("pattern"))
    return n.constant(np.array([bool(pattern.fullmatch(s)) for s in x.flat], bool).reshape(x.shape))


@onnx_op("TfIdfVectorizer")
def tf_idf(n: Call) -> Outputs:
    """How often each n-gram of a pool occurs, words up to max_skip_count apart."""
    value = n.value(0)
    pool: Sequence[int]
    if isinstance(value, Strings):
        n.on_host(WHY)
        words = n.attr("pool_strings")
        number = {w: i for i, w in enumerate(dict.fromkeys(words))}
        x: Node = n.constant(
            np.array([number.get(w, -1) for w in value.array.flat], np.int64).reshape(value.shape)
        )
        pool = [number[w] for w in words]
    else:
        x, pool = ops.cast(n[0], "i64"), n.attr("pool_int64s")
    mode = n.choice("mode", "TF", ("TF", "IDF", "TFIDF"))
    least, most = int(n.attr("min_gram_length")), int(n.attr("max_gram_length"))
    skips = int(n.attr("max_skip_count"))
    starts, places = n.attr("ngram_counts"), n.attr("ngram_indexes")
    weights = np.array(n.attr("weights", [1.0] * len(places)), np.float32)
    rows = x if x.rank == 2 else ops.expand_dims(x, 0)
    found, at = [], 0
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(pool)
        length = i + 1
        grams = np.array(pool[start:end], np.int64).reshape(-1, length)
        if len(grams) == 0:
            continue
        if least <= length <= most:
            found.append((at, occurrences(n, rows, grams, range(skips + 1 if length > 1 else 1))))
        at += len(grams)
    width = max(places) + 1
    out: Node = ops.zeros((rows.shape[0], width), "f32")
    for first, counts in found:
        columns = np.array(places[first : first + counts.shape[1]], np.int64)
        if mode != "TF":
            present = ops.minimum(counts, 1.0) if mode == "IDF" else counts
            counts = present * n.constant(weights[first : first + len(columns)])
        spread = np.zeros((len(columns), width), np.float32)
        spread[np.arange(len(columns)), columns] = 1
        out = out + ops.matmul(counts, n.constant(spread))
    return out if x.rank == 2 else ops.squeeze(out, 0)


def occurrences(n: Call, rows: Node, grams: np.ndarray, skips: Sequence[int]) -> Node:
    """[batch, grams]: how often each n-gram occurs in rows of numbers."""
    count, length = grams.shape
    total: Node = ops.zeros((rows.shape[0], count), "f32")
    for skip in skips:
        reach = (length - 1) * (skip + 1)
        many = rows.shape[1] - reach
        if isinstance(many, int) and many <= 0:
            continue
        same = []
        for j in range(length):
            part = ops.expand_dims(ops.slice_axis(rows, 1, j * (skip + 1), many), 2)
            same.append(ops.equal(part, n.constant(grams[:, j])))
        total = total + ops.sum(ops.cast(reduce(ops.logical_and, same), "f32"), axis=1)
    return total
