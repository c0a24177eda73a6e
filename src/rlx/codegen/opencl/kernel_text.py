"""The text of one kernel while it is written: arguments, variables, loops, helper functions.

No size, stride or offset is part of the text: they are arguments, so that one text serves every shape. Only
0, 1 and -1 stay, because they are how an access is made, not how large it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rlx.codegen.opencl import primitives
from rlx.codegen.opencl.ctext import (
    HELPERS,
    cast,
    from_memory,
    literal,
    memory_type,
    to_memory,
    variable_type,
)
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, I64, DType
from rlx.ir.types import Shape
from rlx.kernel.nests import Store
from rlx.kernel.scalar import LOADS, Scalar, load_index

ERROR_INDEX = 1  # what a kernel reports when an index from data is out of range
Slot = tuple[DType, Shape, Shape]  # dtype, shape and strides of an operand, in elements


class KernelText:
    """Statements and arguments of one kernel."""

    def __init__(self, inputs: Sequence[Slot], outputs: Sequence[Slot], total: Dim) -> None:
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.dims: dict[Dim, str] = {}
        self.helpers: dict[str, str] = {}
        self.checks = False
        self.lines: list[str] = []
        self._indent = 1
        self._variables = 0
        self._known: list[dict[Scalar, str]] = [{}]
        self.accs: list[str] = []
        self.axes: list[str] = []
        self.total = "total"
        self.total_dim = total

    # -- arguments

    def dim(self, d: Dim) -> str:
        """A size as an argument of the kernel."""
        if isinstance(d, int) and d in (-1, 0, 1):
            return str(d) if d >= 0 else "(-1)"
        if d == self.total_dim:
            return self.total
        return self.dims.setdefault(d, f"d{len(self.dims)}")

    def finish(self, name: str) -> str:
        """The text of the kernel."""
        arguments, casts = [], []
        slots = [
            *(("x", i, s) for i, s in enumerate(self.inputs)),
            *(("y", i, s) for i, s in enumerate(self.outputs)),
        ]
        for letter, number, (dtype, _, _) in slots:
            arguments += [f"__global uchar *{letter}{number}_memory", f"long {letter}{number}_at"]
            kind = f"__global {'const ' * (letter == 'x')}{memory_type(dtype)} *"
            place = f"({letter}{number}_memory + {letter}{number}_at)"
            casts.append(f"    {kind}{letter}{number} = ({kind}){place};")
        if self.checks:
            arguments += ["__global int *errors", "long node"]
        arguments += ["long total", *(f"long {d}" for d in self.dims.values())]
        head = f"__kernel void {name}({', '.join(arguments)}) {{"
        return "\n".join([head, *casts, *self.lines, "}"])

    # -- statements

    def line(self, text: str) -> None:
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A block of statements; what is computed inside is not known outside."""
        self.line(f"{head} {{")
        self._indent += 1
        self._known.append(dict(self._known[-1]))
        yield
        self._known.pop()
        self._indent -= 1
        self.line("}")

    def variable(self, type_: str, value: str) -> str:
        name = f"v{self._variables}"
        self._variables += 1
        self.line(f"const {type_} {name} = {value};")
        return name

    def unflatten(self, flat: str, space: Shape, first: int) -> None:
        """Axes `first`.. from a row-major number."""
        names = [f"i{first + k}" for k in range(len(space))]
        rest = flat
        for k in range(len(space) - 1, 0, -1):
            extent = self.dim(space[k])
            self.line(f"const long {names[k]} = {rest} % {extent};")
            above = f"{rest} / {extent}"
            rest = self.variable("long", above) if k > 1 else above
        if names:
            self.line(f"const long {names[0]} = {rest};")
        self.axes = [*self.axes[:first], *names]

    # -- expressions

    def value(self, e: Scalar) -> str:
        """The C expression (a variable, an argument or a literal) that holds a value at this point."""
        known = self._known[-1]
        for part in e.walk():
            if part not in known:
                known[part] = self._write(part, [known[a] for a in part.args])
        return known[e]

    def _write(self, e: Scalar, args: list[str]) -> str:
        if e.prim == "const":
            return self.dim(e.data) if e.dtype is I64 else literal(e.data, e.dtype)
        if e.prim == "axis":
            return self.axes[e.data]
        if e.prim == "size":
            return self.dim(e.data)
        if e.prim == "acc":
            return self.accs[e.data or 0]
        if e.prim == "at":
            return self._read(e, args[0])
        if e.prim in LOADS:
            return self._load(e, args)
        if e.prim in ("cast", "rounded"):
            source = F32 if e.prim == "rounded" else e.args[0].dtype  # variables of halves are floats
            return self.variable(variable_type(e.dtype), self.cast(args[0], source, e.dtype))
        return self.variable(variable_type(e.dtype), self.primitive(e.prim, e.args[-1].dtype, args))

    def primitive(self, name: str, dtype: DType, args: list[str]) -> str:
        """A primitive as an expression; its helper function becomes part of the program."""
        text, helper = primitives.write(name, dtype, args)
        if helper is not None:
            self.helpers[helper[0]] = helper[1]
        return self._using(text)

    def cast(self, value: str, source: DType, to: DType) -> str:
        """A value cast from one dtype to another."""
        return self._using(cast(value, source, to))

    def as_variable(self, value: str, source: DType, to: DType) -> str:
        """A sum as a value of the dtype that it stands for; halves are variables of f32 already."""
        return value if variable_type(source) == variable_type(to) else self.cast(value, source, to)

    def _using(self, text: str) -> str:
        """An expression whose helper functions become part of the program."""
        self.helpers |= {name: body for name, body in HELPERS.items() if f"{name}(" in text}
        return text

    def _load(self, e: Scalar, args: list[str]) -> str:
        index, shape = args[len(e.args) - len(load_index(e)) :], self.inputs[e.data][1]
        offset = self._offset_of(e, index)
        if e.prim == "load":
            return self._read(e, offset)
        if e.prim == "load_or":
            return self._read(e, offset, guard=args[0], fill=args[1])
        inside = [f"{i} >= 0 && {i} < {self.dim(n)}" for i, n in zip(index, shape, strict=True)]
        if not inside:
            return self._read(e, offset)
        self.checks = True
        good = self.variable("bool", " && ".join(inside))
        self.line(f"if (!{good}) errors[node] = {ERROR_INDEX};")
        return self._read(e, offset, guard=good, fill=literal(0, e.dtype))

    def place(self, e: Scalar) -> str:
        """The element that a plain load reads, as an lvalue."""
        return f"x{e.data}[{self._offset_of(e, [self.value(i) for i in load_index(e)])}]"

    def _offset_of(self, e: Scalar, index: Sequence[str]) -> str:
        strides = self.inputs[e.data][2]
        if len(index) != len(strides):
            raise UnsupportedError("an operand in a special layout can only be read by matmuls")
        return self.offset(index, strides)

    def _read(self, e: Scalar, offset: str, guard: str | None = None, fill: str = "") -> str:
        got = self._using(from_memory(e.dtype, f"x{e.data}[{offset}]"))
        return self.variable(variable_type(e.dtype), got if guard is None else f"{guard} ? {got} : {fill}")

    def offset(self, index: Sequence[str], strides: Shape) -> str:
        """Element offset of an index."""
        terms = []
        for i, stride in zip(index, strides, strict=True):
            step = self.dim(stride)
            if step != "0" and i != "0":
                terms.append(i if step == "1" else f"{i} * {step}")
        return " + ".join(terms) or "0"

    def point_of_item(self, space: Shape) -> None:
        """The axes of a space from the number of the work item; items beyond the last point do nothing."""
        self.line("const long item = get_global_id(0);")
        self.line("if (item >= total) return;")
        self.unflatten("item", space, 0)

    @contextmanager
    def elsewhere(self, places: Mapping[int, str]) -> Iterator[None]:
        """Expressions inside are at other indices along some axes."""
        before = self.axes
        self.axes = [places.get(i, name) for i, name in enumerate(before)]
        stays = {
            e: text
            for e, text in self._known[-1].items()
            if not any(x.prim == "axis" and x.data in places for x in e.walk())
        }
        self._known.append(stays)
        yield
        self._known.pop()
        self.axes = before

    def stores(self, stores: Sequence[tuple[int, Store]]) -> None:
        """Write outputs, by number. All values come first: a result may take the place of an operand."""
        values = [self.value(store.body) for _, store in stores]
        for value, (number, store) in zip(values, stores, strict=True):
            self.store(number, self.axes[: len(store.strides)], store.strides, value, self.outputs[number][0])

    def store(self, number: int, index: Sequence[str], strides: Shape, value: str, dtype: DType) -> None:
        """Write one element of an output."""
        stored = self._using(to_memory(dtype, value))
        self.line(f"y{number}[{self.offset(index, strides)}] = {stored};")


def product(space: Shape) -> Dim:
    """Number of points of a space."""
    total: Dim = 1
    for d in space:
        total = total * d
    return total
