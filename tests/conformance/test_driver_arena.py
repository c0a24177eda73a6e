"""Arenas of every device: typed round trips of all dtypes, exact lengths, untouched neighbours."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rlx.driver import ArenaSlot, Device, HostArena, read_typed_to_f32, write_typed_from_f32
from rlx.errors import BufferUseError, DTypeError, RlxError
from rlx.ir.dtype import ALL_DTYPES, DType, dtype, pack, unpack

GUARD = 0xA5
NARROW_FLOATS = [d for d in ALL_DTYPES if d.is_float and d.bits <= 16]

same_device = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def all_patterns(kind: DType) -> np.ndarray[Any, Any]:
    """Every bit pattern of a dtype of at most 16 bits, as an array of that dtype."""
    codes = np.arange(1 << kind.bits, dtype=np.uint16 if kind.bits == 16 else np.uint8)
    return codes.view(kind.np)


def random_values(kind: DType, n: int) -> np.ndarray[Any, Any]:
    """Random bits, which are valid values of every dtype but bool."""
    rng = np.random.default_rng(n)
    if kind.is_bool:
        return rng.integers(0, 2, n).astype(bool)
    return unpack(rng.integers(0, 256, kind.nbytes(n), dtype=np.uint8), kind, n)


def bits(array: np.ndarray[Any, Any], kind: DType) -> bytes:
    return pack(array, kind).tobytes()


def guarded(on: Device, kind: DType, shape: tuple[int, ...]) -> Any:
    """An arena whose only slot lies between guard bytes."""
    size = dtype(kind).nbytes(int(np.prod(shape)))
    arena = on.arena({1: ArenaSlot(128, kind, shape)}, size=128 + size + 128)
    arena.memory.write(0, np.full(arena.size_bytes(), GUARD, np.uint8))
    return arena


def surroundings(arena: Any) -> np.ndarray[Any, Any]:
    """The bytes of the arena with those of slot 1 left out."""
    slot = arena.slot(1)
    everything = arena.memory.read(0, arena.size_bytes())
    return np.delete(everything, slice(slot.offset, slot.offset + slot.nbytes))


@pytest.mark.parametrize("kind", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 64, 1001])
def test_typed_round_trip_keeps_every_bit_and_the_neighbours(on: Device, kind: DType, n: int) -> None:
    arena = guarded(on, kind, (n,))
    values = random_values(kind, n)
    arena.write(1, values)
    back = arena.read(1)
    assert back.dtype == kind.np and back.shape == (n,)
    assert bits(back, kind) == bits(values, kind)
    assert (surroundings(arena) == GUARD).all()


@pytest.mark.parametrize("kind", [d for d in ALL_DTYPES if d.bits <= 16 and not d.is_bool], ids=str)
def test_every_bit_pattern_survives_a_typed_round_trip(on: Device, kind: DType) -> None:
    values = all_patterns(kind) if kind.bits >= 8 else random_values(kind, 1 << 12)
    arena = guarded(on, kind, values.shape)
    arena.write(1, values)
    assert bits(arena.read(1), kind) == bits(values, kind)


@pytest.mark.parametrize("kind", NARROW_FLOATS, ids=str)
def test_every_float_pattern_goes_through_f32_and_back(on: Device, kind: DType) -> None:
    values = all_patterns(kind)
    arena = guarded(on, kind, values.shape)
    arena.write(1, values)
    single = arena.read_output_f32(1, kind, values.size)
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single, values.astype(np.float32))  # widening is exact
    arena.memory.write(128, np.zeros(arena.slot(1).nbytes, np.uint8))
    arena.write_input_f32(1, kind, single)
    back = arena.read(1)
    finite = ~np.isnan(single)
    assert bits(back[finite], kind) == bits(values[finite], kind)
    assert np.isnan(back[~finite].astype(np.float32)).all()
    assert (surroundings(arena) == GUARD).all()


@pytest.mark.parametrize("kind", [d for d in ALL_DTYPES if d.is_int and d.bits <= 16], ids=str)
def test_every_small_integer_goes_through_f32_and_back(on: Device, kind: DType) -> None:
    values = np.arange(int(kind.min_value), int(kind.max_value) + 1).astype(kind.np)
    arena = guarded(on, kind, values.shape)
    arena.write_input_f32(1, kind, values.astype(np.float32))
    assert bits(arena.read(1), kind) == bits(values, kind)
    np.testing.assert_array_equal(arena.read_output_f32(1, kind, values.size), values.astype(np.float32))


# f32 in, value that must come out; halfway cases go to even, formats without infinity saturate.
CONVERSIONS = [
    ("bf16", [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf], [1, 1 + 2**-6, np.inf, np.inf, -np.inf]),
    ("f16", [2049, 2051, 65519.996, 65520, 2**-25, 3 * 2**-25], [2048, 2052, 65504, np.inf, 0, 2**-23]),
    ("f8e4m3fn", [17, 19, 1e9, -np.inf, 464], [16, 20, 448, -448, 448]),
    ("f8e5m2", [9, 11, 1e9, np.inf], [8, 12, np.inf, np.inf]),
    ("f8e4m3fnuz", [1e9, -1e9, -0.0], [240, -240, 0]),
    ("f8e5m2fnuz", [1e9, np.inf], [57344, 57344]),
    ("f4e2m1", [2.5, 3.5, 5, 99, np.nan], [2, 4, 4, 6, 0]),
    ("i8", [1.9, -1.9, 300, -300, np.nan], [1, -1, 127, -128, 0]),
    ("u64", [3e9, -1, 1e30], [3000000000, 0, 2**64]),
    ("bool", [0.0, -0.0, 0.5, np.nan], [0, 0, 1, 1]),
    ("c64", [1.5, -np.inf], [1.5, -np.inf]),
    ("f64", [0.1], [float(np.float32(0.1))]),
]


@pytest.mark.parametrize(("kind", "given_", "expected"), CONVERSIONS, ids=[c[0] for c in CONVERSIONS])
def test_f32_converts_by_the_rules(on: Device, kind: str, given_: list[float], expected: list[float]) -> None:
    arena = guarded(on, dtype(kind), (len(given_),))
    arena.write_input_f32(1, kind, np.float32(given_))
    assert arena.read_output_f32(1, kind, len(given_)).tolist() == expected


@pytest.mark.parametrize("kind", [d for d in ALL_DTYPES if d.is_float and d.has_nan], ids=str)
def test_nan_stays_nan(on: Device, kind: DType) -> None:
    arena = guarded(on, kind, (2,))
    arena.write_input_f32(1, kind, np.float32([np.nan, 1]))
    back = arena.read_output_f32(1, kind, 2)
    assert np.isnan(back[0]) and back[1] == 1


def test_an_imaginary_part_is_not_dropped_in_silence(on: Device) -> None:
    arena = guarded(on, dtype("c64"), (1,))
    arena.write(1, np.array([1 + 2j], np.complex64))
    with pytest.raises(DTypeError, match="imaginary part does not fit f32; read it typed"):
        arena.read_output_f32(1, "c64", 1)


F32 = np.zeros(4, np.float32)

REFUSED = {
    "too long": (lambda a: a.write(1, np.zeros(5, np.float16)), BufferUseError, r"\(4,\), the array \(5,\)"),
    "too short": (lambda a: a.write(1, np.zeros(3, np.float16)), BufferUseError, r"shape \(4,\)"),
    "wrong shape": (lambda a: a.write(1, np.zeros((2, 2), np.float16)), BufferUseError, r"\(2, 2\)"),
    "wrong dtype": (lambda a: a.write(1, F32), DTypeError, "holds f16, not float32"),
    "no slot": (lambda a: a.write(2, np.zeros(4, np.float16)), BufferUseError, "node 2 has no slot"),
    "read no slot": (lambda a: a.read(2), BufferUseError, "node 2 has no slot"),
    "f32 too long": (lambda a: a.write_input_f32(1, "f16", [0.0] * 5), BufferUseError, "4 elements, not 5"),
    "f32 too short": (lambda a: a.write_input_f32(1, "f16", [1.0]), BufferUseError, "4 elements, not 1"),
    "f32 wrong dtype": (lambda a: a.write_input_f32(1, "bf16", F32), DTypeError, "holds f16, not bf16"),
    "not f32": (lambda a: a.write_input_f32(1, "f16", np.zeros(4)), DTypeError, "f32 data, got float64"),
    "unknown dtype": (lambda a: a.write_input_f32(1, "f17", F32), DTypeError, "unknown dtype 'f17'"),
    "f32 read length": (lambda a: a.read_output_f32(1, "f16", 3), BufferUseError, "4 elements, not 3"),
    "f32 read dtype": (lambda a: a.read_output_f32(1, "f32", 4), DTypeError, "holds f16, not f32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_change_nothing(on: Device, case: str) -> None:
    call, error, message = REFUSED[case]
    arena = guarded(on, dtype("f16"), (4,))
    with pytest.raises(error, match=message) as caught:
        call(arena)
    assert isinstance(caught.value, RlxError)
    assert (arena.memory.read(0, arena.size_bytes()) == GUARD).all()


def test_slots_are_found_by_id(on: Device) -> None:
    arena = on.arena({3: ArenaSlot(0, "f32", (2, 2)), 8: ArenaSlot(128, "i4", (5,))})
    assert (arena.byte_offset(3), arena.byte_offset(8), arena.byte_offset(4)) == (0, 128, None)
    assert arena.has_buffer(8) and not arena.has_buffer(4)
    assert arena.size_bytes() == 131
    assert arena.device == on.name
    assert not arena.read(3).any()  # fresh memory is zero


def test_a_flat_array_fits_a_shaped_slot(on: Device) -> None:
    arena = on.arena({3: ArenaSlot(0, "i32", (2, 3))})
    arena.write(3, np.arange(6, dtype=np.int32))
    assert arena.read(3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_strided_arrays_are_written_in_order(on: Device) -> None:
    arena = on.arena({3: ArenaSlot(0, "i32", (3, 2))})
    arena.write(3, np.arange(6, dtype=np.int32).reshape(2, 3).T)
    assert arena.read(3).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_slot_outside_the_arena_is_refused(on: Device) -> None:
    with pytest.raises(BufferUseError, match="slot of node 5 ends at byte 80, outside the arena of 72 bytes"):
        on.arena({5: ArenaSlot(64, "f32", (4,))}, size=72)


@same_device
@given(data=st.data())
def test_random_writes_change_only_their_slot(on: Device, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(ALL_DTYPES), min_size=1, max_size=6))
    slots, end = {}, 0
    for id, kind in enumerate(kinds):
        slot = ArenaSlot(end + data.draw(st.integers(0, 3)), kind, (data.draw(st.integers(0, 40)),))
        slots[id], end = slot, slot.offset + slot.nbytes
    arena = on.arena(slots, size=end + 7)
    model = np.full(end + 7, GUARD, np.uint8)
    arena.memory.write(0, model)
    for id in data.draw(st.permutations(list(slots))):
        slot = slots[id]
        values = random_values(slot.dtype, slot.elements)
        arena.write(id, values)
        model[slot.offset : slot.offset + slot.nbytes] = pack(values, slot.dtype)
    np.testing.assert_array_equal(arena.memory.read(0, end + 7), model)


# --- host arenas: addresses and views -------------------------------------------------------------


@pytest.mark.parametrize("alignment", [64, 256, 4096, 2 << 20])
@pytest.mark.parametrize("size", [0, 100, 5 << 20])
def test_host_arenas_are_aligned_as_planned(alignment: int, size: int) -> None:
    arena = HostArena({}, size=size, alignment=alignment)
    assert arena.base_address % alignment == 0 and arena.size_bytes() == size


def test_host_views_are_the_memory_itself() -> None:
    arena = HostArena({1: ArenaSlot(64, "bf16", (2, 3)), 2: ArenaSlot(128, "u4", (2,))})
    view = arena.view(1)
    assert view.ctypes.data == arena.base_address + 64
    view[1, 2] = 3
    assert arena.read(1).astype(np.float32)[1, 2] == 3
    arena.write(1, np.ones((2, 3), dtype("bf16").np))
    assert (view == 1).all()
    with pytest.raises(DTypeError, match="u4 elements are packed and have no view"):
        arena.view(2)


def test_views_keep_the_memory_alive() -> None:
    view = HostArena({1: ArenaSlot(0, "f32", (1 << 20,))}).view(1)
    view[:] = 7
    assert (view == 7).all()


def test_the_guard_page_of_a_debug_arena_stops_a_stray_write() -> None:
    program = (
        "import ctypes\n"
        "from rlx.driver import ArenaSlot, HostArena\n"
        "arena = HostArena({1: ArenaSlot(0, 'f32', (16,))}, guard=True)\n"
        "assert arena.base_address % 64 == 0\n"
        "ctypes.memset(arena.base_address, 1, 64)\n"
        "print('inside', flush=True)\n"
        "ctypes.memset(arena.base_address + 64, 1, 1)\n"
        "print('outside')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.stdout == "inside\n", run.stderr
    assert run.returncode != 0


def test_a_debug_arena_notices_bytes_written_in_front() -> None:
    import ctypes

    arena = HostArena({1: ArenaSlot(0, "f32", (16,))}, guard=True)
    arena.check()
    ctypes.memset(arena.base_address - 2, 1, 1)
    with pytest.raises(RlxError, match="2 bytes in front of the region"):
        arena.check()


def test_opencl_arenas_have_no_guard_pages(require: Any) -> None:
    require("opencl")
    from rlx.driver import open_device

    with pytest.raises(RlxError, match="OpenCL memory has no guard pages"):
        open_device("opencl").arena({}, guard=True)


# --- the helpers on plain bytes -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_DTYPES, ids=str)
def test_helpers_round_trip_small_values(kind: DType) -> None:
    values = np.float32([0, 1, 1, 0, 1])
    room = bytearray(b"\xa5" * (kind.nbytes(5) + 3))
    if kind.name == "f8e8m0":
        values = np.float32([1, 2, 0.5, 4, 1])  # it holds powers of two only
    assert write_typed_from_f32(room, kind, values, 5) == 5
    assert read_typed_to_f32(room, kind, 5).tolist() == values.tolist()
    assert room[kind.nbytes(5) :] == b"\xa5" * 3


def test_helpers_leave_the_other_bits_of_a_shared_byte() -> None:
    room = bytearray([0xFF, 0xFF])
    write_typed_from_f32(room, "u4", [1, 2, 3], 3)
    assert room.hex() == "21f3"
    room = bytearray([0xFF])
    write_typed_from_f32(room, "u2", [1], 4)
    assert room.hex() == "fd"


def test_helpers_refuse_wrong_lengths() -> None:
    room = bytearray(6)
    with pytest.raises(BufferUseError, match="4 values do not fit a slot of 3 elements"):
        write_typed_from_f32(room, "f16", np.ones(4, np.float32), 3)
    with pytest.raises(BufferUseError, match="4 values of f16 take 8 bytes, not the 6 given"):
        write_typed_from_f32(room, "f16", np.ones(4, np.float32), 4)
    assert room == bytearray(6)
    with pytest.raises(BufferUseError, match="4 values of f16 take 8 bytes, but there are 6"):
        read_typed_to_f32(room, "f16", 4)
    with pytest.raises(BufferUseError, match="read-only"):
        write_typed_from_f32(b"xx", "f16", [1.0], 1)
