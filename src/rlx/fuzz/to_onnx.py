"""Programs as ONNX models, as an exporter would write them: one node of ONNX for each op that has one.

Ops without a counterpart are expanded until they have one. Open sizes are written as shape arithmetic
(Shape, Gather, Mul, Concat), which is what models in the wild are full of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.ir.dim import Dim
from rlx.ir.dims.atom import Atom, FloorDiv, Sym
from rlx.ir.dims.expr import Expr
from rlx.ir.dtype import F8E5M2, F8E8M0
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.transform.expand import expand_graph
from rlx.zoo.onnx_writer import OnnxWriter

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto


OPSET = 20
SAME_NAME = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "erf": "Erf", "exp": "Exp",
    "floor": "Floor", "log": "Log", "neg": "Neg", "reciprocal": "Reciprocal", "round": "Round",
    "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "tan": "Tan",
    "tanh": "Tanh", "relu": "Relu", "softplus": "Softplus", "softsign": "Softsign", "mish": "Mish",
    "is_nan": "IsNaN", "is_inf": "IsInf", "logical_not": "Not", "bitwise_not": "BitwiseNot",
    "add": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow", "maximum": "Max", "minimum": "Min",
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor",
    "bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor",
    "where": "Where", "matmul": "MatMul", "prelu": "PRelu", "hard_swish": "HardSwish", "div": "Div",
}  # fmt: skip
WITH_ALPHA = {"elu": "Elu", "celu": "Celu", "leaky_relu": "LeakyRelu", "thresholded_relu": "ThresholdedRelu"}
REDUCED = {
    "reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin",
    "reduce_prod": "ReduceProd", "mean": "ReduceMean", "norm_l1": "ReduceL1", "norm_l2": "ReduceL2",
    "logsumexp": "ReduceLogSumExp", "sum_square": "ReduceSumSquare",
}  # fmt: skip


class CannotWrite(Exception):
    """The program has something that ONNX has no node for."""


class Writer(OnnxWriter):
    """A graph in nodes of ONNX; `names` are those of its values."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.names: dict[int, str] = {}
        self.sizes: dict[str, str] = {}

    def of(self, node: Node) -> list[str]:
        return [self.names[o.id] for o in node.operands]

    def integers(self, values: Sequence[Dim]) -> str:
        """A vector of sizes: a constant, or computed from the shapes of inputs."""
        if all(isinstance(v, int) for v in values):
            return self.constant(np.array(values, np.int64).reshape(-1))
        return self.op("Concat", *(self.size(v) for v in values), axis=0)

    def size(self, d: Dim) -> str:
        """A size as a vector of one element."""
        if not isinstance(d, Expr):
            return self.constant([d])
        if str(d) not in self.sizes:
            self.sizes[str(d)] = self._sum(d)
        return self.sizes[str(d)]

    def _sum(self, d: Expr) -> str:
        parts = []
        for monomial, factor in d.terms:
            factors = [self._atom(atom) for atom, power in monomial for _ in range(power)]
            if factor != 1 or not factors:
                factors.append(self.constant([factor]))
            product = factors[0]
            for other in factors[1:]:
                product = self.op("Mul", product, other)
            parts.append(product)
        if d.const:
            parts.append(self.constant([d.const]))
        total = parts[0]
        for part in parts[1:]:
            total = self.op("Add", total, part)
        return total

    def _atom(self, atom: Atom) -> str:
        if isinstance(atom, FloorDiv):
            return self.op("Div", *(self.size(a) for a in atom.args))
        if not isinstance(atom, Sym):
            raise CannotWrite(str(atom))
        for given in self.graph.inputs:
            for axis, d in enumerate(given.shape):
                if isinstance(d, Expr) and d.atom == atom:
                    shape = self.op("Shape", self.names[given.id])
                    return self.op("Gather", shape, self.constant([axis]), axis=0)
        raise CannotWrite(str(atom))


Write = Callable[[Writer, Node], str]


def _reduced(w: Writer, n: Node) -> str:
    axes = w.constant(list(n.attrs["axes"]))
    if not n.attrs["axes"]:  # ONNX takes no axes for all of them
        raise CannotWrite("a reduction over nothing")
    return w.op(REDUCED[n.op.name], *w.of(n), axes, keepdims=int(n.attrs["keepdims"]))


def _trunc_div(w: Writer, n: Node) -> str:
    """Div of integers rounds towards zero."""
    if not n.dtype.is_int:
        raise CannotWrite("a quotient of floats without its fraction")
    return w.op("Div", *w.of(n))


def _cast(w: Writer, n: Node) -> str:
    from onnx import helper

    to, saturates = helper.np_dtype_to_tensor_dtype(n.dtype.np), n.attrs["saturate"]
    if n.operands[0].dtype.is_float and not n.dtype.is_float and n.dtype.bits < 8:
        raise CannotWrite("a cast to few bits, which saturates here and wraps in a model")
    if n.dtype is F8E8M0:
        raise CannotWrite("a cast to powers of two, which rounds up in a model")
    if not n.dtype.name.startswith("f8"):  # no other format knows the flag
        return w.op("Cast", *w.of(n), to=to)
    if saturates is None:  # ours: formats without infinity do; ONNX's: every format does
        saturates = n.dtype is not F8E5M2
    return w.op("Cast", *w.of(n), to=to, saturate=int(saturates))


def _softmax(w: Writer, n: Node) -> str:
    if n.attrs.get("masked"):
        raise CannotWrite("a softmax of rows that may be masked")
    return w.op(
        {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[n.op.name], *w.of(n), axis=n.attrs["axis"]
    )


def _layer_norm(w: Writer, n: Node) -> str:
    operands = w.of(n)
    if len(operands) == 1 or n.attrs["axis"] % n.operands[0].rank != n.operands[0].rank - 1:
        raise CannotWrite("a norm without scale")
    return w.op("LayerNormalization", *operands, axis=-1, epsilon=_number(n, "eps"))


def _number(n: Node, name: str) -> float:
    """An attribute; ONNX has them in single precision, which shows in results of f64."""
    value: float = n.attrs[name]
    if n.dtype.name == "f64" and float(np.float32(value)) != value:
        raise CannotWrite(f"{name} = {value}, which single precision rounds")
    return value


def _slice(w: Writer, n: Node) -> str:
    starts, sizes, steps = n.attrs["starts"], n.attrs["sizes"], n.attrs["steps"]
    whole = zip(n.operands[0].shape, starts, sizes, steps, strict=True)
    cut = [i for i, (d, a, s, t) in enumerate(whole) if (a, s, t) != (0, d, 1)]
    if not cut:
        return w.op("Identity", *w.of(n))
    if any(steps[i] < 0 and not isinstance(starts[i], int) for i in cut):
        raise CannotWrite("a slice that runs backwards from an open size")
    ends = []
    for i in cut:
        end = starts[i] + sizes[i] * steps[i]
        ends.append(-(2**31) if steps[i] < 0 and (not isinstance(end, int) or end < 0) else end)
    return w.op(
        "Slice",
        *w.of(n),
        w.integers([starts[i] for i in cut]),
        w.integers(ends),
        w.constant(cut),
        w.constant([steps[i] for i in cut]),
    )


def _pad(w: Writer, n: Node) -> str:
    pairs = n.attrs["padding"]
    if any(n.attrs["interior"]):
        raise CannotWrite("padding between elements")
    value = w.scalar(f"filling_{n.id}", n.attrs["value"], n.dtype.np)
    return w.op("Pad", *w.of(n), w.integers([p[0] for p in pairs] + [p[1] for p in pairs]), value)


def _dot(w: Writer, n: Node) -> str:
    """Any contraction is an Einsum."""
    if n.attrs["out_dtype"] is not None:
        raise CannotWrite("a product with a dtype of its own")
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(letters) for _ in n.operands[0].shape]
    right = [next(letters) for _ in n.operands[1].shape]
    a = n.attrs
    shared = list(zip(a["lhs_batch"], a["rhs_batch"], strict=True))
    summed = list(zip(a["lhs_contract"], a["rhs_contract"], strict=True))
    for i, j in shared + summed:
        right[j] = left[i]
    gone = {left[i] for i, _ in summed}
    first = [left[i] for i, _ in shared]
    rest = [c for c in left + right if c not in gone and c not in first]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(first + list(dict.fromkeys(rest)))}"
    return w.op("Einsum", *w.of(n), equation=equation)


def _conv(w: Writer, n: Node) -> str:
    a = n.attrs
    if a["out_dtype"] is not None or a["fill"]:
        raise CannotWrite("a quantised convolution")
    pads = [p[0] for p in a["padding"]] + [p[1] for p in a["padding"]]
    if not all(isinstance(p, int) and p >= 0 for p in pads):
        raise CannotWrite("padding that crops")
    geometry = {"strides": list(a["strides"]), "dilations": list(a["dilations"]), "pads": pads}
    return w.op("Conv", *w.of(n), group=a["groups"], **geometry)


def _transpose(w: Writer, n: Node) -> str:
    perm = list(n.attrs["perm"])
    return w.op("Transpose", *w.of(n), perm=perm) if perm else w.op("Identity", *w.of(n))


def _cumsum(w: Writer, n: Node) -> str:
    a = n.attrs
    axis = w.scalar(f"axis_{n.id}", a["axis"], np.int64)
    return w.op("CumSum", *w.of(n), axis, exclusive=int(a["exclusive"]), reverse=int(a["reverse"]))


def _chosen(w: Writer, n: Node) -> str:
    a = n.attrs
    kind = {"argmax": "ArgMax", "argmin": "ArgMin"}[n.op.name]
    return w.op(kind, *w.of(n), axis=a["axis"], keepdims=int(a["keepdims"]), select_last_index=int(a["last"]))


def _gather(w: Writer, n: Node) -> str:
    if n.attrs["batch_dims"]:
        raise CannotWrite("a gather per row of a batch")
    return w.op("Gather", *w.of(n), axis=n.attrs["axis"])


def _cond(w: Writer, n: Node) -> str:
    """If; what a branch reads is in scope there."""
    branches = {}
    for kind, body in zip(("then_branch", "else_branch"), n.bodies, strict=True):
        branches[kind] = _body(w, body, w.of(n)[1:], f"{kind}_{n.id}")
    outputs = [f"if_{n.id}_{i}" for i in range(len(n.bodies[0].outputs))]
    return w.op("If", w.of(n)[0], outputs=outputs, **branches)


def _body(around: Writer, body: Graph, given: Sequence[str], prefix: str) -> GraphProto:
    from onnx import helper

    inside = Writer(body)
    inside._count = 10_000 * (len(around.values) + len(around.nodes) + 1)  # their own names
    for node, name in zip(body.inputs, given, strict=True):
        inside.names[node.id] = name
    _write(inside, skip={n.id for n in body.inputs})
    outputs = []
    for i, out in enumerate(body.outputs.values()):
        name = inside.op("Identity", inside.names[out.id], outputs=[f"{prefix}_{i}"])
        kind = helper.np_dtype_to_tensor_dtype(out.dtype.np)
        outputs.append(helper.make_tensor_value_info(name, kind, None))
    around.values |= inside.values
    return helper.make_graph(inside.nodes, prefix, [], outputs)


TABLE: dict[str, Write] = {
    **dict.fromkeys(SAME_NAME, lambda w, n: w.op(SAME_NAME[n.op.name], *w.of(n))),
    **dict.fromkeys(
        WITH_ALPHA, lambda w, n: w.op(WITH_ALPHA[n.op.name], *w.of(n), alpha=_number(n, "alpha"))
    ),
    **dict.fromkeys(REDUCED, _reduced),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("argmax", "argmin"), _chosen),
    "trunc_div": _trunc_div,
    "cast": _cast,
    "layer_norm": _layer_norm,
    "slice": _slice,
    "pad": _pad,
    "dot_general": _dot,
    "conv": _conv,
    "cumsum": _cumsum,
    "gather": _gather,
    "cond": _cond,
    "gather_elements": lambda w, n: w.op("GatherElements", *w.of(n), axis=n.attrs["axis"]),
    "gelu": lambda w, n: w.op("Gelu", *w.of(n), approximate=n.attrs["approximate"]),
    "reshape": lambda w, n: w.op("Reshape", *w.of(n), w.integers(n.shape), allowzero=1),
    "broadcast_to": lambda w, n: w.op("Expand", *w.of(n), w.integers(n.shape)),
    "transpose": _transpose,
    "concat": lambda w, n: w.op("Concat", *w.of(n), axis=n.attrs["axis"]),
    "tile": lambda w, n: w.op("Tile", *w.of(n), w.integers(n.attrs["repeats"])),
    "instance_norm": lambda w, n: w.op("InstanceNormalization", *w.of(n), epsilon=_number(n, "eps")),
    "einsum": lambda w, n: w.op("Einsum", *w.of(n), equation=n.attrs["equation"]),
    "fmod": lambda w, n: w.op("Mod", *w.of(n), fmod=1),
}


def to_onnx(graph: Graph) -> ModelProto:
    """The ONNX model of a graph; raises `CannotWrite` where ONNX has no such node.

    >>> g = Graph("half")
    >>> g.output("y", g.input("x", ("n", 3), "f32") * 0.5)
    >>> [n.op_type for n in to_onnx(g).graph.node]
    ['Mul', 'Identity']
    """
    w = Writer(expand_graph(graph, lambda op: op.name in TABLE))
    for node in w.graph.inputs:
        w.names[node.id] = node.attrs["name"]
    _write(w, skip={n.id for n in w.graph.inputs})
    outputs = {}
    for name, node in w.graph.outputs.items():
        w.op("Identity", w.names[node.id], outputs=[name])
        outputs[name] = (node.dtype.np, [d if isinstance(d, int) else str(d) for d in node.shape])
    inputs = {}
    for node in w.graph.inputs:
        shape = [d if isinstance(d, int) else str(d) for d in node.shape]
        inputs[node.attrs["name"]] = (node.dtype.np, shape)
    return w.model(graph.name, inputs, outputs, OPSET)


def _write(w: Writer, skip: set[int]) -> None:
    live = w.graph.live()
    for node in w.graph.nodes:
        if node.id in skip or node.id not in live:
            continue
        role = node.op.role
        if role is Role.CONSTANT:
            w.names[node.id] = w.constant(node.attrs["value"].array, node.dtype.np)
        elif role is Role.PARAM:
            name = node.attrs["name"]
            w.names[node.id] = w.weight(name, np.asarray(w.graph.param_values[name]))
        elif role is Role.RESULT and node.operands[0].op.name in ("cond", "tuple"):
            w.names[node.id] = _result(w, node)
        elif role is Role.COMPUTE and node.op.name in TABLE:
            w.names[node.id] = TABLE[node.op.name](w, node)
        elif node.op.name != "tuple":
            raise CannotWrite(node.op.name)


def _result(w: Writer, node: Node) -> str:
    of, index = node.operands[0], node.attrs["index"]
    return w.names[of.operands[index].id] if of.op.name == "tuple" else f"if_{of.id}_{index}"
