"""Products as OpenCL C: a work item computes a tile of rows and columns in vector registers.

Every element is one ascending chain of multiply-adds over the summed axes, whatever the tile. Rows and
columns of a tile beyond the end read the last one that exists and are not stored, so that loops need no
second version for edges; only columns that are adjacent in memory have one: they are read as a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.opencl.ctext import literal, memory_type, variable_type, wide_type
from rlx.codegen.opencl.kernel_text import KernelText, Slot, product
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, ceildiv
from rlx.kernel.affine import affine
from rlx.kernel.nests import ContractNest
from rlx.kernel.scalar import Scalar, load_index

ROWS, COLUMNS = 4, 8


def print_product(
    nest: ContractNest, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> tuple[KernelText, str]:
    """The text of a contraction and its kind."""
    if nest.rhs_layout is not None:
        raise UnsupportedError("packed weights have no OpenCL kernel")
    form = nest.form
    left = len(form.lhs) - len(form.contract)  # batch axes and those of the left operand
    down = _last(nest, range(len(form.batch), left))
    across = _last(nest, range(left, nest.kept))
    if across is None or not form.accumulate.is_float:
        return _plain(nest, inputs, outputs), "contract"
    return _Tiled(nest, inputs, outputs, down, across).write(), "contract"


def _last(nest: ContractNest, axes: range) -> int | None:
    """The last of some axes that is worth a tile along it."""
    return next((a for a in reversed(axes) if nest.space[a] not in (1, 2)), None)


def _plain(nest: ContractNest, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> KernelText:
    """One element per work item: integers, and products with a vector."""
    kept, summed = nest.space[: nest.kept], nest.space[nest.kept :]
    text = KernelText(inputs, outputs, product(kept))
    text.point_of_item(kept)
    dtype = nest.form.accumulate
    text.line(f"{variable_type(dtype)} sum = {literal(0, dtype)};")
    with text.block(f"for (long element = 0; element < {text.dim(product(summed))}; ++element)"):
        text.unflatten("element", summed, nest.kept)
        a, b = (text.cast(text.value(x), x.dtype, dtype) for x in (nest.lhs, nest.rhs))
        if dtype.is_float:
            text.line(f"sum = fma({a}, {b}, sum);")
        else:
            wide = wide_type(dtype)
            text.line(f"sum = ({variable_type(dtype)})(({wide})sum + ({wide}){a} * ({wide}){b});")
    text.axes = text.axes[: nest.kept]
    _epilogue(text, nest, "sum")
    return text


def _epilogue(text: KernelText, nest: ContractNest, total: str) -> None:
    form = nest.form
    text.accs.append(
        text.variable(variable_type(form.dtype), text.as_variable(total, form.accumulate, form.dtype))
    )
    text.stores(list(enumerate(nest.stores)))


class _Tiled:
    """A tile of ROWS x COLUMNS elements per work item, along the axes `down` and `across`."""

    def __init__(
        self,
        nest: ContractNest,
        inputs: Sequence[Slot],
        outputs: Sequence[Slot],
        down: int | None,
        across: int,
    ) -> None:
        self.nest, self.inputs, self.down, self.across = nest, inputs, down, across
        self.rows = 1 if down is None else ROWS
        tiles: list[Dim] = list(nest.space[: nest.kept])
        tiles[across] = ceildiv(tiles[across], COLUMNS)
        if down is not None:
            tiles[down] = ceildiv(tiles[down], ROWS)
        self.tiles = tuple(tiles)
        self.text = KernelText(inputs, outputs, product(self.tiles))
        self.type = variable_type(nest.form.accumulate)
        self.vector = f"{self.type}{COLUMNS}"

    def write(self) -> KernelText:
        text, nest = self.text, self.nest
        text.point_of_item(self.tiles)
        self.width, across = text.dim(nest.space[self.across]), text.axes[self.across]
        text.line(f"const long column = {across} * {COLUMNS};")
        if self.down is not None:
            text.line(f"const long row = {text.axes[self.down]} * {self.rows};")
            self.height = text.dim(nest.space[self.down])
        for r in range(self.rows):
            if self.down is not None:
                text.line(f"const long row{r} = min(row + {r}, (long){self.height} - 1);")
            text.line(f"{self.vector} sum{r} = 0;")
        if self._side_by_side():
            with text.block(f"if (column + {COLUMNS} <= {self.width})"):
                self._loop(as_vector=True)
            with text.block("else"):
                self._loop(as_vector=False)
        else:
            self._loop(as_vector=False)
        self._store()
        return text

    def _side_by_side(self) -> bool:
        """Whether the columns of the right operand are adjacent, in the type that is summed."""
        dtype, _, strides = self.inputs[self.nest.rhs.data]
        steps: Dim = 0
        for index, stride in zip(load_index(self.nest.rhs), strides, strict=True):
            parts = affine(index, len(self.nest.space))
            if parts is None:
                return False
            step = parts[0][self.across]
            if not isinstance(step, int):
                return False
            steps = steps + step * stride
        return steps == 1 and memory_type(dtype) == self.type and not dtype.is_bool

    def _loop(self, as_vector: bool) -> None:
        text, nest = self.text, self.nest
        summed = nest.space[nest.kept :]
        if not as_vector:
            for c in range(COLUMNS):
                text.line(f"const long column{c} = min(column + {c}, (long){self.width} - 1);")
        with text.block(f"for (long element = 0; element < {text.dim(product(summed))}; ++element)"):
            text.unflatten("element", summed, nest.kept)
            if as_vector:
                with text.elsewhere({self.across: "column"}):
                    place = text.place(nest.rhs)
                right = text.variable(self.vector, f"vload{COLUMNS}(0, &{place})")
            else:
                parts = [self._operand(nest.rhs, self.across, f"column{c}") for c in range(COLUMNS)]
                right = text.variable(self.vector, f"({self.vector})({', '.join(parts)})")
            for r in range(self.rows):
                left = self._operand(nest.lhs, self.down, f"row{r}")
                text.line(f"sum{r} = fma(({self.vector})({left}), {right}, sum{r});")
        text.axes = text.axes[: nest.kept]

    def _operand(self, operand: Scalar, axis: int | None, index: str) -> str:
        with self.text.elsewhere({} if axis is None else {axis: index}):
            return self.text.cast(self.text.value(operand), operand.dtype, self.nest.form.accumulate)

    def _store(self) -> None:
        """Elements one by one: what follows a matmul may be long."""
        text, count = self.text, self.rows * COLUMNS
        text.line(f"{self.type} sums[{count}];")
        for r in range(self.rows):
            text.line(f"vstore{COLUMNS}(sum{r}, {r}, sums);")
        text.line("#pragma unroll 1")
        with text.block(f"for (int place = 0; place < {count}; ++place)"):
            text.line(f"const long across = column + place % {COLUMNS};")
            text.line(f"if (across >= {self.width}) continue;")
            places = {self.across: "across"}
            if self.down is not None:
                text.line(f"const long down = row + place / {COLUMNS};")
                text.line(f"if (down >= {self.height}) continue;")
                places[self.down] = "down"
            with text.elsewhere(places):
                _epilogue(text, self.nest, "sums[place]")
