"""What all loop nests share: points, hoisting, stores, rows split among threads, masked vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import KernelFrame, unflatten
from rlx.codegen.cpu.primitives import memory_type, register_type, to_memory
from rlx.codegen.cpu.rows.collapse import bodies
from rlx.codegen.native.irtext import Int
from rlx.codegen.native.irtypes import Value, size_bytes
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.types import TensorType
from rlx.kernel.nests import Nest, Store
from rlx.kernel.scalar import Scalar
from rlx.target.cpu import Target


def expression_lanes(target: Target, expressions: Sequence[Scalar]) -> int:
    """Lanes in which expressions are evaluated: as many as the widest of their floats leaves."""
    widest = max(
        (size_bytes(register_type(e.dtype)) for b in expressions for e in b.walk() if e.dtype.is_float),
        default=4,
    )
    return target.vector_bytes // (8 if widest == 8 else 4)


def stream_bytes(target: Target) -> int:
    """Outputs of this size are not found in the caches again."""
    return target.l3_bytes


def nest_lanes(target: Target, nest: Nest) -> int:
    """Lanes of a nest. They show in the bits of sums, whose own dtype decides, then."""
    sums = [s.body for s in nest.stats if s.rounds]
    if nest.columns is None or not sums:
        return expression_lanes(target, bodies(nest))
    return min(target.vector_bytes // max(size_bytes(register_type(b.dtype)), 4) for b in sums)


def prepare(at: Expression, expressions: Sequence[Scalar], fixed: set[int], accs: int = 0) -> None:
    """Compute what depends on fixed axes (and on reductions that are finished) only."""
    for body in expressions:
        free: dict[Scalar, bool] = {}
        for e in body.walk():
            own = (e.prim == "axis" and e.data not in fixed) or (e.prim == "acc" and (e.data or 0) >= accs)
            free[e] = own or any(free[a] for a in e.args)
            if not free[e] and e.prim not in ("const", "axis"):
                at(e)


class NestEmitter:
    """What all kinds of nest share."""

    def __init__(self, frame: KernelFrame, nest: Nest) -> None:
        self.frame, self.nest, self.fn = frame, nest, frame.fn
        self.operands = frame.operands(frame.fn)
        self.lanes = nest_lanes(frame.module.target, nest)
        self.streaming = False
        self.sizes = [frame.dim(self.fn, d) for d in nest.space]

    def point(self, axes: Sequence[Int], lane: Lane | None, known: Expression | None = None) -> Expression:
        made = Expression(self.fn, self.frame.dim, self.operands, axes, lane, error=self.frame.error)
        if known is not None:
            made.memo = dict(known.memo)
            made.accs = known.accs
        return made

    def prepare(self, at: Expression, expressions: Sequence[Scalar], fixed: set[int], accs: int = 0) -> None:
        """Compute what depends on fixed axes (and finished reductions) only, before a loop repeats it."""
        prepare(at, expressions, fixed, accs)

    def place(self, store: Store, number: int, axes: Sequence[Int]) -> Value:
        """Address of an output element."""
        fn = self.fn
        offset: Int = 0
        for a, stride in zip(axes, store.strides, strict=True):
            offset = fn.add(offset, fn.mul(a, self.frame.dim(fn, stride)))
        return fn.gep(self.frame.output(number).pointer, offset, memory_type(self.dtype(number)))

    def dtype(self, number: int) -> DType:
        return self.frame.outputs[number].dtype

    def write(self, at: Expression, store: Store, number: int, axes: Sequence[Int], step: Dim = 1) -> None:
        """Store an expression in the lanes that exist; `step` is the output's stride along the lane axis."""
        fn = self.fn
        value = to_memory(fn, at.vector(store.body), self.dtype(number))
        place = self.place(store, number, axes)
        mask = None if at.lane is None else at.lane.mask
        if at.lane is not None and not (isinstance(step, int) and step == 1):
            index = fn.mul(fn.iota(at.width), fn.splat(self.frame.dim(fn, step), at.width, "i64"))
            fn.scatter(value, place, fn.value(index), mask)
        elif mask is not None:
            fn.masked_store(value, place, mask)
        else:
            fn.store(value, place, nontemporal=self.streaming)

    def with_streaming(self, emit: Callable[[], None]) -> None:
        """Write the kernel; where its outputs are too large for the caches, also a version that bypasses
        them.

        Stores that do not go through the caches save reading every line before it is overwritten. They need
        aligned vectors, which is known at run time only, and a fence before anyone else reads.
        """
        aligned = self._may_stream()
        if aligned is None:
            emit()
            return
        fn = self.fn

        def bypass() -> None:
            self.streaming = True
            emit()
            fn.fence()
            self.streaming = False

        fn.branch(aligned, bypass, emit)

    def _may_stream(self) -> Value | None:
        """Whether outputs are too large for the caches and stores past them possible, as far as only a run
        are known; None: they are not."""
        fn, space = self.fn, self.nest.space
        total: Dim = 0
        tests: list[Value] = []
        for number, store in enumerate(self.nest.stores):
            slot = self.frame.outputs[number]
            vector_bytes = self.lanes * slot.dtype.itemsize
            if (
                not store.full
                or store.strides[-1] != 1
                or vector_bytes != self.frame.module.target.vector_bytes
            ):
                return None
            total = total + TensorType(slot.dtype, slot.shape).numel * slot.dtype.itemsize
            address = fn.op("i64", f"ptrtoint {self.frame.output(number).pointer} to i64")
            tests.append(fn.value(fn.cmp("eq", fn.value(fn.and_(address, vector_bytes - 1)), 0)))
        if len(space) > 1:  # every row begins at a whole vector if the first one does
            rest = fn.urem(self.sizes[-1], self.lanes)
            if isinstance(rest, int) and rest:
                return None
            if not isinstance(rest, int):
                tests.append(fn.value(fn.cmp("eq", rest, 0)))
        cache = stream_bytes(self.frame.module.target)
        if not isinstance(total, int):
            tests.append(fn.value(fn.cmp("sge", self.frame.dim(fn, total), cache)))
        elif total < cache:
            return None
        return reduce(lambda a, b: fn.value(fn.and_(a, b)), tests)

    def along(
        self, extent: Int, width: int, body: Callable[[Int, Value | None], None], start: Int = 0
    ) -> None:
        """Full vectors, then one masked vector for the rest."""
        fn = self.fn
        whole = (
            fn.sub(extent, fn.urem(fn.sub(extent, start), width))
            if not isinstance(extent, int) or not isinstance(start, int)
            else extent - (extent - start) % width
        )
        fn.loop(start, whole, width, [], lambda i, _: body(i, None))
        left = fn.sub(extent, whole)
        fn.branch(fn.cmp("sgt", left, 0), lambda: body(whole, fn.lanes(left, width)))

    def rows(self, sizes: Sequence[Int], body: Callable[[list[Int]], None]) -> None:
        """This thread's part of a row space."""
        fn = self.fn
        total: Int = 1
        for n in sizes:
            total = fn.mul(total, n)
        low, high = self.frame.share(total)
        fn.loop(low, high, 1, [], lambda r, _: body(unflatten(fn, r, sizes)))
