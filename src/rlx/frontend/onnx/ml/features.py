"""Classical models (ai.onnx.ml): label encoders, small feature ops. More in `ml_linear` and `ml_trees`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx import ops
from rlx.errors import ModelImportError
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Labels, Maps, Outputs, Strings, Value
from rlx.ir.graph import Node

ML = "ai.onnx.ml"


@onnx_op("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(n: Call) -> Outputs:
    if isinstance(n.value(0), Strings):
        return picked_words(n)
    x, at = n[0], ops.reshape(n[1], (-1,))
    picked = ops.gather(x, at, x.rank - 1)
    return picked if x.rank > 1 else ops.expand_dims(picked, 0)


def picked_words(n: Call) -> Labels:
    """Names of classes by their numbers, as exporters look them up."""
    words = n.strings(0)
    if words.size != words.shape[-1]:
        raise ModelImportError(f"its text of shape {list(words.shape)} must be one row")
    return Labels(ops.reshape(ops.cast(n[1], "i64"), (1, -1)), words.reshape(-1))


@onnx_op("Binarizer", domain=ML)
def binarizer(n: Call) -> Outputs:
    x = n[0]
    return ops.cast(ops.greater(x, n.constant(n.attr("threshold", 0.0), x.dtype)), x.dtype)


@onnx_op("Scaler", domain=ML)
def scaler(n: Call) -> Outputs:
    x = ops.cast(n[0], "f32")
    offset, scale = (
        np.array(n.attr(name, [value]), np.float32) for name, value in (("offset", 0), ("scale", 1))
    )
    return (x - n.constant(offset)) * n.constant(scale)


@onnx_op("Normalizer", domain=ML)
def normalizer(n: Call) -> Outputs:
    x = ops.cast(n[0], "f32")
    kind = n.choice("norm", "MAX", ("MAX", "L1", "L2"))
    measures: dict[str, Callable[..., Node]] = {"MAX": ops.max, "L1": ops.norm_l1, "L2": ops.norm_l2}
    norm = measures[kind](x, -1, True)
    return x / ops.where(ops.equal(norm, 0.0), n.constant(1.0, "f32"), norm)  # rows of zeros stay


@onnx_op("Imputer", domain=ML)
def imputer(n: Call) -> Outputs:
    x = n[0]
    kind, default = ("float", 0.0) if x.dtype.is_float else ("int64", 0)
    missing, made = n.attr(f"replaced_value_{kind}", default), n.attr(f"imputed_value_{kind}s", [])
    for other in ("float", "int64"):  # exporters write both; those of the input's type count
        n.attr(f"replaced_value_{other}", None), n.attr(f"imputed_value_{other}s", None)
    if not len(made):
        raise ModelImportError(
            f"its attribute imputed_value_{kind}s is missing, which its input {x.tensor} needs"
        )
    gone = ops.is_nan(x) if np.isnan(missing) else ops.equal(x, n.constant(missing, x.dtype))
    return ops.where(gone, n.constant(np.array(made), x.dtype), x)


@onnx_op("FeatureVectorizer", domain=ML)
def feature_vectorizer(n: Call) -> Outputs:
    """Features side by side, each cut or filled up with zeros to its size."""
    parts = []
    for i, wanted in enumerate(n.attr("inputdimensions")):
        x = ops.cast(n[i], "f32")
        x = ops.expand_dims(x, 0) if x.rank == 1 else ops.reshape(x, (x.shape[0], -1))
        have = x.shape[1]
        if not isinstance(have, int):
            raise ModelImportError(f"the number of features of its input {i} {n[i].tensor} must be known")
        x = ops.slice_axis(x, 1, 0, min(have, wanted))
        parts.append(ops.pad(x, [(0, 0), (0, max(wanted - have, 0))]))
    return ops.concat(parts, 1)


@onnx_op("OneHotEncoder", domain=ML)
def one_hot_encoder(n: Call) -> Outputs:
    """A category that is not listed gives zeros (without `zeros`, ONNX Runtime stops there)."""
    n.attr("zeros", 1)
    words, numbers = n.attr("cats_strings", None), n.attr("cats_int64s", None)
    if isinstance(n.value(0), Strings):
        n.on_host("text exists on the host only")
        given = n.strings(0)
        if not words:
            raise ModelImportError("its input is text, but cats_strings is missing")
        return n.constant((given[..., None] == np.array(words, dtype=object)).astype(np.float32))
    if not numbers:
        raise ModelImportError(f"its input {n[0].tensor} holds numbers, but cats_int64s is missing")
    x = ops.cast(n[0], "i64")
    hit = ops.equal(ops.expand_dims(x, x.rank), n.constant(np.array(numbers, np.int64)))
    return ops.cast(hit, "f32")


@onnx_op("ZipMap", domain=ML)
def zip_map(n: Call) -> Outputs:
    words, numbers = n.attr("classlabels_strings", None), n.attr("classlabels_int64s", None)
    x = n[0]
    keys = list(words or numbers or ())
    if x.shape[-1] != len(keys):
        raise ModelImportError(f"it has {len(keys)} class labels for the columns of its input {x.tensor}")
    return Maps(x if x.rank > 1 else ops.expand_dims(x, 0), keys)


@onnx_op("CategoryMapper", domain=ML)
def category_mapper(n: Call) -> Outputs:
    words = np.array(n.attr("cats_strings"), dtype=object)
    numbers = np.array(n.attr("cats_int64s"), np.int64)
    number = np.array(n.attr("default_int64", -1), np.int64)
    word = np.array(n.attr("default_string", "_Unused"), dtype=object)
    if isinstance(n.value(0), Strings):
        return encoded(n, words, numbers, number)
    return encoded(n, numbers, words, word)


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
def label_encoder_of_classes(n: Call) -> Outputs:
    classes = n.attr("classes_strings")
    if isinstance(n.value(0), Strings):
        numbers = np.arange(len(classes), dtype=np.int64)
        return encoded(
            n, np.array(classes, dtype=object), numbers, np.array(n.attr("default_int64", -1), np.int64)
        )
    missing = np.array(n.attr("default_string", "_Unused"), dtype=object)
    return encoded(n, np.arange(len(classes)), np.array(classes, dtype=object), missing)


@onnx_op("LabelEncoder", domain=ML, since=2)
def label_encoder(n: Call) -> Outputs:
    keys, values = table_side(n, "keys"), table_side(n, "values")
    if keys is None or values is None:
        raise ModelImportError("its keys or values are missing")
    if values.dtype == object:
        missing = np.array(n.attr("default_string", "_Unused"), dtype=object)
    elif values.dtype.kind == "i":
        missing = np.array(n.attr("default_int64", -1)).astype(values.dtype)
    else:
        missing = np.array(n.attr("default_float", -0.0)).astype(values.dtype)
    if n.has("default_tensor"):
        missing = np.asarray(n.attr("default_tensor")).reshape(-1)[0]
    return encoded(n, keys, values, np.asarray(missing))


def encoded(n: Call, keys: np.ndarray, values: np.ndarray, missing: np.ndarray) -> Value:
    """Each element replaced by what the table says."""
    text = isinstance(n.value(0), Strings)
    if text or (values.dtype == object and n.known(0) is not None):
        n.on_host("text exists on the host only")
        given = n.strings(0) if text else n.array(0)
        found = dict(zip(keys.tolist(), values.tolist(), strict=True))
        out = [found.get(item, missing.item()) for item in given.reshape(-1).tolist()]
        made = np.array(out, dtype=values.dtype).reshape(given.shape)
        return Strings(made) if made.dtype == object else n.constant(made)
    x = n[0]
    hit = ops.equal(ops.expand_dims(x, x.rank), n.constant(keys.astype(x.dtype.np)))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        nan = ops.logical_and(ops.expand_dims(ops.is_nan(x), x.rank), n.constant(np.isnan(keys)))
        hit = ops.logical_or(hit, nan)
    at, known = ops.argmax(ops.cast(hit, "i32"), axis=x.rank), ops.any(hit, x.rank)
    if values.dtype == object:  # the last word is for those that are not in the table
        at = ops.where(known, at, n.constant(len(keys), at.dtype))
        return Labels(ops.cast(at, "i64"), np.append(values, missing))
    return ops.where(known, ops.gather(n.constant(values), at), n.constant(missing))
