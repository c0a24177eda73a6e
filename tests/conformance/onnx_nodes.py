"""Models of one ONNX node, run by ONNX Runtime and by RLX, which must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from conformance.ort_session import open_session
from rlx import onnx_backend


def model_of(
    op: str,
    arrays: Sequence[np.ndarray | None],
    fixed: Sequence[int] = (),
    outputs: int | Sequence[int] = 1,
    domain: str = "com.microsoft",
    version: int = 1,
    free: Mapping[int, Sequence[Any]] | None = None,
    **attrs: Any,
) -> Any:
    """A model of one node; inputs in `fixed` are initializers, None is an input left out, `free` names sizes
    of inputs; `outputs` says how many there are, or which."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(arrays)]
    kind = helper.np_dtype_to_tensor_dtype
    inputs = [
        helper.make_tensor_value_info(n, kind(a.dtype), (free or {}).get(i, a.shape))
        for i, (n, a) in enumerate(zip(names, arrays, strict=True))
        if a is not None and i not in fixed
    ]
    constants = [onnx.numpy_helper.from_array(arrays[i], names[i]) for i in fixed]
    wanted = range(outputs) if isinstance(outputs, int) else outputs
    results = [f"y{i}" for i in wanted]
    places = [f"y{i}" if i in wanted else "" for i in range(max(wanted) + 1)]
    node = helper.make_node(op, names, places, name=f"the {op}", domain=domain, **attrs)
    graph = helper.make_graph(
        [node], op, inputs, [helper.make_empty_tensor_value_info(r) for r in results], constants
    )
    opsets = [helper.make_opsetid("", 17)] if domain else []
    opsets.append(helper.make_opsetid(domain, version))
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def onnxruntime_results(model: Any, feed: Mapping[str, np.ndarray]) -> list[Any]:
    """What ONNX Runtime computes on the CPU."""
    session = open_session(model)
    return list(session.run(None, dict(feed)))


def check(
    op: str,
    *arrays: np.ndarray | None,
    fixed: Sequence[int] = (),
    outputs: int | Sequence[int] = 1,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    domain: str = "com.microsoft",
    want: Sequence[np.ndarray] | None = None,
    **how: Any,
) -> list[np.ndarray]:
    """RLX gives what is wanted of a node, without a host thunk; if nothing is given, what ONNX Runtime gives.

    Returns the results.
    """
    model = model_of(op, arrays, fixed, outputs, domain, **how)
    feed = {f"x{i}": a for i, a in enumerate(arrays) if a is not None and i not in fixed}
    want = onnxruntime_results(model, feed) if want is None else want
    prepared = onnx_backend.prepare(model)
    got = list(prepared.run(list(feed.values())))
    assert not prepared.host_thunks
    for w, g in zip(want, got, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol)
    return got
