"""Convolution, pools and resampling: symbolic sizes, batching, padding by name, and ONNX's own node tests."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.errors import RlxError
from rlx.ir.graph import Graph, Node
from rlx.ir.op import get_op
from rlx.reference.interpreter import evaluate
from rlx.transform.grad import vjp_graph
from rlx.transform.vmap import batch_graph


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def graph_of(shapes: Mapping[str, tuple[Any, ...]], build: Callable[..., Node]) -> Graph:
    g = Graph("test")
    inputs = [g.input(name, shape, "f64") for name, shape in shapes.items()]
    with g.building():
        g.output("y", build(*inputs))
    return g


CONVS = [
    {"strides": 2, "padding": ((1, 2), (0, 1)), "dilations": (1, 2)},
    {"strides": (1, 3), "padding": "same", "groups": 2},
    {"strides": 2, "padding": "same_lower"},
]


@pytest.mark.parametrize("options", CONVS, ids=range(len(CONVS)))
def test_gradients_of_conv_with_symbolic_sizes_are_those_of_numbers(options: dict[str, Any]) -> None:
    w_shape = (4, 4 // options.get("groups", 1), 3, 2)
    feed = {"x": noise(2, 4, 9, 8), "w": noise(*w_shape, seed=1)}
    made = []
    for shape in ((2, 4, 9, 8), ("n", 4, "h", "v")):
        g = graph_of({"x": shape, "w": w_shape}, lambda x, w: ops.conv(x, w, **options))
        y = evaluate(g, feed)["y"]
        made.append([y, *evaluate(vjp_graph(g, ["x", "w"]), {**feed, "ct_y": np.sin(y)}).values()])
    for a, b in zip(*made, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_conv_batched_over_both_operands_by_a_symbolic_size_is_a_loop() -> None:
    g = graph_of(
        {"x": (2, 4, 7), "w": (6, 2, 3)}, lambda x, w: ops.conv(x, w, strides=2, padding=1, groups=2)
    )
    batched = batch_graph(g, {"x": 0, "w": 0}, Graph().input("b", ("b",), "f32").shape[0])
    x, w = noise(3, 2, 4, 7), noise(3, 6, 2, 3, seed=1)
    want = np.stack([evaluate(g, {"x": a, "w": b})["y"] for a, b in zip(x, w, strict=True)])
    np.testing.assert_allclose(evaluate(batched, {"x": x, "w": w})["y"], want, rtol=1e-12, atol=1e-12)


def test_pools_with_symbolic_sizes_are_those_of_numbers() -> None:
    x = noise(1, 2, 10, 7)
    pools: list[Callable[[Any], Any]] = [
        lambda v: ops.max_pool(v, 3, strides=2, padding=1, ceil_mode=True),
        lambda v: ops.max_pool(v, 3, strides=2, padding="same", indices=True)[1],
        lambda v: ops.avg_pool(v, (3, 2), strides=3, padding=1, ceil_mode=True),
        lambda v: ops.avg_pool(v, 3, strides=2, padding="same_lower", count_include_pad=True),
        lambda v: ops.lp_pool(v, 2, p=3, strides=2),
        ops.global_avg_pool,
        ops.global_max_pool,
        ops.global_lp_pool,
    ]
    for pool in pools:
        got = evaluate(graph_of({"x": ("n", 2, "h", "w")}, pool), {"x": x})["y"]
        np.testing.assert_allclose(got, pool(x), rtol=1e-12)


def test_unpooling_puts_maxima_back() -> None:
    x = noise(2, 3, 6, 8)
    best, at = ops.max_pool(x, 2, strides=2, indices=True)
    back = ops.max_unpool(best, at, x.shape)
    assert np.count_nonzero(back) == best.size
    np.testing.assert_array_equal(back[back != 0], x[back != 0])


def test_transposed_conv_is_the_gradient_of_conv() -> None:
    x, w = noise(2, 4, 9), noise(6, 2, 3, seed=1)
    options = {"strides": 2, "padding": ((1, 0),), "dilations": 2, "groups": 2}
    g = graph_of({"x": x.shape, "w": w.shape}, lambda a, b: ops.conv(a, b, **options))
    y = evaluate(g, {"x": x, "w": w})["y"]
    ct = noise(*y.shape, seed=2)
    want = evaluate(vjp_graph(g, ["x"]), {"x": x, "w": w, "ct_y": ct})["grad_x"]
    got = ops.conv_transpose(ct, w, output_padding=x.shape[2] - 2 * (y.shape[2] - 1) - 4, **options)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("has 4 channels", lambda: ops.conv(noise(1, 4, 5), noise(2, 3, 3))),
    ("do not divide into 2 groups", lambda: ops.conv(noise(1, 4, 5), noise(3, 2, 3), groups=2)),
    ("does not fit an axis of 5", lambda: ops.conv(noise(1, 1, 5), noise(1, 1, 9))),
    (
        "unknown padding 'full'; use 'valid', 'same'",
        lambda: ops.conv(noise(1, 1, 5), noise(1, 1, 3), padding="full"),
    ),
    ("strides .* must be 1 positive", lambda: ops.conv(noise(1, 1, 5), noise(1, 1, 3), strides=0)),
    ("different dtypes", lambda: ops.conv(noise(1, 1, 5).astype(np.float32), noise(1, 1, 3))),
    ("does not name 2 axes", lambda: ops.max_pool(noise(1, 1, 5, 5), (2, 2, 2))),
    ("give either size or scale", lambda: ops.resize(noise(3))),
    ("needs a region", lambda: ops.resize(noise(3), (5,), transform="tf_crop_and_resize")),
    ("differ in batch", lambda: ops.grid_sample(noise(2, 1, 3), noise(1, 4, 1))),
]


@pytest.mark.parametrize("text, call", REFUSALS, ids=[t for t, _ in REFUSALS])
def test_refusals_say_what_is_wrong(text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(RlxError, match=text):
        call()


# -- ONNX's node tests: inputs and expected outputs come with the onnx package


def _pads(attrs: Mapping[str, Any], n: int) -> Any:
    named = {"SAME_UPPER": "same", "SAME_LOWER": "same_lower"}.get(attrs.get("auto_pad", ""))
    pads = attrs.get("pads", [0] * 2 * n)
    return named or tuple(zip(pads[:n], pads[n:], strict=True))


def _window(attrs: Mapping[str, Any], n: int) -> dict[str, Any]:
    return {
        "strides": attrs.get("strides", 1),
        "padding": _pads(attrs, n),
        "dilations": attrs.get("dilations", 1),
    }


def _conv(attrs: Any, x: Any, w: Any, bias: Any = None) -> Any:
    return ops.conv(x, w, bias, **_window(attrs, x.ndim - 2), groups=attrs.get("group", 1))


def _conv_transpose(attrs: Any, x: Any, w: Any, bias: Any = None) -> Any:
    more = {"groups": attrs.get("group", 1), "output_padding": attrs.get("output_padding", 0)}
    more["size"] = attrs.get("output_shape")
    return ops.conv_transpose(x, w, bias, **_window(attrs, x.ndim - 2), **more)


def _max_pool(attrs: Any, x: Any) -> Any:
    more = {"ceil_mode": bool(attrs.get("ceil_mode", 0)), "column_major": bool(attrs.get("storage_order", 0))}
    return ops.max_pool(x, attrs["kernel_shape"], **_window(attrs, x.ndim - 2), **more, indices=True)


def _avg_pool(attrs: Any, x: Any) -> Any:
    more = {k: bool(attrs.get(k, 0)) for k in ("ceil_mode", "count_include_pad")}
    return ops.avg_pool(x, attrs["kernel_shape"], **_window(attrs, x.ndim - 2), **more)


def _lp_pool(attrs: Any, x: Any) -> Any:
    more = {"p": attrs.get("p", 2), "ceil_mode": bool(attrs.get("ceil_mode", 0))}
    return ops.lp_pool(x, attrs["kernel_shape"], **_window(attrs, x.ndim - 2), **more)


def _resize(attrs: Any, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    given = {k: None if v is None or v.size == 0 else v for k, v in (("r", roi), ("c", scales), ("s", sizes))}
    return ops.resize(
        x,
        size=None if given["s"] is None else [int(v) for v in given["s"]],
        scale=None if given["c"] is None else [float(v) for v in given["c"]],
        roi=given["r"],
        axes=attrs.get("axes"),
        mode=attrs.get("mode", "nearest"),
        transform=attrs.get("coordinate_transformation_mode", "half_pixel"),
        nearest=attrs.get("nearest_mode", "round_prefer_floor"),
        cubic_a=attrs.get("cubic_coeff_a", -0.75),
        antialias=bool(attrs.get("antialias", 0)),
        exclude_outside=bool(attrs.get("exclude_outside", 0)),
        extrapolation=attrs.get("extrapolation_value", 0.0),
        policy=attrs.get("keep_aspect_ratio_policy", "stretch"),
    )


def _grid_sample(attrs: Any, x: Any, grid: Any) -> Any:
    align = bool(attrs.get("align_corners", 0))
    return ops.grid_sample(x, grid, attrs.get("mode", "linear"), attrs.get("padding_mode", "zeros"), align)


def _roi_align(attrs: Any, x: Any, rois: Any, images: Any) -> Any:
    size = (attrs.get("output_height", 1), attrs.get("output_width", 1))
    half = attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    ratio, scale = attrs.get("sampling_ratio", 0), attrs.get("spatial_scale", 1.0)
    return ops.roi_align(x, rois, images, size, ratio, scale, half, attrs.get("mode", "avg"))


def _deform_conv(attrs: Any, x: Any, w: Any, offset: Any, bias: Any = None, mask: Any = None) -> Any:
    more = {"groups": attrs.get("group", 1), "offset_groups": attrs.get("offset_group", 1)}
    return ops.deform_conv(x, w, offset, mask, bias, **_window(attrs, x.ndim - 2), **more)


CALLS: dict[str, Callable[..., Any]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    "MaxPool": _max_pool,
    "AveragePool": _avg_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": lambda attrs, x: ops.global_avg_pool(x),
    "GlobalMaxPool": lambda attrs, x: ops.global_max_pool(x),
    "Resize": _resize,
    "GridSample": _grid_sample,
    "AffineGrid": lambda attrs, t, size: ops.affine_grid(
        t, [int(s) for s in size], bool(attrs.get("align_corners", 0))
    ),
    "RoiAlign": _roi_align,
}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(v) for v in value] if isinstance(value, list) else value


def onnx_cases(op: str) -> list[tuple[str, Any, list[Any], list[np.ndarray]]]:
    """Name, attributes, arguments and results of ONNX's tests of one op. Importing their module makes them,
    which takes seconds for pools: so it is done in a test, not whenever tests are collected."""
    from onnx import helper, numpy_helper
    from onnx.backend.test.case import node as made

    def array(v: Any) -> np.ndarray:
        return numpy_helper.to_array(v) if hasattr(v, "dims") else np.asarray(v)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{made.__name__}.{op.lower()}")
    out = []
    for test in made._NodeTestCases:
        nodes = test.model.graph.node if test.model is not None else []
        if len(nodes) != 1 or nodes[0].op_type != op:
            continue
        attrs = {a.name: _plain(helper.get_attribute_value(a)) for a in nodes[0].attribute}
        inputs, outputs = test.data_sets[0]
        given = iter([array(v) for v in inputs])
        args = [next(given) if name else None for name in nodes[0].input]
        out.append((test.name, attrs, args, [array(v) for v in outputs]))
    return out


@pytest.mark.parametrize("op", CALLS)
def test_onnx_nodes(op: str) -> None:
    pytest.importorskip("onnx")
    cases = onnx_cases(op)
    assert cases
    for name, attrs, args, want in cases:
        got = CALLS[op](attrs, *args)
        for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=False):
            assert a.dtype == b.dtype and a.shape == b.shape, name
            if b.dtype.kind in "iu":
                np.testing.assert_array_equal(a, b, name)
            else:  # some expected values are written with four digits
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=6e-5, err_msg=name)


@pytest.mark.parametrize("offset", [np.nan, np.inf, -np.inf, 1e30])
def test_a_point_that_is_no_number_reads_nothing(offset: float) -> None:
    x, w = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 4), np.ones((1, 1, 1), np.float32)
    offsets = np.float32([[[0, offset, 0.5, 0]]])
    want = np.float32([[[1, 0, 3.5, 4]]])
    np.testing.assert_array_equal(ops.deform_conv(x, w, offsets), want)
    np.testing.assert_array_equal(rlx.jit(ops.deform_conv)(x, w, offsets), want)


@pytest.mark.parametrize("axes", [(-1,), (2,), (1, 1)])
def test_the_op_of_resize_takes_axes_counted_from_0(axes: tuple[int, ...]) -> None:
    x, sizes = np.ones((2, 4), np.float32), (8,) * len(axes)
    with pytest.raises(RlxError, match="are not distinct axes of"):
        get_op("resize")(x, axes=axes, sizes=sizes, scales=(None,) * len(axes))
