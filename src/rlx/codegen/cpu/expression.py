"""Scalar expressions as vector code: lanes run along one axis of a loop nest, the rest is uniform."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field

from rlx.codegen.cpu.chains import can_walk, walk
from rlx.codegen.cpu.primitives import (
    PRIMITIVES,
    emit_cast,
    emit_level,
    from_memory,
    memory_type,
    register_type,
)
from rlx.codegen.native.irtext import Function, Int
from rlx.codegen.native.irtypes import Value, constant, like, size_bytes, vector
from rlx.codegen.native.words import Word
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, I8, I64, U8, DType
from rlx.kernel.affine import affine, to_dim
from rlx.kernel.scalar import COMPARED, LOADS, Scalar, load_index
from rlx.records import dataclass
from rlx.target.cpu import Target

LINE_BYTES = 64
ERROR_INDEX = 1  # code in the error slot: an index from data is out of range

DimValue = Callable[[Function, Dim], Int]


@dataclass(frozen=True)
class Operand:
    """Where a kernel finds an operand: pointer, shape, and strides in elements."""

    pointer: Value
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]

    def is_large(self, itemsize: int, target: Target) -> bool:
        """Whether it may come from memory rather than from a core's own caches; of symbolic sizes, it may."""
        count: Dim = itemsize
        for d in self.shape:
            count = count * d
        return not isinstance(count, int) or count >= 2 * target.l2_bytes


@dataclass
class Lane:
    """The axis along which lanes run: `base` is the index of lane 0."""

    axis: int
    base: Int
    width: int
    mask: Value | None = None  # lanes that exist; None: all


@dataclass(frozen=True)
class Ahead:
    """A request to memory: how many elements before they are read, and which caches are to keep them."""

    elements: Int
    locality: int = 3  # 3: all caches; 2: not the first, whose few requests under way then stay free


AHEAD = (Ahead(1024),)  # long bodies let few loads be on their way
# With non-temporal stores: prefetch into L2 early, and from L2 into L1 shortly before use.
# A prefetch that finds no free miss buffer is dropped, so the early one is issued twice.
STREAM_AHEAD = (Ahead(8192, 2), Ahead(4096, 2), Ahead(768))


@dataclass
class Expression:
    """Emits expressions at one point of the nest. `axes` are the indices of all axes (lane axis: lane 0's).

    Memoised per point: a sub-expression is computed once. `saved` overrides expressions kept in memory.
    """

    fn: Function
    dim: DimValue
    operands: Sequence[Operand]
    axes: Sequence[Int]
    lane: Lane | None
    accs: Sequence[Value] = ()
    error: Value | None = None
    saved: Mapping[Scalar, Callable[[], Value]] = field(default_factory=dict)
    memo: dict[Scalar, Value] = field(default_factory=dict)
    ahead: Sequence[Ahead] = ()
    """How whole vectors of large operands are prefetched ..."""
    cached: Collection[int] = ()
    """... except of these, which an earlier pass has read."""
    walks: bool = False
    """Whether lanes of long chains of loads are walked one by one."""
    bad: list[Value] | None = None
    """At a point of a walk: flags of indices out of range, which are reported together."""

    def __call__(self, s: Scalar) -> Value:
        found = self.memo.get(s)
        if found is None:
            saved = self.saved.get(s) if self.saved else None
            found = self.memo[s] = self._emitted(s) if saved is None else saved()
        return found

    def _emitted(self, s: Scalar) -> Value:
        return walk(self, s) if self.walks and can_walk(self, s) else self._emit(s)

    def vector(self, s: Scalar) -> Word:
        """The expression in every lane."""
        return Word(self._spread(self(s)))

    @property
    def width(self) -> int:
        return 1 if self.lane is None else self.lane.width

    def _spread(self, x: Value) -> Value:
        if self.lane is None or self.lane.width == 1 or x.width > 1:
            return x
        return self.fn.splat(x, self.lane.width)

    def _together(self, values: list[Value]) -> list[Value]:
        for v in values:
            if v.width > 1:
                return [self._spread(v) for v in values]
        return values

    # -- leaves and primitives

    def _emit(self, s: Scalar) -> Value:
        fn = self.fn
        emit = PRIMITIVES.get(s.prim)
        if emit is not None:
            args = self._together([self(a) for a in s.args])
            return emit(fn, s.args[-1].dtype, args)
        if s.prim == "const":
            return constant(register_type(s.dtype), s.data)
        if s.prim == "axis":
            return self._axis(s.data)
        if s.prim == "size":
            return fn.value(self.dim(fn, s.data))
        if s.prim == "acc":
            return self.accs[s.data or 0]
        if s.prim == "at":
            return self._flat(s)
        if s.prim in LOADS:
            return self._load(s)
        if s.prim == "cast":
            level = rounded_level(s)
            if level is not None:
                rounded, byte, zero = level
                return emit_level(fn, self(rounded), byte, zero, s.dtype)
            return emit_cast(fn, self(s.args[0]), s.args[0].dtype, s.dtype, s.data)
        raise UnsupportedError(f"primitive {s.prim!r} has no native code")

    def _axis(self, number: int) -> Value:
        fn = self.fn
        if self.lane is None or number != self.lane.axis:
            return fn.value(self.axes[number])
        base = fn.splat(fn.value(self.lane.base), self.width)
        return fn.value(fn.add(base, fn.iota(self.width))) if self.width > 1 else base

    # -- loads

    def _load(self, s: Scalar) -> Value:
        operand = self.operands[s.data]
        index = load_index(s)
        if s.prim == "load_checked":
            return self._checked(s, operand, index)
        guard = self(s.args[0]) if s.prim == "load_or" else None
        fill = self(s.args[1]) if s.prim == "load_or" else None
        place = self._linear(operand, index)
        if place is None:
            offset = self._offset(operand, [self(i) for i in index])
            return self._read(s, operand, offset, guard, fill)
        base, step = place
        if self.lane is None or (isinstance(step, int) and step == 0):
            if guard is not None and guard.width > 1:
                offset = self.fn.value(fn_splat(self.fn, base, self.width))
                return self._read(s, operand, offset, guard, fill)
            return self._read(s, operand, self.fn.value(base), guard, fill)
        if isinstance(step, int) and step == 1:
            return self._contiguous(s, operand, base, guard, fill)
        if isinstance(step, int) and step == -1:
            return self._backwards(s, operand, base, guard, fill)
        return self._strided(s, operand, base, step, guard, fill)

    def _flat(self, s: Scalar) -> Value:
        """An element by its offset in the operand's storage."""
        storage = Operand(self.operands[s.data].pointer, (0,), (1,))
        place = self._linear(storage, s.args)
        if place is None:
            return self._read(s, storage, self(s.args[0]), None, None)
        base, step = place
        if self.lane is None or (isinstance(step, int) and step == 0):
            return self._read(s, storage, self.fn.value(base), None, None)
        if isinstance(step, int) and step == 1:
            return self._contiguous(s, storage, base, None, None)
        if isinstance(step, int) and step == -1:
            return self._backwards(s, storage, base, None, None)
        return self._strided(s, storage, base, step, None, None)

    def _strided(
        self, s: Scalar, operand: Operand, base: Int, step: Int, guard: Value | None, fill: Value | None
    ) -> Value:
        spread = self.fn.splat(self.fn.value(base), self.width)
        steps = self.fn.mul(self.fn.iota(self.width), fn_splat(self.fn, step, self.width))
        return self._read(s, operand, self.fn.value(self.fn.add(spread, self.fn.value(steps))), guard, fill)

    def _linear(self, operand: Operand, index: Sequence[Scalar]) -> tuple[Int, Int] | None:
        """(element offset of lane 0, step per lane) where the index is affine in the lane axis."""
        fn = self.fn
        base: Int = 0
        step: Int = 0
        for i, stride in zip(index, operand.strides, strict=True):
            if self.lane is not None and self._varies(i):
                parts = affine(i, len(self.axes))
                k = self._lane_step(i) if parts is None else to_dim(parts[0][self.lane.axis])
                if k is None:
                    return None
                step = fn.add(step, self._dim(k * stride))
                at_zero = self._at_lane_zero(i)
            else:
                at_zero = self(i) if not (i.prim == "const") else i.data
            base = fn.add(base, fn.mul(at_zero, self._dim(stride)))
        return base, step

    def _lane_step(self, i: Scalar) -> Dim | None:
        """How much an index grows from lane to lane, if it is a sum of lanes and of what all lanes share."""
        if not self._varies(i):
            return 0
        if i.prim == "axis":
            return 1
        if i.prim in ("add", "sub"):
            first, second = (self._lane_step(x) for x in i.args)
            if first is None or second is None:
                return None
            return first + second if i.prim == "add" else first - second
        if i.prim == "mul":
            for varying, factor in (i.args, i.args[::-1]):
                times, step = to_dim(factor), self._lane_step(varying)
                if times is not None and step is not None:
                    return times * step
        return None

    def _at_lane_zero(self, i: Scalar) -> Int:
        """An index expression in lane 0 (all of it uniform)."""
        inner = Expression(self.fn, self.dim, self.operands, self.axes, None, self.accs, self.error)
        return inner(i)

    def _varies(self, s: Scalar) -> bool:
        assert self.lane is not None
        return any(
            (e.prim == "axis" and e.data == self.lane.axis)
            or (e.prim == "acc" and self.accs[e.data or 0].width > 1)
            for e in s.walk()
        )

    def _dim(self, d: Dim) -> Int:
        return d if isinstance(d, int) else self.dim(self.fn, d)

    def _offset(self, operand: Operand, index: Sequence[Value]) -> Value:
        fn = self.fn
        values = self._together(list(index))
        total: Int = 0
        for i, stride in zip(values, operand.strides, strict=True):
            scaled = fn.mul(i, fn_splat(fn, self._dim(stride), i.width))
            total = scaled if isinstance(total, int) else fn.add(total, scaled)
        return fn.value(total)

    def _mask(self, guard: Value | None, width: int) -> Value | None:
        """Lanes that may be touched."""
        tail = self.lane.mask if self.lane is not None and width > 1 else None
        if guard is None:
            return tail
        guard = self.fn.splat(guard, width) if guard.width == 1 and width > 1 else guard
        return guard if tail is None else self.fn.value(self.fn.and_(guard, tail))

    def _read(
        self, s: Scalar, operand: Operand, offset: Value, guard: Value | None, fill: Value | None
    ) -> Value:
        """One element per offset: scalar or gathered."""
        fn, element = self.fn, memory_type(s.dtype)
        if guard is not None and guard.width > 1 and offset.width == 1:
            offset = fn.splat(offset, guard.width)
        mask = self._mask(guard, offset.width)
        if mask is not None and offset.width > 1:
            offset = fn.select(mask, offset, constant(offset.type, 0))
        got = from_memory(fn, fn.gather(operand.pointer, offset, element, mask), s.dtype)
        return self._filled(got, guard, fill)

    def _contiguous(
        self, s: Scalar, operand: Operand, base: Int, guard: Value | None, fill: Value | None
    ) -> Value:
        fn, element = self.fn, memory_type(s.dtype)
        mask = self._mask(guard, self.width)
        type_ = vector(element, self.width)
        ends = self._ends(s.args[0]) if guard is not None and s.prim == "load_or" else None
        if ends is not None and mask is not None and fill is not None:
            every, none = ends
            other = fn.splat(fill, self.width) if fill.width == 1 else fill

            def all_lanes() -> list[Value]:
                return [from_memory(fn, fn.load(type_, fn.gep(operand.pointer, base, element)), s.dtype)]

            def some_lanes() -> list[Value]:
                place = fn.gep(operand.pointer, base, element)
                got = from_memory(fn, fn.masked_load(type_, place, mask), s.dtype)
                return [fn.select(mask, got, other)]

            def rest() -> list[Value]:
                return fn.if_value(none, lambda: [other], some_lanes)

            return fn.if_value(every, all_lanes, rest)[0]
        place = self._place(operand, base, element, guard)
        if mask is None:
            got = fn.load(type_, place)
        else:
            got = fn.masked_load(type_, place, mask) if guard is None else fn.guarded_load(type_, place, mask)
        large = self.operands[s.data].is_large(size_bytes(element), fn.module.target)
        if self.ahead and mask is None and large and s.data not in self.cached:
            self._ask_ahead(place, element)
        return self._filled(from_memory(fn, got, s.dtype), guard, fill)

    def _ends(self, condition: Scalar) -> tuple[Value, Value] | None:
        """Whether all lanes hold a condition, and whether none does (it may say no to both), by the first and
        the last lane: of comparisons that change once from lane to lane. Only engines are faster that way."""
        if not self.fn.module.target.web or self.lane is None or self.lane.mask is not None:
            return None
        parts, left = list[Scalar](), [condition]
        while left:
            e = left.pop()
            if e.prim == "logical_and":
                left += e.args
            else:
                parts.append(e)
        for e in parts:
            compared = e.prim in COMPARED and all(a.dtype is I64 for a in e.args)
            if not compared or any(self._lane_step(a) is None for a in e.args):
                return None
        fn, every, none = self.fn, self.fn.value(True, "i1"), self.fn.value(False, "i1")
        for e in parts:
            first, last = (self._at_lane(e, n) for n in (0, self.width - 1))
            every = fn.value(fn.and_(every, fn.and_(first, last)))
            none = fn.value(fn.or_(none, fn.not_(fn.value(fn.or_(first, last)))))
        return every, none

    def _at_lane(self, e: Scalar, number: int) -> Value:
        """An expression over indices in one lane."""
        assert self.lane is not None
        axes = list(self.axes)
        axes[self.lane.axis] = self.fn.add(axes[self.lane.axis], number)
        return Expression(self.fn, self.dim, self.operands, axes, None, self.accs, self.error)(e)

    def _ask_ahead(self, place: Value, element: str) -> None:
        """Every cache line of the vector at `place`, as much later as `ahead` says."""
        fn, line = self.fn, LINE_BYTES // size_bytes(element)
        for ahead in self.ahead:
            for first in range(0, self.width, line):
                fn.prefetch(fn.gep(place, fn.add(ahead.elements, first), element), locality=ahead.locality)

    def _place(self, operand: Operand, offset: Int, element: str, guard: Value | None) -> Value:
        """Address of an element.

        Where a guard lets no lane read, one that exists: a load from a page that does
        not is slow even if the fault is suppressed.
        """
        fn = self.fn
        place = fn.gep(operand.pointer, offset, element)
        return place if guard is None else fn.select(fn.any_lane(guard), place, operand.pointer)

    def _backwards(
        self, s: Scalar, operand: Operand, base: Int, guard: Value | None, fill: Value | None
    ) -> Value:
        """Neighbours in descending order: one load that ends at lane 0, turned round."""
        fn, element, width = self.fn, memory_type(s.dtype), self.width
        turned = range(width - 1, -1, -1)
        mask = self._mask(guard, width)
        place = self._place(operand, fn.sub(base, width - 1), element, guard)
        type_ = vector(element, width)
        if mask is None:
            got = fn.load(type_, place)
        else:
            got = fn.masked_load(type_, place, fn.shuffle(mask, None, turned))
        return self._filled(from_memory(fn, fn.shuffle(got, None, turned), s.dtype), guard, fill)

    def _filled(self, got: Value, guard: Value | None, fill: Value | None) -> Value:
        if guard is None or fill is None:
            return got
        got, guard, fill = self._together([got, guard, fill])
        return self.fn.select(guard, got, fill)

    def _checked(self, s: Scalar, operand: Operand, index: Sequence[Scalar]) -> Value:
        """Indices from data: a bad one is reported in the error slot and reads nothing."""
        row = self._checked_row(s, operand, index)
        if row is not None:
            return row
        values = self._together([self(i) for i in index])
        good = self._in_range(values, operand.shape)
        offset = self._offset(operand, values)
        if good is None:
            return self._read(s, operand, offset, None, None)
        if self.bad is not None:
            return self._read_or_zero(s, operand, offset, good)
        return self._read(s, operand, offset, good, constant(like(offset.type, register_type(s.dtype)), 0))

    def _read_or_zero(self, s: Scalar, operand: Operand, offset: Value, good: Value) -> Value:
        """An element without a branch: where there is none, 0 is read elsewhere."""
        fn, element = self.fn, memory_type(s.dtype)
        zero = fn.module.table("nothing", "i64", [0])
        place = fn.select(good, fn.gep(operand.pointer, offset, element), zero)
        return from_memory(fn, fn.load(element, place), s.dtype)

    def _checked_row(self, s: Scalar, operand: Operand, index: Sequence[Scalar]) -> Value | None:
        """Lanes along a row that data chose: the index is checked once and the row is read in place."""
        if self.lane is None:
            return None
        moving = [self._varies(i) for i in index]
        if any(v and any(map(is_load, i.walk())) for v, i in zip(moving, index, strict=True)):
            return None
        place = self._linear(operand, index)
        if place is None or not isinstance(place[1], int) or place[1] != 1:
            return None
        fixed = [(self(i), d) for i, d, v in zip(index, operand.shape, moving, strict=True) if not v]
        good = self._in_range([i for i, _ in fixed], [d for _, d in fixed])
        return self._contiguous(s, operand, place[0], good, constant(register_type(s.dtype), 0))

    def _in_range(self, values: Sequence[Value], shape: Sequence[Dim]) -> Value | None:
        """Whether every index is inside its axis; a bad one is reported.

        None: there is nothing to check.
        """
        fn = self.fn
        good: Value | None = None
        for i, extent in zip(values, shape, strict=True):
            ok = fn.value(fn.cmp("ult", i, fn_splat(fn, self._dim(extent), i.width)))
            good = ok if good is None else fn.value(fn.and_(good, ok))
        if good is not None:
            flag = fn.value(fn.xor(good, constant(good.type, True)))
            if self.bad is None:
                self.report(flag)
            else:
                self.bad.append(flag)
        return good

    def report(self, bad: Value, code: int = ERROR_INDEX) -> None:
        """Store an error code if any existing lane is bad."""
        fn = self.fn
        if bad.width > 1 and self.lane is not None and self.lane.mask is not None:
            bad = fn.value(fn.and_(bad, self.lane.mask))
        if self.error is None:
            raise UnsupportedError("this kernel has no error slot")
        slot = self.error
        fn.branch(fn.any_lane(bad), lambda: fn.store(constant("i64", code), slot))


def is_load(s: Scalar) -> bool:
    """Whether an expression reads an operand."""
    return s.prim in LOADS or s.prim == "at"


def rounded_level(s: Scalar) -> tuple[Scalar, DType, int] | None:
    """(x, byte, zero) of a cast that gives round(x) + zero as a byte, or that byte as f32."""
    code = s.args[0] if s.dtype is F32 else s
    if code.prim != "cast" or code.dtype not in (I8, U8) or code.args[0].dtype is not F32:
        return None
    level, zero = code.args[0], 0
    if level.prim == "add" and level.args[1].prim == "const":
        level, shift = level.args[0], float(level.args[1].data)
        if not shift.is_integer() or abs(shift) > 255:
            return None
        zero = int(shift)
    return (level.args[0], code.dtype, zero) if level.prim == "round" else None


def fn_splat(fn: Function, x: Int, width: int) -> Int:
    """An i64 in every lane."""
    return fn.splat(x, width, "i64") if width > 1 else x


__all__ = ["AHEAD", "ERROR_INDEX", "STREAM_AHEAD", "Ahead", "Expression", "Lane", "Operand", "fn_splat"]
