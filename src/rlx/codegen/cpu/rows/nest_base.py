"""What all loop nests share: points, hoisting, stores, rows split among threads, masked vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.codegen.cpu.chains import has_chain
from rlx.codegen.cpu.expression import Expression, Lane
from rlx.codegen.cpu.frame import KernelFrame, product, unflatten
from rlx.codegen.cpu.primitives import memory_type, register_type, to_memory
from rlx.codegen.cpu.rows.collapse import bodies
from rlx.codegen.cpu.rows.distances import use_distances
from rlx.codegen.native.irtypes import Value, size_bytes
from rlx.codegen.native.notation import inline
from rlx.codegen.native.words import (
    Index,
    Word,
    address_of,
    fence,
    gep,
    iota,
    lanes,
    loop,
    masked_store,
    ptr,
    scatter,
    splat,
    store,
    urem,
)
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
        free = set[Scalar]()
        for e in body.walk():
            if e.prim == "axis":
                if e.data not in fixed:
                    free.add(e)
            elif (e.prim == "acc" and (e.data or 0) >= accs) or not free.isdisjoint(e.args):
                free.add(e)
            elif e.prim != "const":
                at(e)


class NestEmitter:
    """What all kinds of nest share."""

    def __init__(self, frame: KernelFrame, nest: Nest) -> None:
        nest = use_distances(nest)
        self.frame, self.nest, self.fn = frame, nest, frame.fn
        self.operands = frame.operands(frame.fn)
        self.lanes = nest_lanes(frame.module.target, nest)
        self.walks = has_chain(bodies(nest))
        self.streaming = False
        self.sizes = frame.sizes(nest.space)

    def point(self, axes: Sequence[Index], lane: Lane | None, known: Expression | None = None) -> Expression:
        made = Expression(
            self.fn, self.frame.dim, self.operands, axes, lane, error=self.frame.error, walks=self.walks
        )
        if known is not None:
            made.memo = dict(known.memo)
            made.accs = known.accs
        return made

    def prepare(self, at: Expression, expressions: Sequence[Scalar], fixed: set[int], accs: int = 0) -> None:
        """Compute what depends on fixed axes (and finished reductions) only, before a loop repeats it."""
        prepare(at, expressions, fixed, accs)

    def size(self, d: Dim) -> Word:
        """A size, as a number of the notation."""
        return Word(self.frame.dim(self.fn, d))

    def dtype(self, number: int) -> DType:
        return self.frame.outputs[number].dtype

    @inline
    def place(self, output: Store, number: int, axes: Sequence[Index]) -> ptr:
        """Address of an output element."""
        offset: Index = 0
        for a, stride in zip(axes, output.strides, strict=True):
            offset += a * self.size(stride)
        return gep(self.frame.output(number).pointer, offset, memory_type(self.dtype(number)))

    def write(self, at: Expression, output: Store, number: int, axes: Sequence[Index], step: Dim = 1) -> None:
        """Store an expression in the lanes that exist; `step` is the output's stride along the lane axis."""
        value = to_memory(self.fn, at.vector(output.body), self.dtype(number))
        place, lane = self.place(output, number, axes), at.lane
        if lane is not None and not (isinstance(step, int) and step == 1):
            scatter(value, place, _multiples(self.size(step), lane.width), lane.mask)
        elif lane is not None and lane.mask is not None:
            masked_store(value, place, lane.mask)
        else:
            store(value, place, nontemporal=self.streaming)

    @inline
    def with_streaming(self, emit: Callable[[], None]) -> None:
        """Write the kernel; where its outputs are too large for the caches, also a version that bypasses
        them.

        Stores that do not go through the caches save reading every line before it is overwritten. They need
        aligned vectors, which is known at run time only, and a fence before anyone else reads.
        """
        may_stream = self.may_stream()
        if may_stream:
            self.streaming = True
            emit()
            fence()
            self.streaming = False
        else:
            emit()

    @inline
    def may_stream(self) -> bool:
        """Whether outputs are too large for the caches, and all their vectors aligned."""
        target, pointers = self.frame.module.target, list[Value]()
        total: Dim = 0
        for number, output in enumerate(self.nest.stores):
            slot = self.frame.outputs[number]
            is_whole = output.full and output.strides[-1] == 1
            if not is_whole or self.lanes * slot.dtype.itemsize != target.vector_bytes:
                return False
            total += TensorType(slot.dtype, slot.shape).numel * slot.dtype.itemsize
            pointers.append(self.frame.output(number).pointer)
        if isinstance(total, int) and total < stream_bytes(target):
            return False
        tests = [address_of(pointer) & (target.vector_bytes - 1) == 0 for pointer in pointers]
        if len(self.nest.space) > 1:  # every row begins at a whole vector if the first one does
            tests.append(urem(self.sizes[-1], self.lanes) == 0)
        if False in tests:
            return False
        tests.append(self.size(total) >= stream_bytes(target))
        holds = True
        for test in tests:
            holds &= test
        return holds

    @inline
    def along(
        self, extent: Index, width: int, body: Callable[[Index, Value | None], None], start: Index = 0
    ) -> None:
        """Full vectors, then one masked vector for the rest."""
        whole = extent - urem(Word(extent - start), width)
        for i in loop(start, whole, width):
            body(i, None)
        left = extent - whole
        if left > 0:
            body(whole, lanes(left, width))

    @inline
    def position(self, axes: Sequence[Index]) -> Index:
        """Flat index within the reduced axes (what argmax reports)."""
        flat: Index = 0
        for i, size in list(zip(axes, self.sizes, strict=True))[self.nest.outer :]:
            flat = flat * size + i
        return flat

    def share(self, sizes: Sequence[Index]) -> tuple[Word, Word]:
        """This thread's part of a space: its first point, and the one after its last."""
        low, high = self.frame.share(product(sizes))
        return Word(low), Word(high)

    def indices(self, point: Index, sizes: Sequence[Index]) -> list[Word]:
        """Where a point of a space is, by axis."""
        return [Word(i) for i in unflatten(self.fn, point, sizes)]


@inline
def _multiples(step: Word, width: int) -> Word:
    """0, step, 2 * step ... in lanes."""
    return iota(width) * splat(step, width, "i64")
