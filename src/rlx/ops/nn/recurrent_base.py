"""What recurrent layers share: activations, type rule, meaning, expansion. The cells are in `recurrent`.

x is [steps, batch, inputs]; weights have a leading axis of directions. The matmuls with x are one
contraction for all steps and directions; a scan per direction does the rest. A cell is written once, on
arrays and on nodes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.errors import OpAttributeError, ShapeError, TypeMismatchError
from rlx.ir.assume import require_shape
from rlx.ir.attr import Attr, AttrValue, one_of, optional, real, reals, strings
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.graph import Node
from rlx.ir.op import Arg, Level, MultiOp, Sample
from rlx.ir.operand import Tensor
from rlx.ir.types import Shape, TensorType, TupleType
from rlx.ops.array.create import iota, zeros
from rlx.ops.array.shape import concat, reshape, slice_axis
from rlx.ops.control.scan import scan
from rlx.ops.math.contract import dot_general
from rlx.ops.math.elementwise import cast, less, maximum, minimum, where
from rlx.ops.rules import (
    expand_in_f32,
    in_f32,
    is_integer,
    is_real_float,
    need_dtype,
    op_call,
    same_dtype,
)
from rlx.records import dataclass

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
EXTRAS = ("bias", "lens", "initial_h", "initial_c", "peephole")


# -- activations


@dataclass(frozen=True)
class Activation:
    """One of ONNX's activations: its meaning on arrays, on nodes, and defaults of the numbers it takes."""

    ref: Callable[..., object]
    node: Callable[..., object]
    defaults: tuple[float, ...] = ()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + small), small / (1 + small)))


ACTIVATIONS: Mapping[str, Activation] = {
    "sigmoid": Activation(_sigmoid, lambda x: op_call("sigmoid", x)),
    "tanh": Activation(np.tanh, lambda x: op_call("tanh", x)),
    "relu": Activation(lambda x: np.maximum(x, 0), lambda x: op_call("relu", x)),
    "affine": Activation(lambda x, a, b: a * x + b, lambda x, a, b: x * a + b, (1.0, 0.0)),
    "leakyrelu": Activation(
        lambda x, a: np.where(x >= 0, x, a * x), lambda x, a: op_call("leaky_relu", x, alpha=a), (0.01,)
    ),
    "thresholdedrelu": Activation(
        lambda x, a: np.where(x > a, x, 0), lambda x, a: op_call("thresholded_relu", x, alpha=a), (1.0,)
    ),
    "scaledtanh": Activation(
        lambda x, a, b: a * np.tanh(b * x), lambda x, a, b: op_call("tanh", x * b) * a, (1.0, 1.0)
    ),
    "hardsigmoid": Activation(
        lambda x, a, b: np.clip(a * x + b, 0, 1),
        lambda x, a, b: op_call("hard_sigmoid", x, alpha=a, beta=b),
        (0.2, 0.5),
    ),
    "elu": Activation(
        lambda x, a: np.where(x >= 0, x, a * np.expm1(x)), lambda x, a: op_call("elu", x, alpha=a), (1.0,)
    ),
    "softsign": Activation(lambda x: x / (1 + np.abs(x)), lambda x: op_call("softsign", x)),
    "softplus": Activation(lambda x: np.logaddexp(0, x), lambda x: op_call("softplus", x)),
}


class Arithmetic:
    """The few functions in which a cell is written, on arrays or on nodes."""

    def __init__(self, attrs: Mapping[str, AttrValue], direction: int, on_nodes: bool) -> None:
        per = len(attrs["activations"]) // len(DIRECTIONS[attrs["direction"]])
        first = direction * per
        self.on_nodes, self.limit = on_nodes, attrs["clip"]
        self.chosen = [
            (attrs["activations"][i], attrs["alpha"][i], attrs["beta"][i]) for i in range(first, first + per)
        ]

    def activate(self, number: int, x: Tensor) -> Tensor:
        """Activation f, g or h (0, 1, 2)."""
        name, *numbers = self.chosen[number]
        found = ACTIVATIONS[name]
        used = numbers[: len(found.defaults)]
        return found.node(x, *used) if self.on_nodes else found.ref(x, *used)

    def gate(self, number: int, x: Tensor) -> Tensor:
        """A gate: its clipped sum, activated."""
        if self.limit is None:
            clipped = x
        elif self.on_nodes:
            clipped = maximum(minimum(x, self.limit), -self.limit)
        else:
            clipped = np.clip(x, -self.limit, self.limit)
        return self.activate(number, clipped)

    def product(self, h: Tensor, r: Tensor) -> Tensor:
        """h [..., k] with rows of r [gates, k]."""
        return dot_general(h, r, ((len(h.shape) - 1,), (1,))) if self.on_nodes else h @ r.T

    def gates(self, x: Tensor, count: int) -> list[Tensor]:
        """Equal parts of the last axis."""
        size = x.shape[-1] // count
        return [
            slice_axis(x, -1, i * size, size) if self.on_nodes else x[..., i * size : (i + 1) * size]
            for i in range(count)
        ]

    def rows(self, r: Tensor, start: Dim, size: Dim) -> Tensor:
        return slice_axis(r, 0, start, size) if self.on_nodes else r[start : start + size]


# -- what all cells share


class Recurrent(MultiOp):
    """Base of the layers: one subclass gives the number of gates and the step of a cell."""

    level = Level.HIR
    heavy = True
    gates: int
    states: int = 1  # h, or h and c
    defaults: tuple[str, ...]  # activations of one direction
    further: tuple[str, ...] = EXTRAS[:3]  # operands after x, w and r, in this order
    arithmetic: type[Arithmetic] = Arithmetic
    attrs = {
        "extras": Attr(strings, ()),
        "direction": Attr(one_of(*DIRECTIONS), "forward"),
        "activations": Attr(strings),
        "alpha": Attr(reals),
        "beta": Attr(reals),
        "clip": Attr(optional(real), None),
    }

    def split_bias(self, wb: Tensor, rb: Tensor, *, on_nodes: bool, **attrs: object) -> tuple[Tensor, Tensor]:
        """Bias of the product with x, bias inside the step (None if there is none)."""
        return wb + rb, None

    def cell(
        self,
        do: Arithmetic,
        x: Tensor,
        state: Sequence[Tensor],
        r: Tensor,
        inner: Tensor,
        peephole: Tensor,
        **attrs: object,
    ) -> list[Tensor]:
        """New state from x [batch, gates * hidden] (product and bias included) and the old state."""
        raise NotImplementedError

    def infer(
        self,
        x: TensorType,
        w: TensorType,
        r: TensorType,
        *more: TensorType,
        extras: Sequence[str],
        **attrs: AttrValue,
    ) -> TupleType:
        if list(extras) != [e for e in self.further if e in extras] or len(extras) != len(more):
            raise TypeMismatchError(
                f"{self.name}: further operands {extras} must be some of {self.further}, in this order"
            )
        given = dict(zip(extras, more, strict=True))
        d = self.number_type({"x": x, "w": w, "r": r, **given})
        if x.rank != 3 or w.rank != 3 or r.rank != 3:
            raise ShapeError(f"{self.name}: x {x}, w {w} and r {r} must all have three axes")
        steps, batch, _ = x.shape
        hidden, sides = r.shape[2], len(DIRECTIONS[attrs["direction"]])
        shapes = self.shapes(sides, x.shape, hidden)
        for name, t in {"w": w, "r": r, **given}.items():
            shape = shapes[name]
            text = ",".join(map(str, shape))
            require_shape(
                t.shape, shape, f"{self.name}: {name} is {t}, but [{text}] is what x {x} and r {r} need"
            )
        if "lens" in given:
            need_dtype(self.name, given["lens"], is_integer)
        self.check_activations(sides, **attrs)
        last = TensorType(d, (sides, batch, hidden))
        return TupleType((TensorType(d, (steps, sides, batch, hidden)), *(last,) * self.states))

    def number_type(self, given: Mapping[str, TensorType]) -> DType:
        """The one dtype of all operands that are real numbers."""
        floats = [t for name, t in given.items() if name != "lens"]
        for t in floats:
            need_dtype(self.name, t, is_real_float)
        return same_dtype(self.name, floats)

    def matrix(self, name: str, given: Mapping[str, Tensor], part: Callable[[Tensor], Tensor]) -> Tensor:
        """What the arithmetic multiplies by: w or r, of which `part` takes one direction or all as one."""
        return part(given[name])

    def shapes(self, sides: int, x: Shape, hidden: Dim) -> dict[str, Shape]:
        """Shapes of all operands but x."""
        _, batch, inputs = x
        width = self.gates * hidden
        return {
            "w": (sides, width, inputs),
            "r": (sides, width, hidden),
            "bias": (sides, 2 * width),
            "lens": (batch,),
            "initial_h": (sides, batch, hidden),
            "initial_c": (sides, batch, hidden),
            "peephole": (sides, 3 * hidden),
        }

    def check_activations(
        self, sides: int, *, activations: Any, alpha: Any, beta: Any, clip: Any, **rest: object
    ) -> None:
        per = len(self.defaults)
        unknown = [a for a in activations if a not in ACTIVATIONS]
        if unknown:
            raise OpAttributeError(
                f"{self.name}: unknown activation {unknown[0]!r}; use one of {', '.join(ACTIVATIONS)}"
            )
        if not len(activations) == len(alpha) == len(beta) == sides * per:
            raise OpAttributeError(
                f"{self.name}: {len(activations)} activations; it takes {per} for each of {sides} directions"
            )
        if clip is not None and clip <= 0:
            raise OpAttributeError(f"{self.name}: clip is {clip}; it must be above 0")

    def ref(self, *arrays: np.ndarray, **attrs: object) -> Tensor:
        return in_f32(self.meaning)(*arrays, **attrs)

    def expand(self, *operands: Node, **attrs: object) -> Tensor:
        return expand_in_f32(self.expansion)(*operands, **attrs)

    def meaning(
        self, x: np.ndarray, w: np.ndarray, r: np.ndarray, *more: np.ndarray, **attrs: AttrValue
    ) -> Any:
        given = {"w": w, "r": r, **dict(zip(attrs["extras"], more, strict=True))}
        steps, batch, _ = x.shape
        hidden = r.shape[2]
        lens = given.get("lens", np.full(batch, steps))
        outs, ends = [], []
        for side, backward in enumerate(DIRECTIONS[attrs["direction"]]):
            do = self.arithmetic(attrs, side, on_nodes=False)
            bias = given.get("bias", np.zeros((side + 1, 2 * self.gates * hidden), x.dtype))[side]
            outer, inner = self.split_bias(*np.split(bias, 2), on_nodes=False, **attrs)
            state = [
                np.array(given[name][side]) if name in given else np.zeros((batch, hidden), x.dtype)
                for name in ("initial_h", "initial_c")[: self.states]
            ]
            peephole = given["peephole"][side] if "peephole" in given else None
            y = np.zeros((steps, batch, hidden), x.dtype)
            own = operator.itemgetter(side)
            products = do.product(x, self.matrix("w", given, own)) + outer
            weights = self.matrix("r", given, own)
            for t in reversed(range(steps)) if backward else range(steps):
                valid = (t < lens)[:, None]
                new = self.cell(do, products[t], state, weights, inner, peephole, **attrs)
                state = [np.where(valid, a, b).astype(x.dtype) for a, b in zip(new, state, strict=True)]
                y[t] = np.where(valid, new[0], 0)
            outs.append(y)
            ends.append(state)
        return (np.stack(outs, 1), *(np.stack([e[i] for e in ends]) for i in range(self.states)))

    def expansion(self, x: Node, w: Node, r: Node, *more: Node, **attrs: AttrValue) -> Tensor:
        steps, batch, _ = x.shape
        sides, hidden = len(DIRECTIONS[attrs["direction"]]), r.shape[2]
        width = self.gates * hidden
        shapes = self.shapes(sides, x.shape, hidden)
        # Sizes that the type rule found equal, perhaps by assumption, are spelled alike from here on.
        named = {"w": w, "r": r, **dict(zip(attrs["extras"], more, strict=True))}
        given = {n: v if v.shape == shapes[n] else reshape(v, shapes[n]) for n, v in named.items()}
        given = {**given, **self.prepared(given)}

        def joined(weight: Node) -> Node:
            made: Node = reshape(weight, (sides * width, *weight.shape[2:]))
            return made

        every = self.arithmetic(attrs, 0, on_nodes=True)
        products = every.product(x, self.matrix("w", given, joined))
        valid = None
        if "lens" in given:
            at = less(iota((steps, batch), axis=0), cast(given["lens"], dtype="i64"))
            valid = reshape(at, (steps, batch, 1))
        outs, ends = [], []
        for side, backward in enumerate(DIRECTIONS[attrs["direction"]]):
            do = self.arithmetic(attrs, side, on_nodes=True)
            along = slice_axis(products, 2, side * width, width)
            inner = None
            if "bias" in given:
                outer, inner = self.split_bias(
                    *do.gates(_side(given["bias"], side), 2), on_nodes=True, **attrs
                )
                along = along + outer
            start = [
                _side(given[name], side) if name in given else zeros((batch, hidden), x.dtype)
                for name in ("initial_h", "initial_c")[: self.states]
            ]
            peephole = _side(given["peephole"], side) if "peephole" in given else None
            weights = self.matrix("r", given, functools.partial(_side, side=side))

            def step(
                state: list[Node],
                row: tuple[Node, Node | None],
                do: Arithmetic = do,
                weights: Tensor = weights,
                inner: Tensor = inner,
                peephole: Tensor = peephole,
            ) -> tuple[list[Node], Node]:
                now, active = row
                new = self.cell(do, now, state, weights, inner, peephole, **attrs)
                if active is None:
                    return new, new[0]
                kept = [where(active, a, b) for a, b in zip(new, state, strict=True)]
                return kept, where(active, new[0], 0.0)

            end, y = scan(step, start, (along, valid), reverse=backward)
            outs.append(reshape(y, (steps, 1, batch, hidden)))
            ends.append([reshape(e, (1, batch, hidden)) for e in end])
        return (concat(outs, 1), *(concat([e[i] for e in ends], 0) for i in range(self.states)))

    def prepared(self, given: Mapping[str, Node]) -> Mapping[str, Node | None]:
        """Operands that the expansion replaces before its loops begin."""
        return {}

    def one(
        self,
        *types: str | Arg,
        extras: Sequence[str] = (),
        lens: Sequence[int] | None = None,
        grad: bool = True,
        **attrs: AttrValue,
    ) -> Sample:
        """A sample: x, w, r and further operands by type; lens by value."""
        sides = len(DIRECTIONS[attrs.get("direction", "forward")])
        attrs = self.normal(sides, attrs)
        args: list[Arg | np.ndarray] = [Arg(t, -1, 1) if isinstance(t, str) else t for t in types]
        if lens is not None:
            args.insert(3 + extras.index("lens"), np.array(lens, np.int32))
        return Sample(tuple(args), {"extras": tuple(extras), **attrs}, grad=grad)

    def normal(self, sides: int, attrs: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
        """Attributes in canonical form: one activation with two numbers per place.

        As in ONNX, `alpha` and `beta` list numbers only for those activations that take them.
        """
        out = dict(attrs)
        names = out.get("activations") or self.defaults * sides
        names = [str(n).lower().replace("_", "") for n in names]
        given = {key: list(out.get(key) or ()) for key in ("alpha", "beta")}
        filled: dict[str, list[float]] = {"alpha": [], "beta": []}
        for name in names:
            defaults = ACTIVATIONS[name].defaults if name in ACTIVATIONS else ()
            for i, key in enumerate(("alpha", "beta")):
                value = 0.0
                if len(defaults) > i:
                    value = given[key].pop(0) if given[key] else defaults[i]
                filled[key].append(float(value))
        return {**out, "activations": tuple(names), **{k: tuple(v) for k, v in filled.items()}}


def _side(x: Node, side: int) -> Node:
    made: Node = reshape(slice_axis(x, 0, side, 1), x.shape[1:])
    return made
