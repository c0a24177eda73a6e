"""Objects are complete and stay within their target: every op, all runtime code, every named target.

An object that calls a function nobody has, or that holds an instruction the machine lacks, is only noticed on
that machine. Here all of them are read, whichever machine this is.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable

import pytest
from op_cases import ALL_OPS, Case, cases

from emission import emissions, first_cases, runtime_modules
from instructions import beyond, needed
from rlx.codegen.native.elf import defined_symbols, undefined_symbols
from rlx.codegen.native.irtext import Module
from rlx.codegen.native.jit import compile_object
from rlx.target.cpu import Target, resolve, targets

FIRST = first_cases()
C_LIBRARY = {
    "__errno_location",
    "clock_gettime",
    "memcpy",
    "memmove",
    "pread",
    "process_vm_readv",
    "sched_yield",
    "syscall",
}
"""What runtime code asks of the system; every process has these."""


@functools.lru_cache(maxsize=64)
def made(text: str, target: Target, passes: int = 0) -> bytes:
    return compile_object(text, target, passes=passes)


def check_cases(group: Iterable[Case], machines: Iterable[Target] | None = None) -> None:
    """Kernels call nothing but each other."""
    for emission in emissions(group, machines):
        place, there = f"{emission.label} on {emission.target.name}", set[str]()
        for text in emission.kernels.texts:
            code = made(text, emission.target)
            missing = set(undefined_symbols(code)) - there
            assert not missing, f"{place} calls {sorted(missing)}: write them in IR"
            there |= set(defined_symbols(code))
            assert not (found := beyond(code, emission.target)), f"{place} needs {found}"


@pytest.mark.parametrize("name", FIRST)
def test_op(name: str) -> None:
    """Each op for two targets, others for each op: every target has its share. All of them are slow."""
    named = targets()
    first = zlib.crc32(name.encode())
    check_cases([FIRST[name]], [named[(first + step) % len(named)] for step in (0, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", [op.name for op in ALL_OPS])
def test_every_sample(name: str) -> None:
    check_cases(cases(next(op for op in ALL_OPS if op.name == name)))


@pytest.mark.parametrize("all_reductions", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", targets(), ids=lambda t: t.name)
def test_runtime(target: Target, all_reductions: bool) -> None:
    """Pool, driver, reader, copies, exchanges and reductions over ranks, the guard of mapped files."""
    for name, text, passes in runtime_modules(target, all_reductions):
        code = made(text, target, passes)
        missing = set(undefined_symbols(code)) - C_LIBRARY
        assert not missing, f"{name} calls {sorted(missing)}: write them in IR"
        assert not (found := beyond(code, target)), f"{name} on {target.name} needs {found}"


BF16, V4, VNNI, V3, V2 = (resolve(f"x86-64-{name}") for name in ("v4-bf16-vnni", "v4", "v3-vnni", "v3", "v2"))
V1, ARM, AMX = resolve("x86-64"), resolve("aarch64"), resolve("x86-64-v4-amx")
SINGLE, DOUBLE, NARROW = "<16 x float>", "<8 x double>", "<32 x bfloat>"


def body(type_: str, text: str, declared: str = "") -> str:
    return f"define {type_} @f({type_} %a, {type_} %b) {{ {text} }}\n{declared}"


def matrices(*products: str) -> tuple[Target, str]:
    calls = " ".join(f"call void @llvm.x86.{name}(i8 0, i8 1, i8 2)" for name in products)
    declared = "\n".join(f"declare void @llvm.x86.{name}(i8, i8, i8)" for name in products)
    return AMX, f"define void @f() {{ {calls} ret void }}\n{declared}"


PLANTED = {
    "amx-int8": matrices("tdpbusd", "tdpbssd"),
    "amx-bf16": matrices("tdpbf16ps"),
    "amx-tile": (
        AMX,
        "define void @f(ptr %a, i64 %n) { call void @llvm.x86.ldtilecfg(ptr %a) "
        "call void @llvm.x86.tileloadd64(i8 5, ptr %a, i64 %n) call void @llvm.x86.tilezero(i8 6) "
        "call void @llvm.x86.tilestored64(i8 5, ptr %a, i64 %n) "
        "call void @llvm.x86.tilerelease() ret void }\n"
        "declare void @llvm.x86.ldtilecfg(ptr)\n"
        "declare void @llvm.x86.tilezero(i8)\n"
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)\n"
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)\n"
        "declare void @llvm.x86.tilerelease()",
    ),
    "avx512bf16": (
        BF16,
        body(
            SINGLE,
            f"%x = bitcast {SINGLE} %b to {NARROW} "
            f"%r = call {SINGLE} @llvm.x86.avx512bf16.dpbf16ps.512({SINGLE} %a, {NARROW} %x, {NARROW} %x) "
            f"ret {SINGLE} %r",
            f"declare {SINGLE} @llvm.x86.avx512bf16.dpbf16ps.512({SINGLE}, {NARROW}, {NARROW})",
        ),
    ),
    "avx512vnni": (
        BF16,
        body(
            "<16 x i32>",
            "%x = bitcast <16 x i32> %b to <64 x i8> "
            "%r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %a, <64 x i8> %x, <64 x i8> %x) "
            "ret <16 x i32> %r",
            "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)",
        ),
    ),
    "avxvnni": (
        VNNI,
        body(
            "<8 x i32>",
            "%x = bitcast <8 x i32> %b to <32 x i8> "
            "%s = call <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32> %a, <32 x i8> %x, <32 x i8> %x) "
            "%y = bitcast <8 x i32> %b to <16 x i16> "
            "%r = call <8 x i32> @llvm.x86.avx512.vpdpwssd.256(<8 x i32> %s, <16 x i16> %y, <16 x i16> %y) "
            "ret <8 x i32> %r",
            "declare <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32>, <32 x i8>, <32 x i8>)\n"
            "declare <8 x i32> @llvm.x86.avx512.vpdpwssd.256(<8 x i32>, <16 x i16>, <16 x i16>)",
        ),
    ),
    "avx512f": (V4, body(DOUBLE, f"%r = fadd {DOUBLE} %a, %b ret {DOUBLE} %r")),
    "avx512dq": (V4, body("<8 x i64>", "%r = mul <8 x i64> %a, %b ret <8 x i64> %r")),
    "avx512bw": (V4, body("<64 x i8>", "%r = add <64 x i8> %a, %b ret <64 x i8> %r")),
    "avx": (V3, body("float", "%r = fadd float %a, %b ret float %r")),
    "avx2": (V3, body("<8 x i32>", "%r = add <8 x i32> %a, %b ret <8 x i32> %r")),
    "fma": (
        V3,
        body(
            "float",
            "%r = call float @llvm.fma.f32(float %a, float %b, float %b) ret float %r",
            "declare float @llvm.fma.f32(float, float, float)",
        ),
    ),
    "f16c": (
        V3,
        body(
            "<8 x float>",
            "%x = fptrunc <8 x float> %a to <8 x half> %r = fpext <8 x half> %x to <8 x float> "
            "ret <8 x float> %r",
        ),
    ),
    "bmi": (V3, body("i64", "%x = xor i64 %a, -1 %r = and i64 %x, %b ret i64 %r")),
    "bmi2": (V3, body("i64", "%r = shl i64 %a, %b ret i64 %r")),
    "lzcnt": (
        V3,
        body(
            "i64",
            "%r = call i64 @llvm.ctlz.i64(i64 %a, i1 0) ret i64 %r",
            "declare i64 @llvm.ctlz.i64(i64, i1)",
        ),
    ),
    "popcnt": (
        V3,
        body("i64", "%r = call i64 @llvm.ctpop.i64(i64 %a) ret i64 %r", "declare i64 @llvm.ctpop.i64(i64)"),
    ),
    "movbe": (
        V3,
        "define i64 @f(ptr %p) { %a = load i64, ptr %p %r = call i64 @llvm.bswap.i64(i64 %a) ret i64 %r }\n"
        "declare i64 @llvm.bswap.i64(i64)",
    ),
    "sse4.2": (
        V2,
        body(
            "<2 x i64>",
            "%c = icmp sgt <2 x i64> %a, %b %r = sext <2 x i1> %c to <2 x i64> ret <2 x i64> %r",
        ),
    ),
    "sse4.1": (V2, body("<4 x i32>", "%r = mul <4 x i32> %a, %b ret <4 x i32> %r")),
    "ssse3": (
        V2,
        body(
            "<16 x i8>",
            "%r = call <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8> %a, <16 x i8> %b) ret <16 x i8> %r",
            "declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)",
        ),
    ),
    "sse3": (
        V2,
        body(
            "<2 x double>",
            "%r = shufflevector <2 x double> %a, <2 x double> poison, <2 x i32> zeroinitializer "
            "ret <2 x double> %r",
        ),
    ),
    "sse2": (V1, body("double", "%r = fadd double %a, %b ret double %r")),
    "neon": (ARM, body("<4 x float>", "%r = fadd <4 x float> %a, %b ret <4 x float> %r")),
    "fp-armv8": (ARM, body("float", "%r = fadd float %a, %b ret float %r")),
}


@pytest.mark.parametrize("feature", PLANTED)
def test_the_reader_sees_a_planted_instruction(feature: str) -> None:
    target, text = PLANTED[feature]
    code = compile_object(text, target)
    assert feature in needed(code, target)
    assert not beyond(code, target)
    lesser = Target(**{**vars(target), "features": tuple(f for f in target.features if f != feature)})
    assert feature in beyond(code, lesser)


@pytest.mark.parametrize("target", targets(), ids=lambda t: t.name)
@pytest.mark.parametrize("element", ["half", "bfloat"])
@pytest.mark.parametrize("lanes", [1, 8])
def test_narrow_floats_outlive_a_block(target: Target, element: str, lanes: int) -> None:
    """LLVM converts 16-bit floats between blocks by calls to a library, if it sees them as floats."""
    stored = element if lanes == 1 else f"<{lanes} x {element}>"
    module = Module(target)
    f = module.function("f", [("ptr", "from"), ("ptr", "to"), ("i64", "n")])
    source, to, n = f.args
    found = f.load(stored, source)
    rounded = f.fptrunc(f.fadd(f.fpext(found, "float"), 1.0), element)
    f.loop(0, n, 1, [], lambda i, _: f.store(rounded, f.gep(to, i, stored)))
    f.loop(0, n, 1, [], lambda i, _: f.store(f.fpext(found, "float"), f.gep(to, i, "float")))
    assert undefined_symbols(compile_object(module.text(), target)) == ()
