"""Conversions, lanes and shuffles of the IR text builder.

16-bit floats are converted by integer instructions where a target has none of its own, because LLVM would
call a helper library that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rlx.codegen.native import twins
from rlx.codegen.native.irops import Arithmetic, Int, Number
from rlx.codegen.native.irtypes import Value, constant, is_float, lanes_of, like, vector


@functools.cache
def _iota(type_: str, lanes: int) -> Value:
    return lanes_of(type_, range(lanes))


@functools.lru_cache(1024)
def _picks(lanes: tuple[int, ...]) -> str:
    """The mask of a shuffle; -1 is a lane that may be anything."""
    listed = ", ".join([f"i32 {lane}" if lane >= 0 else "i32 poison" for lane in lanes])
    return f"<{len(lanes)} x i32> <{listed}>"


class Lanes(Arithmetic):
    """Arithmetic plus everything that changes the type or the order of lanes."""

    widened: dict[Value, Value]  # wide floats -> the narrow ones that they came from
    same_bits: dict[Value, Value]  # what was cast -> the value of another type that it came from

    # ---- casts

    def cast(self, opcode: str, a: Number, element_type: str) -> Value:
        """One LLVM conversion (trunc zext sext sitofp ...) of every lane to `element_type`."""
        if a.__class__ is not Value:
            a = self.value(a)
        type_ = like(a.type, element_type)
        return a if type_ == a.type else self.op(type_, f"{opcode} {a.type} {a.text} to {type_}")

    def trunc(self, a: Number, element_type: str) -> Value:
        return self.cast("trunc", a, element_type)

    def zext(self, a: Number, element_type: str) -> Value:
        return self.cast("zext", a, element_type)

    def sext(self, a: Number, element_type: str) -> Value:
        return self.cast("sext", a, element_type)

    def sitofp(self, a: Number, element_type: str) -> Value:
        return self.cast("sitofp", a, element_type)

    def uitofp(self, a: Number, element_type: str) -> Value:
        return self.cast("uitofp", a, element_type)

    def fptosi(self, a: Value, element_type: str) -> Value:
        """Towards zero; a value out of range gives no defined number."""
        return self.cast("fptosi", a, element_type)

    def fptoui(self, a: Value, element_type: str) -> Value:
        return self.cast("fptoui", a, element_type)

    def bitcast(self, a: Value, type_: str) -> Value:
        """The same bits as another type; the full type is given, because the number of lanes may change."""
        if type_ == a.type:
            return a
        source = self.same_bits.get(a)
        if source is not None and type_ == source.type:
            return source
        made = self.op(type_, f"bitcast {a.type} {a.text} to {type_}")
        self.same_bits[made] = a
        return made

    def fpext(self, a: Value, element_type: str) -> Value:
        """Widen floats (exact)."""
        narrow = a
        if a.element == "bfloat" and element_type in ("float", "double"):
            word = self.zext(self.bitcast(a, like(a.type, "i16")), "i32")
            a = self.bitcast(self.value(self.shl(word, 16)), like(a.type, "float"))
        elif a.element == "half" and not self._has_half:
            a = self._half_to_float(a)
        wide = self.cast("fpext", a, element_type)
        self.widened[wide] = narrow
        return wide

    def fptrunc(self, a: Value, element_type: str, exact: bool = True) -> Value:
        """Narrow floats, ties to even. `exact=False` allows the bf16 instruction that flushes denormals.

        What was widened from the same type is what it was: a rounded value is not rounded again.
        """
        known = self.widened.get(a)
        if known is not None and known.element == element_type:
            return known
        if element_type not in ("bfloat", "half") or element_type == a.element:
            return self.cast("fptrunc", a, element_type)
        if a.element == "double":
            a = self._to_odd_float(a)
        if element_type == "half":
            return self.cast("fptrunc", a, "half") if self._has_half else self._float_to_half(a)
        if (not exact or self.module.flush_bf16) and self.module.target.has_bf16:
            emulated = self.module.target.emulated
            return twins.round_to_bf16(self, a) if emulated else self.cast("fptrunc", a, "bfloat")
        return self.float_to_bf16(a)

    def float_to_bf16(self, a: Value) -> Value:
        """f32 -> bf16 in integers, ties to even."""
        word = self.bitcast(a, like(a.type, "i32"))
        rounding = self.add(self.and_(self.lshr(word, 16), 1), 0x7FFF)
        quiet = self.or_(self.lshr(word, 16), 0x40)
        top = self.select(self.is_nan(a), quiet, self.lshr(self.add(word, rounding), 16))
        return self.bitcast(self.trunc(top, "i16"), like(a.type, "bfloat"))

    def _to_odd_float(self, a: Value) -> Value:
        """f64 -> f32 rounded to odd, so that a second rounding to 16 bits is the right one."""
        near = self.cast("fptrunc", a, "float")
        back = self.cast("fpext", near, "double")
        word = self.bitcast(near, like(a.type, "i32"))
        up = self.fcmp("ogt", self.fabs(back), self.fabs(a))
        truncated = self.select(up, self.sub(word, 1), word)
        inexact = self.fcmp("one", back, a)
        odd = self.select(inexact, self.or_(truncated, 1), word)
        return self.bitcast(odd, near.type)

    @property
    def _has_half(self) -> bool:
        return self.module.target.converts_f16

    def _half_to_float(self, a: Value) -> Value:
        """f16 -> f32 in integers: scaling by 2**112 turns denormals into normal numbers."""
        word = self.value(self.zext(self.bitcast(a, like(a.type, "i16")), "i32"))
        sign = self.shl(self.and_(word, 0x8000), 16)
        magnitude = self.shl(self.and_(word, 0x7FFF), 13)
        finite = self.fmul(self.bitcast(self.value(magnitude), like(a.type, "float")), 2.0**112)
        special = self.cmp("ugt", magnitude, 0x0F7FFFFF)
        shown = self.bitcast(finite, like(a.type, "i32"))
        chosen = self.select(special, self.or_(magnitude, 0x7F800000), shown)
        return self.bitcast(self.value(self.or_(self.value(chosen), sign)), like(a.type, "float"))

    def _float_to_half(self, a: Value) -> Value:
        """f32 -> f16 in integers, ties to even; adding 0.5 aligns and rounds the bits of small results."""
        i32, f32 = like(a.type, "i32"), like(a.type, "float")
        word = self.bitcast(a, i32)
        sign = self.and_(self.lshr(word, 16), 0x8000)
        magnitude = self.value(self.and_(word, 0x7FFFFFFF))
        tie = self.and_(self.lshr(magnitude, 13), 1)
        normal = self.lshr(self.add(self.add(magnitude, 0xFFF - (112 << 23)), tie), 13)
        shifted = self.fadd(self.bitcast(magnitude, f32), constant(f32, 0.5))
        small = self.sub(self.bitcast(shifted, i32), 0x3F000000)
        quiet = self.or_(self.and_(self.lshr(magnitude, 13), 0x3FF), 0x7E00)
        result = self.select(self.cmp("ult", magnitude, 0x38800000), small, normal)
        result = self.select(self.cmp("uge", magnitude, 0x477FF000), 0x7C00, result)
        result = self.select(self.cmp("ugt", magnitude, 0x7F800000), quiet, result)
        return self.bitcast(self.trunc(self.or_(self.value(result), sign), "i16"), like(a.type, "half"))

    # ---- lanes

    def splat(self, x: Number, lanes: int, element_type: str = "float") -> Value:
        """`x` in every one of `lanes` lanes; a Python number becomes a constant of `element_type`."""
        if not isinstance(x, Value):
            return constant(vector(element_type, lanes), x)
        if lanes == 1:
            return x
        type_ = vector(x.type, lanes)
        first = self.op(type_, f"insertelement {type_} poison, {x.type} {x.text}, i32 0").text
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.op(type_, f"shufflevector {type_} {first}, {type_} poison, {zeros}")

    def iota(self, lanes: int, element_type: str = "i64") -> Value:
        """0, 1, 2 ... in the lanes."""
        return _iota(vector(element_type, lanes), lanes)

    def lanes(self, n: Int, lanes: int) -> Value:
        """Mask of `lanes` truth values whose first min(n, lanes) are set; n >= 0."""
        if isinstance(n, int):
            return lanes_of(vector("i1", lanes), [i < n for i in range(lanes)])
        if lanes == 1:
            return self.value(self.cmp("ne", n, 0))
        count = self.value(self.umin(n, lanes))
        if self.module.target.has_avx512 and lanes in (8, 16, 32):
            ones = self.sub(self.value(self.shl(1, count)), 1)
            return self.bitcast(self.trunc(ones, f"i{lanes}"), vector("i1", lanes))
        compared = "i32" if lanes * 4 <= self.module.target.vector_bytes else "i64" if lanes == 2 else "i8"
        counts = self.splat(self.trunc(count, compared), lanes)
        return self.value(self.cmp("ult", self.iota(lanes, compared), counts))

    def extract(self, v: Value, lane: Int) -> Value:
        if v.width == 1:
            return v
        return self.op(v.element, f"extractelement {v}, {self.value(lane)}")

    def insert(self, v: Value, x: Number, lane: Int) -> Value:
        if v.width == 1:
            return self.value(x, v.type)
        return self.op(v.type, f"insertelement {v}, {self.value(x, v.element)}, {self.value(lane)}")

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Lanes of `a` (0..) and `b` (width..) in the given order; -1 leaves a lane undefined."""
        type_ = vector(a.element, len(lanes))
        second = b.text if b is not None else "poison"
        if len(lanes) == 1:
            return self.extract(a if lanes[0] < a.width or b is None else b, lanes[0] % a.width)
        both = f"{a.type} {a.text}, {a.type} {second}"
        return self.op(type_, f"shufflevector {both}, {_picks(tuple(lanes))}")

    def concat(self, a: Value, b: Value) -> Value:
        """The lanes of `a`, then those of `b`."""
        return self.shuffle(a, b, range(2 * a.width))

    def part(self, v: Value, first: int, count: int) -> Value:
        """`count` lanes of `v` from `first` on."""
        return self.shuffle(v, None, range(first, first + count))

    def done_first(self, values: Sequence[Value]) -> list[Value]:
        """`values`, computed before what is written later is loaded: so a tile takes its rows one at a time.

        Only WebAssembly needs it: LLVM orders its code by the stack of that machine, not by registers, and
        engines keep the order, so that a tile would hold the elements of all its rows at once and spill.
        """
        if not self.module.target.web:
            return list(values)
        return [self.op(x.type, f'call {x.type} asm sideeffect "", "=r,0,~{{memory}}"({x})') for x in values]

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """W vectors of W lanes -> their W x W transpose, in log2(W) butterfly stages."""
        out, lanes = list(rows), len(rows)
        if self.module.target.web and rows[0].type == "<4 x i8>":
            return self._transpose_words(rows)
        stride = lanes // 2
        while stride:
            low = [i if not i & stride else lanes + i - stride for i in range(lanes)]
            high = [i + stride if not i & stride else lanes + i for i in range(lanes)]
            for i in range(lanes):
                if not i & stride:
                    a, b = out[i], out[i + stride]
                    out[i], out[i + stride] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            stride //= 2
        return out

    def _transpose_words(self, rows: Sequence[Value]) -> list[Value]:
        """4 x 4 bytes by one shuffle of a whole register. Engines need up to ten instructions for each, and
        LLVM would make several of this one, so that it may not see where the words come from."""
        words = self.done_first([self.bitcast(row, "i32") for row in rows])
        whole = self.splat(words[0], 4)
        for i, word in enumerate(words[1:], 1):
            whole = self.insert(whole, word, i)
        (whole,) = self.done_first([whole])
        lanes = [4 * j + i for i in range(4) for j in range(4)]
        (turned,) = self.done_first([self.shuffle(self.bitcast(whole, "<16 x i8>"), None, lanes)])
        parts = self.bitcast(turned, "<4 x i32>")
        return [self.bitcast(self.extract(parts, i), "<4 x i8>") for i in range(4)]

    def reduce(self, combine: Callable[[Value, Value], Number], v: Value) -> Value:
        """All lanes combined into one scalar in a fixed tree: lane i with lane i + width/2, then again."""
        while v.width > 1:
            half = v.width // 2
            v = self.value(combine(self.part(v, 0, half), self.part(v, half, half)))
        return v

    def reduce_add(self, v: Value) -> Value:
        return self.reduce(self.fadd if is_float(v.type) else self.add, v)

    def any_lane(self, mask: Value) -> Value:
        """Whether any lane of a mask is set."""
        if mask.width == 1:
            return mask
        word = self.bitcast(mask, f"i{mask.width}")
        return self.value(self.cmp("ne", word, 0))

    # ---- dot-product instructions of low precision

    def dot_bf16(self, total: Value, a: Value, b: Value) -> Value:
        """<16 x float> total + pairs of <32 x bfloat> products."""
        name, twin = "llvm.x86.avx512bf16.dpbf16ps.512", twins.dot_bf16
        return self.intrinsic(name, total.type, total, a, b, feature="avx512bf16", twin=twin)

    def round_to_bf16(self, low: Value, high: Value) -> Value:
        """Two <16 x float> as <32 x bfloat>, ties to even; denormals become zeros, as `dot_bf16` reads."""
        type_ = vector("bfloat", 2 * low.width)
        name, twin = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", twins.round_two_to_bf16
        return self.intrinsic(name, type_, high, low, feature="avx512bf16", twin=twin)

    def dot_u8i8(self, total: Value, a: Value, b: Value) -> Value:
        """i32 `total` + quads of i8 products, `a` unsigned and `b` signed: one x86 register of each."""
        return self._vnni("vpdpbusd", total, a, b, twins.dot_u8i8)

    def dot_i8(self, total: Value, a: Value, b: Value) -> Value:
        """i32 `total` + quads of signed i8 products: one AArch64 register of each."""
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return self.intrinsic(name, total.type, total, a, b, feature="dotprod")

    def dot_i8i7(self, total: Value, a: Value, b: Value) -> Value:
        """i32 `total` + quads of i8 products, `a` signed and `b` of seven bits, unsigned: one register of
        WebAssembly each."""
        name = "llvm.wasm.relaxed.dot.i8x16.i7x16.add.signed"
        return self.intrinsic(name, total.type, a, b, total, feature="relaxed-simd")

    def add_dot_i16(self, total: Value, a: Value, b: Value) -> Value:
        """i32 `total` + pairs of i16 products: one x86 register of each."""
        return self._vnni("vpdpwssd", total, a, b, twins.dot_i16)

    def _vnni(self, name: str, total: Value, a: Value, b: Value, twin: Callable[..., Value]) -> Value:
        bits, feature = {8: (256, "avxvnni"), 16: (512, "avx512vnni")}[total.width]
        full = f"llvm.x86.avx512.{name}.{bits}"  # of both: LLVM chooses the encoding
        return self.intrinsic(full, total.type, total, a, b, feature=feature, twin=twin)

    def dot_i16(self, a: Value, b: Value) -> Value:
        """Sums of neighbouring pairs of 16-bit products, as i32: one register of each."""
        sums = vector("i32", a.width // 2)
        if self.module.target.web:
            return self.intrinsic("llvm.wasm.dot", sums, a, b, feature="simd128")
        names = {
            8: ("sse2.pmadd.wd", "sse2"),
            16: ("avx2.pmadd.wd", "avx2"),
            32: ("avx512.pmaddw.d.512", "avx512bw"),
        }
        name, feature = names[a.width]
        return self.intrinsic(f"llvm.x86.{name}", sums, a, b, feature=feature, twin=twins.pairs_i16)

    def saturating_dot_u8i8(self, a: Value, b: Value) -> Value:
        """Sums of neighbouring pairs of i8 products as i16, saturated; `a` unsigned, `b` signed: one x86
        register of each."""
        names = {
            16: ("ssse3.pmadd.ub.sw.128", "ssse3"),
            32: ("avx2.pmadd.ub.sw", "avx2"),
            64: ("avx512.pmaddubs.w.512", "avx512bw"),
        }
        name, feature = names[a.width]
        pairs = vector("i16", a.width // 2)
        return self.intrinsic(
            f"llvm.x86.{name}", pairs, a, b, feature=feature, twin=twins.saturating_dot_u8i8
        )
