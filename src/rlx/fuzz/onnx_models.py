"""ONNX models to mutate: the small ones that the onnx package has for its own operators."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.fuzz.mutate import LARGE

if TYPE_CHECKING:
    from onnx import AttributeProto, ModelProto


MOST_BYTES = 20_000  # of a model: larger ones make runs slow and show nothing else


@functools.cache
def model_files() -> tuple[Path, ...]:
    """Models of the onnx package, in a fixed order; none without the package."""
    try:
        import onnx.backend.test
    except ImportError:
        return ()
    folder = Path(onnx.backend.test.__file__).parent / "data"
    return tuple(sorted(p for p in folder.rglob("model.onnx") if p.stat().st_size <= MOST_BYTES))


def mutated_model(chance: random.Random) -> ModelProto:
    """A model with one to three of its fields changed."""
    import onnx

    model = onnx.load(chance.choice(model_files()))
    for _ in range(chance.choice((1, 1, 2, 3))):
        _change(model, chance)
    return model


def _change(model: ModelProto, chance: random.Random) -> None:
    graph = model.graph
    attributes = [a for n in graph.node for a in n.attribute]
    arrays = list(graph.initializer)
    kinds = [
        "value",
        "name",
        "operator",
        "lost",
        *(["attribute"] * 6 if attributes else []),
        *(["array"] if arrays else []),
    ]
    kind = chance.choice(kinds)
    if kind == "attribute":
        _change_attribute(chance.choice(attributes), chance)
    elif kind == "array":
        array = chance.choice(arrays)
        if array.dims and chance.random() < 0.6:
            array.dims[chance.randrange(len(array.dims))] = _number(array.dims[0], chance)
        else:
            array.data_type = chance.randrange(25)
    elif kind == "value" and len(graph.input):
        shape = chance.choice(graph.input).type.tensor_type.shape
        if len(shape.dim):
            chance.choice(shape.dim).dim_value = _number(3, chance)
    elif kind == "name" and len(graph.node):
        node = chance.choice(graph.node)
        names = [n for m in graph.node for n in (*m.input, *m.output)] + [""]
        if len(node.input):
            node.input[chance.randrange(len(node.input))] = chance.choice(names)
    elif kind == "operator" and len(graph.node):
        import onnx.defs

        chance.choice(graph.node).op_type = chance.choice(
            sorted({s.name for s in onnx.defs.get_all_schemas()})
        )
    elif kind == "lost" and len(graph.node):
        del graph.node[chance.randrange(len(graph.node))]


def _number(n: int, chance: random.Random) -> int:
    near = (n + 1, n - 1, n * 2, -n, 0, 1, -1, 2, 7, 64)
    drawn = chance.choice((*near, *near, *(m for m in LARGE if m < 2**63)))
    return max(-(2**63), min(drawn, 2**63 - 1))


def _change_attribute(attribute: AttributeProto, chance: random.Random) -> None:
    if len(attribute.ints):
        at = chance.randrange(len(attribute.ints))
        if chance.random() < 0.2:
            del attribute.ints[at]
        else:
            attribute.ints[at] = _number(attribute.ints[at], chance)
    elif len(attribute.floats):
        attribute.floats[0] = chance.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
    elif attribute.HasField("i"):
        attribute.i = _number(attribute.i, chance)
    elif attribute.HasField("f"):
        attribute.f = chance.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
    elif attribute.HasField("s"):
        attribute.s = chance.choice((b"", b"same", b"\xff\xfe", b"SAME_UPPER", b"linear", attribute.s + b"x"))
    else:
        attribute.name = chance.choice(("axis", "axes", "mode", "to", "x"))
