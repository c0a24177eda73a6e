"""Linear models, support vector machines and features (ai.onnx.ml) give what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import rlx  # noqa: E402
from conformance import onnx_nodes  # noqa: E402
from conformance.onnx_nodes import model_of, onnxruntime_results  # noqa: E402
from rlx import onnx_backend  # noqa: E402

RNG = np.random.default_rng(23)
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
ROWS = RNG.standard_normal((9, 4)).astype(np.float32)
ROWS[3] = 0.0


def numbers(*shape: int) -> list[float]:
    return [float(x) for x in RNG.standard_normal(shape).astype(np.float32).reshape(-1)]


def check(op: str, *arrays: np.ndarray, **how: Any) -> None:
    how = {"version": 1, "rtol": 1e-4, "atol": 1e-5} | how
    onnx_nodes.check(op, *arrays, domain="ai.onnx.ml", **how)


# -- linear models


@pytest.mark.parametrize("scores", [1, 2, 3])
@pytest.mark.parametrize("after", TRANSFORMS)
def test_linear_classifier(after: str, scores: int) -> None:
    if after == "PROBIT":
        scores = max(scores, 2)  # of one score it is refused
    small = 0.01 if after == "PROBIT" else 1.0  # chances, not near 0.5, where ONNX Runtime loses digits
    how = {
        "coefficients": [small * c for c in numbers(scores, 4)],
        "intercepts": [0.7, 0.3, 0.2][:scores],
        "classlabels_ints": [5, 7, 9][: max(scores, 2)],
        "post_transform": after,
    }
    check("LinearClassifier", ROWS, outputs=2, multi_class=0, free={0: ("n", 4)}, **how)


@pytest.mark.parametrize("kind", [np.float64, np.int32, np.int64])
def test_linear_classifier_of_other_types(kind: Any) -> None:
    labels = {"classlabels_ints": [5, 7, 9], "intercepts": [0.7, 0.3, 0.2]}
    check("LinearClassifier", (ROWS * 9).astype(kind), outputs=2, coefficients=numbers(3, 4), **labels)
    check("LinearClassifier", (ROWS[1] * 9).astype(kind), outputs=2, coefficients=numbers(3, 4), **labels)


@pytest.mark.parametrize("after", TRANSFORMS)
def test_linear_regressor(after: str) -> None:
    small = 0.01 if after == "PROBIT" else 1.0
    weights = [small * c for c in numbers(3, 4)]
    how = {"targets": 3, "intercepts": [0.7, 0.3, 0.2], "post_transform": after}
    check("LinearRegressor", ROWS, coefficients=weights, **how)
    if after in ("NONE", "PROBIT"):
        check("LinearRegressor", ROWS, coefficients=weights[:4], intercepts=[0.7], post_transform=after)


# -- support vector machines

PARAMS = {"kernel_params": [0.3, 0.2, 3.0]}


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor(kernel: str, one_class: int) -> None:
    how = {"kernel_type": kernel, "kernel_params": [0.3, 0.2, 3.0], "rho": [0.4], "one_class": one_class}
    vectors = {"n_supports": 6, "support_vectors": numbers(6, 4), "coefficients": numbers(6)}
    check("SVMRegressor", ROWS, free={0: ("n", 4)}, **vectors, **how)


def test_svm_regressor_without_vectors() -> None:
    check("SVMRegressor", ROWS, n_supports=0, coefficients=numbers(4), rho=[0.4], **PARAMS)


@pytest.mark.parametrize("chances", [False, True])
@pytest.mark.parametrize("sizes", [[3, 2], [3, 2, 4], [3, 1, 4, 2]])
@pytest.mark.parametrize("after", TRANSFORMS[:4])
def test_svm_classifier(after: str, sizes: list[int], chances: bool) -> None:
    many, vectors = len(sizes), sum(sizes)
    pairs = many * (many - 1) // 2
    how: dict[str, Any] = {
        "kernel_type": "RBF",
        "kernel_params": [0.3, 0.2, 3.0],
        "vectors_per_class": sizes,
        "support_vectors": numbers(vectors, 4),
        "coefficients": numbers(many - 1, vectors),
        "rho": numbers(pairs),
        "classlabels_ints": [4, 0, 9, 1][:many],
        "post_transform": after,
    }
    if chances:
        how |= {"prob_a": [-abs(a) for a in numbers(pairs)], "prob_b": numbers(pairs)}
    check("SVMClassifier", ROWS, outputs=2, free={0: ("n", 4)}, **how)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "SIGMOID"])
def test_svm_classifier_with_other_kernels(kernel: str) -> None:
    how = {"vectors_per_class": [3, 2, 2], "support_vectors": numbers(7, 4), "coefficients": numbers(2, 7)}
    more = {"kernel_type": kernel, "kernel_params": [0.3, 0.2, 3.0], "rho": numbers(3)}
    check("SVMClassifier", ROWS, outputs=2, classlabels_ints=[0, 1, 2], **how, **more)


@pytest.mark.parametrize("many", [2, 3])
@pytest.mark.parametrize("positive", [False, True])
def test_svm_classifier_without_vectors(many: int, positive: bool) -> None:
    weights = [abs(c) if positive else c for c in numbers(many, 4)]
    labels = {"classlabels_ints": [4, 0, 9][:many], **PARAMS}
    for after in TRANSFORMS[:4]:
        check(
            "SVMClassifier", ROWS, outputs=2, coefficients=weights, rho=[0.1], post_transform=after, **labels
        )


# -- features


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32, np.int64])
def test_features_of_all_types(kind: Any) -> None:
    x = (ROWS * 5).astype(kind)
    for norm in ("MAX", "L1", "L2"):
        check("Normalizer", x, norm=norm, free={0: ("n", 4)})
        check("Normalizer", x[0], norm=norm)
    check("Scaler", x, offset=[1.0, 2.0, 3.0, 4.0], scale=[0.5, 2.0, 1.0, 3.0])
    check("Scaler", x, offset=[1.0], scale=[0.5])
    check("FeatureVectorizer", x, x[:, :2], x[:, :1], inputdimensions=[3, 4, 1], free={0: ("n", 4)})
    check("ArrayFeatureExtractor", x, np.array([[2, 0, 0]]))
    check("ArrayFeatureExtractor", x[0], np.array([3, 1]))
    if kind is not np.int32:
        check("OneHotEncoder", np.abs(x).astype(kind), cats_int64s=[0, 1, 2, 5], zeros=1)


def test_imputer() -> None:
    x = ROWS.copy()
    x[1, 2], x[0, 0] = np.nan, -9.0
    each = {"imputed_value_floats": [1.0, 2.0, 3.0, 4.0]}
    check("Imputer", x, replaced_value_float=float("nan"), **each)
    check("Imputer", x, replaced_value_float=float("nan"), imputed_value_floats=[7.0])
    check("Imputer", x, replaced_value_float=-9.0, **each)
    check("Imputer", x, **each)
    whole = np.array([[1, 2], [-1, 4], [1, -1]])
    check("Imputer", whole, imputed_value_int64s=[7, 8], replaced_value_int64=-1)


def test_binarizer_and_label_encoder() -> None:
    check("Binarizer", ROWS, threshold=0.3)
    keys = np.array([[1, 2], [9, 1]])
    check("LabelEncoder", keys, keys_int64s=[1, 2], values_floats=[0.5, 2.5], default_float=7.0, version=2)
    check("LabelEncoder", keys, keys_int64s=[1, 2], values_int64s=[5, 25], version=2)


# -- text and maps, which the host makes of numbers that the program computes


def agree(model: Any, feed: dict[str, np.ndarray]) -> None:
    want = onnxruntime_results(model, feed)
    prepared = onnx_backend.prepare(model)
    got = list(prepared.run(feed))
    assert not prepared.host_thunks and len(prepared.model.variants) == 1
    for w, g in zip(want, got, strict=True):
        if isinstance(w, list):
            for a, b in zip(w, g, strict=True):
                assert a.keys() == b.keys()
                np.testing.assert_allclose([b[key] for key in a], [*a.values()], rtol=1e-5)
        elif w.dtype == object:
            assert g.tolist() == w.tolist()
        else:
            np.testing.assert_allclose(g, w, rtol=1e-5)


WORDS = {"classlabels_strings": ["cat", "dog", "eel"]}


def test_labels_of_text() -> None:
    how = {"outputs": 2, "domain": "ai.onnx.ml", "free": {0: ("n", 4)}}
    linear = {"coefficients": numbers(3, 4), "intercepts": [0.1, 0.2, 0.3]}
    agree(model_of("LinearClassifier", [ROWS], **how, **WORDS, **linear), {"x0": ROWS})
    machine = {"vectors_per_class": [3, 2, 2], "support_vectors": numbers(7, 4), "rho": numbers(3)}
    machine |= {"coefficients": numbers(2, 7), "kernel_type": "RBF", "kernel_params": [0.3, 0.0, 0.0]}
    agree(model_of("SVMClassifier", [ROWS], **how, **WORDS, **machine), {"x0": ROWS})
    trees = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [1, 0, 0],
        "nodes_values": [0.1, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "class_treeids": [0, 0, 0],
        "class_nodeids": [1, 1, 2],
        "class_ids": [0, 1, 2],
        "class_weights": [0.3, 0.7, 1.0],
    }
    agree(model_of("TreeEnsembleClassifier", [ROWS], **how, **WORDS, **trees), {"x0": ROWS})
    one = {"coefficients": numbers(1, 4), "intercepts": [0.1], "classlabels_strings": ["no", "yes"]}
    agree(model_of("LinearClassifier", [ROWS], **how, **one), {"x0": ROWS})


def test_words_by_number() -> None:
    keys = np.array([[1, 2], [9, 1]])
    table = {"keys_int64s": [1, 2], "values_strings": ["one", "two"], "default_string": "many"}
    agree(model_of("LabelEncoder", [keys], domain="ai.onnx.ml", version=2, **table), {"x0": keys})
    table = {"cats_int64s": [1, 2], "cats_strings": ["one", "two"], "default_string": "many"}
    agree(model_of("CategoryMapper", [keys], domain="ai.onnx.ml", **table), {"x0": keys})


@pytest.mark.parametrize(
    "names", [{"classlabels_strings": ["a", "b", "c", "d"]}, {"classlabels_int64s": [3, 1, 2, 0]}]
)
def test_maps(names: dict[str, Any]) -> None:
    model = model_of("ZipMap", [ROWS], domain="ai.onnx.ml", free={0: ("n", 4)}, **names)
    agree(model, {"x0": ROWS})
    assert rlx.from_onnx(model).outputs["y0"].shape[1] == 4


LABELLED = f"""
    <ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]>
    classes (float[n, 4] x) => (label, scores, other)
    <string[3] words = {{"cat", "dog", "eel"}}, int64[1] flat = {{-1}}>
    {{
        filled = ai.onnx.ml.Imputer <imputed_value_floats = [0.1, 0.2, 0.3, 0.4]> (x)
        scaled = ai.onnx.ml.Scaler <offset = [0.1, 0.2, 0.3, 0.4], scale = [1.0, 2.0, 0.5, 1.5]> (filled)
        first, raw = ai.onnx.ml.LinearClassifier <classlabels_strings = ["cat", "dog", "eel"],
            coefficients = {[round(c, 3) for c in numbers(3, 4)]}, intercepts = [0.1, 0.2, 0.3],
            post_transform = "LOGISTIC"> (scaled)
        normal = ai.onnx.ml.Normalizer <norm = "L1"> (raw)
        scores = ai.onnx.ml.ZipMap <classlabels_strings = ["cat", "dog", "eel"]> (normal)
        best = ArgMax <axis = 1, keepdims = 0> (normal)
        picked = ai.onnx.ml.ArrayFeatureExtractor (words, best)
        same = Cast <to = 8> (picked)
        label = Reshape (same, flat)
        other = Gather (words, best)
    }}"""


def test_a_pipeline_with_text() -> None:
    agree(onnx.parser.parse_model(LABELLED), {"x": ROWS})


REFUSED = {
    "one score of no classes": (
        "LinearClassifier",
        {"coefficients": numbers(4), "intercepts": [0.1]},
        "0 classes",
    ),
    "a kernel": ("SVMRegressor", {"coefficients": [1.0], "rho": [0.1], "kernel_type": "WAVE"}, "'WAVE'"),
    "a transform": (
        "LinearRegressor",
        {"coefficients": numbers(4), "post_transform": "LOGISTIC"},
        "'LOGISTIC'",
    ),
    "a norm": ("Normalizer", {"norm": "L7"}, "'L7'"),
    "other columns": ("ZipMap", {"classlabels_int64s": [1, 2]}, "2 class labels"),
    "no values": ("Imputer", {"replaced_value_float": 0.0}, "imputed_value_floats"),
    "no categories": ("OneHotEncoder", {"cats_strings": ["a"]}, "cats_int64s is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str) -> None:
    op, how, words = REFUSED[case]
    with pytest.raises(rlx.errors.ModelImportError, match=words) as caught:
        rlx.from_onnx(model_of(op, [ROWS], domain="ai.onnx.ml", outputs=2 if "Class" in op else 1, **how))
    assert f"node 'the {op}'" in str(caught.value)


def test_text_is_refused_where_tensors_are_wanted() -> None:
    linear = {"coefficients": numbers(3, 4), "intercepts": [0.1, 0.2, 0.3], **WORDS}
    with pytest.raises(rlx.errors.ModelImportError, match="output 'y0' is a sequence, an optional or text"):
        rlx.from_onnx(model_of("LinearClassifier", [ROWS], outputs=2, domain="ai.onnx.ml", **linear))
