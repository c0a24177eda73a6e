"""Classical models (ai.onnx.ml): label encoders, small feature ops. Trees are in `ml_trees`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx import ops
from rlx.errors import ImportError_
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Strings

ML = "ai.onnx.ml"


@onnx_op("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(n: Call) -> Any:
    x, at = n[0], ops.reshape(n[1], (-1,))
    picked = ops.gather(x, at, x.rank - 1)
    return picked if x.rank > 1 else ops.expand_dims(picked, 0)


@onnx_op("Binarizer", domain=ML)
def binarizer(n: Call) -> Any:
    x = n[0]
    return ops.cast(ops.greater(x, n.constant(n.attr("threshold", 0.0), x.dtype)), x.dtype)


@onnx_op("Scaler", domain=ML)
def scaler(n: Call) -> Any:
    x = ops.cast(n[0], "f32")
    offset, scale = (
        np.array(n.attr(name, [value]), np.float32) for name, value in (("offset", 0), ("scale", 1))
    )
    return (x - n.constant(offset)) * n.constant(scale)


@onnx_op("Normalizer", domain=ML)
def normalizer(n: Call) -> Any:
    x = ops.cast(n[0], "f32")
    norm = {"MAX": lambda v: ops.max(v, -1, True), "L1": lambda v: ops.norm_l1(v, -1, True)}
    kind = n.choice("norm", "MAX", ("MAX", "L1", "L2"))
    return x / norm.get(kind, lambda v: ops.norm_l2(v, -1, True))(x)


@onnx_op("LinearRegressor", domain=ML)
def linear_regressor(n: Call) -> Any:
    x = ops.cast(n[0], "f32")
    targets = int(n.attr("targets", 1))
    weights = np.array(n.attr("coefficients"), np.float32).reshape(targets, -1)
    if n.choice("post_transform", "NONE", ("NONE",)):
        y = ops.matmul(x, n.constant(weights.T))
    bias = n.attr("intercepts", None)
    return y if bias is None else y + n.constant(np.array(bias, np.float32))


# -- label encoder


def table_side(n: Call, side: str) -> np.ndarray | None:
    """keys_* or values_* as an array, whichever type is given."""
    if n.has(f"{side}_tensor"):
        return np.asarray(n.attr(f"{side}_tensor"))
    for kind, to in (("strings", object), ("int64s", np.int64), ("floats", np.float32)):
        if n.has(f"{side}_{kind}"):
            return np.array(n.attr(f"{side}_{kind}"), dtype=to)
    return None


@onnx_op("LabelEncoder", domain=ML)
def label_encoder_of_classes(n: Call) -> Any:
    classes = n.attr("classes_strings")
    if isinstance(n.value(0), Strings):
        numbers = np.arange(len(classes), dtype=np.int64)
        return encoded(
            n, np.array(classes, dtype=object), numbers, np.array(n.attr("default_int64", -1), np.int64)
        )
    missing = np.array(n.attr("default_string", "_Unused"), dtype=object)
    return encoded(n, np.arange(len(classes)), np.array(classes, dtype=object), missing)


@onnx_op("LabelEncoder", domain=ML, since=2)
def label_encoder(n: Call) -> Any:
    keys, values = table_side(n, "keys"), table_side(n, "values")
    if keys is None or values is None:
        raise ImportError_("its keys or values are missing")
    if values.dtype == object:
        missing = np.array(n.attr("default_string", "_Unused"), dtype=object)
    elif values.dtype.kind == "i":
        missing = np.array(n.attr("default_int64", -1)).astype(values.dtype)
    else:
        missing = np.array(n.attr("default_float", -0.0)).astype(values.dtype)
    if n.has("default_tensor"):
        missing = np.asarray(n.attr("default_tensor")).reshape(-1)[0]
    return encoded(n, keys, values, np.asarray(missing))


def encoded(n: Call, keys: np.ndarray, values: np.ndarray, missing: np.ndarray) -> Any:
    """Each element replaced by what the table says."""
    if isinstance(n.value(0), Strings) or values.dtype == object:
        n.on_host("text exists on the host only")
        given = n.strings(0) if isinstance(n.value(0), Strings) else n.array(0)
        found = dict(zip(keys.tolist(), values.tolist(), strict=True))
        out = [found.get(item, missing.item()) for item in given.reshape(-1).tolist()]
        made = np.array(out, dtype=values.dtype).reshape(given.shape)
        return Strings(made) if made.dtype == object else n.constant(made)
    x = n[0]
    hit = ops.equal(ops.expand_dims(x, x.rank), n.constant(keys.astype(x.dtype.np)))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        nan = ops.logical_and(ops.expand_dims(ops.is_nan(x), x.rank), n.constant(np.isnan(keys)))
        hit = ops.logical_or(hit, nan)
    at = ops.argmax(ops.cast(hit, "i32"), axis=x.rank)
    return ops.where(ops.any(hit, x.rank), ops.gather(n.constant(values), at), n.constant(missing))
