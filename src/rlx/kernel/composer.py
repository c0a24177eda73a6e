"""Composes the kernel of a region: index expressions are substituted into each other.

`rlx.kernel.compose` chooses the composer. What a kernel is, is said in `rlx.kernel.nests`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.types import Shape
from rlx.kernel import legality
from rlx.kernel.affine import affine
from rlx.kernel.form import (
    CodedContract,
    Contract,
    Conv,
    Form,
    Map,
    Pieces,
    Reduce,
    Template,
    dense_strides,
)
from rlx.kernel.legality import same_space
from rlx.kernel.lowering import (
    guard_loads,
    lower_node,
    pieces_body,
    stated_layouts,
    storage_of_codes,
    stored_operand,
)
from rlx.kernel.nests import (
    ComposeError,
    Computed,
    ContractNest,
    ConvNest,
    Kernel,
    Nest,
    Opaque,
    Stat,
    Store,
)
from rlx.kernel.order import adds_by_columns, stored_through
from rlx.kernel.panels import stored_blocks
from rlx.kernel.scalar import (
    LOADS,
    Scalar,
    as_stored,
    axes,
    axis,
    const,
    load,
    rebuild,
    replace_axes,
    select,
)


def allow(why_not: str | None, node: Node) -> None:
    """Refuse what a rule of `rlx.kernel.legality` refuses."""
    if why_not is not None:
        raise ComposeError(why_not, node.where)


class Composer:
    """Composes one body: `values` holds each node as an expression over its own axes."""

    def __init__(self, body: Graph) -> None:
        self.body = body
        self.values: dict[int, Scalar] = {}
        self.inputs: dict[int, int] = {}
        self.stats: list[Stat] = []
        self.sums: list[tuple[int, bool]] = []  # bits, and whether they add by columns
        self.rows: tuple[Shape, tuple[int, ...]] | None = None
        self.contract: tuple[Contract | Conv, Node] | None = None
        self.coded: CodedContract | None = None

    def run(self) -> Kernel:
        computed = [n for n in self.body.nodes if n.op.role is not Role.INPUT]
        for i, node in enumerate(self.body.inputs):
            self.inputs[node.id] = i
            self.values[node.id] = load(i, axes(node.rank), node.dtype)
        live = self.body.live()
        for node in computed:
            if node.id not in live:
                continue
            if node.op.role is Role.CONSTANT:
                self.values[node.id] = self._constant(node)
                continue
            if node.op.role is Role.RESULT:
                self._part(node)
                continue
            if node.op.role is not Role.COMPUTE:
                raise ComposeError(f"{node.op.name} has no kernel form", node.where)
            if self._in_layout(node):
                continue
            form = lower_node(node)
            if node.reader_side and (node.op.decodes or isinstance(form, Template)):
                # What reads it knows where its elements are.
                self.values[node.id] = load(self._storage(node), axes(node.rank), node.dtype)
            elif isinstance(form, (Map, Pieces)):
                body = form.body if isinstance(form, Map) else pieces_body(form)
                self.values[node.id] = self._substitute(body, node)
            elif isinstance(form, Reduce):
                self._reduce(node, form)
            elif isinstance(form, (Contract, Conv)) or self._takes(form) or self._reads_codes(node, form):
                self._root(node, form)
            elif len([n for n in computed if n.id in live and n.op.role is Role.COMPUTE]) == 1:
                return Opaque(form, node)
            else:
                raise ComposeError(legality.standing_alone(node.op.name), node.where)
        return self._finish()

    @property
    def root_kind(self) -> str:
        """What the kernel is built around so far."""
        if self.contract is not None:
            return "conv" if isinstance(self.contract[0], Conv) else "contract"
        return "map" if self.rows is None else "reduce"

    def _takes(self, form: Form) -> bool:
        """Whether a form other than a contraction or convolution may be the root here."""
        return False

    def _part(self, node: Node) -> None:
        """One of several results of an op."""
        raise ComposeError(legality.standing_alone(node.operands[0].op.name), node.where)

    def _in_layout(self, node: Node) -> bool:
        """A convolution stores its result in blocked channels by itself: that value has no index."""
        if self.contract is None or not isinstance(self.contract[0], Conv):
            return False
        if any(stored_blocks(o) is not None and o.id not in self.inputs for o in node.operands):
            raise ComposeError(
                f"{node.op.name} reads what a kernel stores in a layout of its own", node.where
            )
        return stored_blocks(node) is not None

    def _constant(self, node: Node) -> Scalar:
        array = node.attrs["value"].array
        if array.size != 1:
            raise ComposeError(
                "a constant of more than one element is an operand, not part of a body", node.where
            )
        return const(array.reshape(()).item(), node.dtype)

    def _substitute(self, body: Scalar, node: Node) -> Scalar:
        """Replace loads of operands by the operands' own expressions at that index."""

        def change(e: Scalar, args: tuple[Scalar, ...]) -> Scalar | None:
            if e.prim not in LOADS:
                return None
            operand = node.operands[e.data]
            source = self.values[operand.id]
            if e.prim == "load":
                return replace_axes(as_stored(source), args)
            if self._is_in_place(source, operand) and (
                e.prim == "load_or" or self._is_whole(source, operand)
            ):
                return Scalar(e.prim, args, e.dtype, source.data)  # load_or brings its own bounds
            if e.prim == "load_or":
                guard, fill, *index = args
                at = replace_axes(as_stored(source), index)
                found = {x.prim for x in at.walk()}
                allow(legality.reading_computed(node.op.name, "guarded", "load_checked" in found), node)
                if "acc" in found:
                    allow(legality.reading_root(node.op.name, "guarded"), node)
                return select(guard, guard_loads(at, guard), fill)
            allow(legality.reading_computed(node.op.name, "checked", False), node)
            raise AssertionError("indices from data need an operand in memory")

        return rebuild(body, change)

    def _reduce(self, node: Node, form: Reduce) -> None:
        allow(legality.joining(self.root_kind, "reduce"), node)
        body = self._substitute(form.body, node)
        if self.rows is None:
            self.rows = (form.space, form.axes)
        allow(legality.sharing_rows(*self.rows, form.space, form.axes), node)
        kept = [i for i in range(len(form.space)) if i not in form.axes]
        self._check_rows(body, axes(len(form.space)), kept, node)
        number = len(self.stats)
        out = node.tensor
        stat = Stat(form.combine, body, form.dtype if form.finish is None else body.dtype, form.last)
        if stat.rounds:
            own = body.dtype.bits, adds_by_columns(form, [o.shape for o in node.operands])
            allow(legality.sharing_lanes(*own, self.sums), node)
            self.sums.append(own)
        self.stats.append(stat)
        at = axes(out.rank)
        if out.rank == len(form.space):  # keepdims
            index = tuple(at[i] for i in kept)
        else:
            index = at
        value = Scalar("acc", index, stat.dtype, number)
        if form.finish is not None:
            point = tuple(at[i] for i in kept) if out.rank == len(form.space) else at
            done = replace_axes(form.finish, point)
            value = rebuild(
                done, lambda e, _: Scalar("acc", index, e.dtype, number) if e.prim == "acc" else None
            )
        self.values[node.id] = value

    def _check_rows(self, body: Scalar, at: Sequence[Scalar], kept: Sequence[int], node: Node) -> None:
        """Statistics may be read only at their own row."""
        if not self._reads_own_row(body, at, kept):
            raise ComposeError(legality.OTHER_ROW, node.where)

    def _reads_own_row(self, body: Scalar, at: Sequence[Scalar], kept: Sequence[int]) -> bool:
        assert self.rows is not None
        return all(
            arg == at[i] or (self.rows[0][i] == 1 and arg == const(0))
            for e in body.walk()
            if e.prim == "acc"
            for arg, i in zip(e.args, kept, strict=True)
        )

    def _root(self, node: Node, form: Form) -> None:
        if isinstance(form, CodedContract):
            self.coded, form = form, form.contract
        assert isinstance(form, (Contract, Conv))
        allow(legality.joining(self.root_kind, "conv" if isinstance(form, Conv) else "contract"), node)
        self.contract = (form, node)
        self.values[node.id] = Scalar("acc", axes(node.rank), form.dtype, 0)

    # -- the end: outputs must fit the nest

    def _finish(self) -> Kernel:
        outputs = list(self.body.outputs.values())
        if self.contract is not None:
            return self._finish_contract(outputs)
        if self.rows is None:
            space = outputs[0].shape
            for node in outputs:
                if not same_space(node.shape, space):
                    raise ComposeError("outputs of one map have different shapes", node.where)
            steps = dense_strides(space)
            return Nest(space, len(space), (), tuple(Store(self.values[n.id], True, steps) for n in outputs))
        full, reduced = self.rows
        kept = [i for i in range(len(full)) if i not in reduced]
        order = [*kept, *reduced]
        place = [axis(order.index(i)) for i in range(len(full))]  # original axis -> canonical axis

        def canonical(s: Scalar) -> Scalar:
            return strip_rows(replace_axes(s, place))

        stats = tuple(Stat(s.combine, canonical(s.body), s.dtype, s.last) for s in self.stats)
        stores = []
        outer = tuple(full[i] for i in kept)
        wide = any(full[i] != 1 for i in reduced)
        for node in outputs:
            source, steps = self._stored_as(
                node, full, lambda v: self._reads_own_row(v, axes(len(full)), kept)
            )
            if (wide or source is not node) and same_space(source.shape, full):
                self._check_rows(self.values[source.id], axes(len(full)), kept, node)
                body = canonical(self.values[source.id])
                stores.append(Store(body, True, tuple(steps[i] for i in order)))
                continue
            value = self._row_store(self.values[node.id], node, full, kept, outer)
            stores.append(Store(value, False, dense_strides(outer)))
        columns = self.sums[0][1] if self.sums else None
        return Nest(tuple(full[i] for i in order), len(kept), stats, tuple(stores), columns)

    def _stored_as(self, node: Node, space: Shape, fits: Callable[[Scalar], bool]) -> tuple[Node, Shape]:
        """The value that a store writes, and its strides: an output that only reorders a value is that value,
        stored in another order."""
        at = node
        while not (same_space(at.shape, space) and fits(self.values[at.id])):
            if at.op.role is not Role.COMPUTE or len(at.operands) != 1:
                return node, dense_strides(node.shape)
            at = at.operands[0]
        strides = stored_through(node, at)
        return (node, dense_strides(node.shape)) if strides is None else (at, strides)

    def _row_store(self, value: Scalar, node: Node, full: Shape, kept: Sequence[int], outer: Shape) -> Scalar:
        if same_space(node.shape, outer):
            point: list[Scalar] = list(axes(len(outer)))
        elif node.rank == len(full) and same_space(tuple(node.shape[i] for i in kept), outer):
            point = [axis(list(kept).index(i)) if i in kept else const(0) for i in range(len(full))]
        else:
            raise ComposeError(
                f"{node.op.name} gives {node.type}, which is neither a row value nor a full one", node.where
            )
        at = replace_axes(value, point)
        for e in at.walk():
            if e.prim == "acc" and any(
                a != axis(i) and not (outer[i] == 1 and a == const(0)) for i, a in enumerate(e.args)
            ):
                raise ComposeError(legality.OTHER_ROW, node.where)
        return strip_rows(at)

    def _finish_contract(self, outputs: Sequence[Node]) -> Kernel:
        assert self.contract is not None
        form, root = self.contract
        at = axes(root.rank)

        def at_own_place(value: Scalar) -> bool:
            return all(e.args == at for e in value.walk() if e.prim == "acc")

        stores = []
        blocks = [stored_blocks(node) for node in outputs] if isinstance(form, Conv) else []
        out_blocked = len(set(blocks)) == 1 and None not in blocks
        for node in [node.operands[0] for node in outputs] if out_blocked else outputs:
            if node.id not in self.values:
                raise ComposeError("a kernel stores its results in one layout", node.where)
            source, steps = self._stored_as(node, root.shape, at_own_place)
            if not same_space(source.shape, root.shape):
                raise ComposeError(f"{node.op.name} changes the shape of a contraction's result", node.where)
            value = self.values[source.id]
            if not at_own_place(value):
                raise ComposeError(legality.OTHER_POINT, node.where)
            checks = any(e.prim == "load_checked" for e in value.walk())
            allow(legality.reporting("an epilogue", checks), node)
            stores.append(Store(strip_rows(value), True, steps))
        a, b = (self.values[o.id] for o in root.operands[:2])
        if isinstance(form, Conv):
            w, prologue = self._in_memory(root.operands[1]), self._computed_image(root)
            x = self._in_memory(root.operands[0]) if prologue is None else -1
            w_layout = self._layout_of(root.operands[1])
            packed = None if w_layout is None else (root.operands[1].op.name, w_layout)
            image = root.operands[0]
            x_layout = image.attrs.get("layout") if image.reader_side else None
            if x_layout is None and image.reader_side:
                raise ComposeError("a convolution reads its image in planes or in blocks", root.where)
            out_layout = blocks[0] if out_blocked else None
            return ConvNest(form, x, w, tuple(stores), x_layout, out_layout, packed, prologue)
        batch, contract = form.batch, form.contract
        left = [i for i in range(len(form.lhs)) if i not in [p for p, _ in (*batch, *contract)]]
        right = [j for j in range(len(form.rhs)) if j not in [q for _, q in (*batch, *contract)]]
        space: list[Dim] = [form.lhs[i] for i, _ in batch]
        space += [form.lhs[i] for i in left] + [form.rhs[j] for j in right]
        kept = len(space)
        # Both operands state a contracted size; a number says more than a symbol that is guarded to equal it.
        space += [form.rhs[j] if isinstance(form.rhs[j], int) else form.lhs[i] for i, j in contract]
        a_index: dict[int, int] = {i: n for n, (i, _) in enumerate(batch)}
        b_index: dict[int, int] = {j: n for n, (_, j) in enumerate(batch)}
        a_index |= {i: len(batch) + n for n, i in enumerate(left)}
        b_index |= {j: len(batch) + len(left) + n for n, j in enumerate(right)}
        a_index |= {i: kept + n for n, (i, _) in enumerate(contract)}
        b_index |= {j: kept + n for n, (_, j) in enumerate(contract)}
        lhs = replace_axes(a, [axis(a_index[i]) for i in range(len(form.lhs))])
        rhs = replace_axes(b, [axis(b_index[j]) for j in range(len(form.rhs))])
        if rhs.prim != "load":
            raise ComposeError("the right operand of a contraction is read from memory", root.where)
        layout = self._layout_of(root.operands[1])
        if self.coded is not None:
            layout = (*root.attrs.items(), ("layouts", stated_layouts(root.operands[1:])))
        read = [operand for operand in (lhs, rhs) if operand.prim == "load"]
        for operand in read[:-1] if layout else read:
            if any(affine(i, len(space)) is None for i in operand.args):
                raise ComposeError("an operand of a contraction lies in memory in no regular way", root.where)
        if lhs.prim != "load":
            _check_prologue(lhs, root)
        packed = None if layout is None else ((root if self.coded else root.operands[1]).op.name, layout)
        return ContractNest(form, lhs, rhs, tuple(space), kept, tuple(stores), packed)

    def _computed_image(self, root: Node) -> Computed | None:
        """What a convolution computes to read it, in blocks if its operand is said to lie so."""
        image = root.operands[0]
        blocked = image.reader_side
        if blocked:
            image = image.operands[0]
        value = self.values[image.id]
        if image.id in self.inputs or (value.prim == "load" and not blocked):
            return None
        if value.prim == "load":
            raise ComposeError("a convolution does not move images to blocks as it reads them", root.where)
        _check_prologue(value, root)
        return Computed(value, image.shape)

    def _in_memory(self, node: Node) -> int:
        """The body input that holds an operand, as it is or in a layout that its reader knows."""
        value = self.values[node.id]
        if self._layout_of(node) is not None:
            return self._storage(node)
        if not self._is_in_place(value, node) or not self._is_whole(value, node):
            raise ComposeError("a convolution reads its operands from memory", node.where)
        number: int = value.data
        return number

    def _is_in_place(self, value: Scalar, node: Node) -> bool:
        """Whether element i of a value is element i of an input; scores of attention are read like one."""
        return value.prim == "load" and value.args == axes(node.rank) and value.data < len(self.inputs)

    def _is_whole(self, value: Scalar, node: Node) -> bool:
        """Whether an input of the body that lies in place is all of it: of its first part, strides and bounds
        are others."""
        return same_space(self.body.inputs[value.data].shape, node.shape)

    def _layout_of(self, node: Node) -> tuple[tuple[str, object], ...] | None:
        """The panels that an operand lies in, if it is a packed weight: of all parts, if it is decoded."""
        if not node.reader_side or stored_operand(node).id not in self.inputs:
            return None
        if not node.op.decodes:
            return tuple(node.attrs.items())
        return (*node.attrs.items(), ("layouts", stated_layouts(node.operands)))

    def _reads_codes(self, node: Node, form: Form) -> bool:
        """Whether a node multiplies codes, which share a storage with their factors."""
        stored = storage_of_codes(node) if isinstance(form, CodedContract) else None
        return stored is not None and stored.id in self.inputs

    def _storage(self, node: Node) -> int:
        """The body input that an operand is read from, in a layout that its reader knows."""
        return self.inputs[stored_operand(node).id]


def _check_prologue(value: Scalar, root: Node) -> None:
    """Whether a kernel can compute an operand as it reads it, in any order and more than once."""
    loads = {e.prim for e in value.walk() if e.prim in LOADS}
    allow(legality.computing_operand(root.op.name, "contract", None, reads=bool(loads)), root)
    allow(legality.reporting("a prologue", "load_checked" in loads), root)


def strip_rows(s: Scalar) -> Scalar:
    """acc(j) without its (checked) row index."""
    return rebuild(s, lambda e, _: Scalar("acc", (), e.dtype, e.data) if e.prim == "acc" else None)
