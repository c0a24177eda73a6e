"""Devices, buffers and state handles, on every device; host buffers as other libraries see them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.driver import (
    Buffer,
    BufferHandle,
    Device,
    available_devices,
    dlpack,
    is_available,
    known_devices,
    open_device,
    why_unavailable,
)
from rlx.driver.host import HostDevice
from rlx.errors import BufferUseError, DeviceError, DTypeError
from rlx.ir.dtype import ALL_DTYPES, DType, convert, pack

BYTE_DTYPES = [d for d in ALL_DTYPES if d.bits >= 8]


def sample(kind: DType, shape: tuple[int, ...] = (2, 3)) -> np.ndarray[Any, Any]:
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) % 2 + 1
    return convert(values, kind)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], kind: DType) -> bool:
    return a.shape == b.shape and pack(a, kind).tobytes() == pack(b, kind).tobytes()


# --- the registry ---------------------------------------------------------------------------------


def test_the_host_is_always_there() -> None:
    assert available_devices()[0] == "cpu"
    assert is_available("cpu") and why_unavailable("cpu") is None


def test_every_known_device_is_available_or_says_why() -> None:
    for entry in known_devices():
        reason = why_unavailable(entry.name)
        assert is_available(entry.name) == (reason is None) == (entry.name in available_devices())
        if reason is not None:
            with pytest.raises(DeviceError) as caught:
                open_device(entry.name)
            assert reason in str(caught.value) and entry.name in str(caught.value)


def test_a_missing_package_and_a_missing_driver_are_named(
    monkeypatch: pytest.MonkeyPatch, require: Any
) -> None:
    from rlx.driver.opencl import platform

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyopencl", None)
        platform.cl.cache_clear()
        assert "package pyopencl is missing" in (why_unavailable("opencl") or "")
        assert "opencl" not in available_devices()
    platform.cl.cache_clear()
    require("opencl")
    with monkeypatch.context() as patch:
        import pyopencl

        def no_platforms() -> list[Any]:
            raise pyopencl.LogicError("PLATFORM_NOT_FOUND_KHR")

        patch.setattr(pyopencl, "get_platforms", no_platforms)
        assert "no OpenCL driver answers" in (why_unavailable("opencl") or "")
        assert "pocl-opencl-icd" in (why_unavailable("opencl") or "")
    assert is_available("opencl")


def test_unknown_devices_are_an_error() -> None:
    for ask in (is_available, why_unavailable, open_device):
        with pytest.raises(DeviceError, match="unknown device 'cpuu'; RLX knows cpu, opencl"):
            ask("cpuu")  # type: ignore[operator]


def test_a_device_is_opened_once_and_states_its_facts(on: Device) -> None:
    assert open_device(on.name) is on and open_device(on) is on
    facts = on.capabilities
    assert facts.description and facts.compute_units >= 1
    assert facts.alignment >= 64 and facts.alignment & (facts.alignment - 1) == 0
    assert 0 < facts.max_allocation <= facts.total_memory
    assert facts.unified_memory == (on.name == "cpu")


def test_what_a_program_is_told_is_no_fact_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = HostDevice().capabilities.compute_units
    monkeypatch.setenv("RLX_THREADS", str(cores + 5))
    assert HostDevice().capabilities.compute_units == cores


# --- transfers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_DTYPES, ids=str)
def test_values_survive_the_way_to_a_device_and_back(on: Device, kind: DType) -> None:
    array = sample(kind)
    there = Buffer.of(array).to_device(on)
    assert (there.device, there.dtype, there.shape, there.nbytes) == (on.name, kind, (2, 3), kind.nbytes(6))
    back = there.to_host()
    assert back.device == "cpu" and same(back.read(), array, kind)
    assert same(there.read(), array, kind)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5)])
def test_every_shape_can_be_moved(on: Device, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape)
    assert np.array_equal(Buffer.of(array).to_device(on).read(), array)


def test_write_replaces_the_values_and_checks_them(on: Device) -> None:
    buffer = Buffer.empty((2, 2), "i32", on)
    assert not buffer.read().any()
    buffer.write(np.int32([[1, 2], [3, 4]]))
    with pytest.raises(DTypeError, match="holds i32, not int64"):
        buffer.write(np.zeros((2, 2), np.int64))
    with pytest.raises(BufferUseError, match=r"shape \(2, 2\), the array \(4,\)"):
        buffer.write(np.zeros(4, np.int32))
    assert buffer.read().tolist() == [[1, 2], [3, 4]]


def test_views_share_the_memory_and_stay_inside(on: Device) -> None:
    buffer = Buffer.empty((8,), "f32", on)
    buffer.view("i16", (2, 2), offset=8).write(np.int16([[1, 2], [3, 4]]))
    assert buffer.read().view(np.int16)[4:8].tolist() == [1, 2, 3, 4]
    for offset in (-4, 28):
        with pytest.raises(BufferUseError, match=r"outside|leaves the buffer"):
            buffer.view("f32", (2,), offset=offset)


def test_device_memory_is_not_read_as_host_memory(require: Any) -> None:
    require("opencl")
    buffer = Buffer.of(np.float32([1, 2])).to_device("opencl")
    uses: list[Callable[[], object]] = [
        lambda: np.asarray(buffer),
        buffer.numpy,
        buffer.memoryview,
        buffer.__dlpack__,
        buffer.__dlpack_device__,
        lambda: buffer.address,
    ]
    for use in uses:
        with pytest.raises(DeviceError, match=r"in opencl memory and cannot be .*; call to_host\(\) first"):
            use()


def test_host_buffers_are_not_copied_without_need() -> None:
    array = np.float32([1, 2])
    buffer = Buffer.of(array)
    assert buffer.to_host() is buffer and buffer.address == array.ctypes.data
    array[0] = 9
    assert np.asarray(buffer)[0] == 9 and np.asarray(buffer).base is not None
    assert np.array(buffer, dtype=np.float64).tolist() == [9, 2]


def test_arrays_with_holes_are_refused() -> None:
    with pytest.raises(BufferUseError, match="is not dense; copy it with ascontiguousarray"):
        Buffer.of(np.zeros((4, 4))[:, :2])


# --- DLPack ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BYTE_DTYPES, ids=str)
@pytest.mark.parametrize("version", [None, (1, 0)], ids=["old", "versioned"])
def test_dlpack_goes_out_and_in_without_a_copy(kind: DType, version: tuple[int, int] | None) -> None:
    class Producer:
        def __init__(self, buffer: Buffer) -> None:
            self.buffer = buffer

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.buffer.__dlpack__(max_version=version)

    buffer = Buffer.of(sample(kind))
    taken = Buffer.from_dlpack(Producer(buffer))
    assert taken.dtype is kind and taken.shape == (2, 3) and taken.address == buffer.address
    assert same(taken.read(), sample(kind), kind)


NUMPY_KNOWS = [d for d in BYTE_DTYPES if d.np.isbuiltin == 1]


@pytest.mark.parametrize("kind", NUMPY_KNOWS, ids=str)
def test_numpy_takes_and_gives_dlpack(kind: DType) -> None:
    buffer = Buffer.of(sample(kind))
    array = np.from_dlpack(buffer)
    assert array.ctypes.data == buffer.address and array.dtype == kind.np
    back = Buffer.from_dlpack(array)
    assert back.address == buffer.address and back.dtype is kind


def test_torch_takes_and_gives_dlpack(require: Any) -> None:
    require("torch")
    import torch

    for kind, theirs in (
        ("f32", torch.float32),
        ("bf16", torch.bfloat16),
        ("i64", torch.int64),
        ("bool", torch.bool),
    ):
        buffer = Buffer.of(sample(next(d for d in BYTE_DTYPES if d.name == kind)))
        tensor = torch.from_dlpack(buffer)
        assert tensor.dtype == theirs and tensor.data_ptr() == buffer.address
        back = Buffer.from_dlpack(tensor)
        assert back.address == buffer.address and back.dtype.name == kind


def test_exported_memory_lives_as_long_as_its_consumer() -> None:
    array = np.arange(4.0)
    alive = weakref.ref(array)
    held = len(dlpack._exports)
    consumer = np.from_dlpack(Buffer.of(array))
    del array
    gc.collect()
    assert alive() is not None and consumer.tolist() == [0, 1, 2, 3]
    del consumer
    gc.collect()
    assert alive() is None and len(dlpack._exports) == held


def test_a_capsule_that_nobody_takes_is_freed() -> None:
    held = len(dlpack._exports)
    for version in (None, (1, 0)):
        capsule = Buffer.of(np.zeros(3)).__dlpack__(max_version=version)
        assert len(dlpack._exports) == held + 1
        del capsule
        assert len(dlpack._exports) == held


def test_imported_memory_is_given_back() -> None:
    array = np.arange(4.0)
    alive = weakref.ref(array)
    buffer = Buffer.from_dlpack(array)
    view = buffer.numpy()
    del array, buffer
    gc.collect()
    assert alive() is not None and view.tolist() == [0, 1, 2, 3]
    del view
    gc.collect()
    assert alive() is None


def test_read_only_memory_stays_read_only() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    buffer = Buffer.of(array)
    taken = Buffer.from_dlpack(buffer)
    assert not taken.numpy().flags.writeable
    with pytest.raises(BufferUseError, match="read-only"):
        taken.write(np.zeros(3, np.int64))
    with pytest.raises(BufferUseError, match="needs a consumer that speaks DLPack 1"):
        buffer.__dlpack__()


def test_dlpack_refusals() -> None:
    with pytest.raises(DTypeError, match="DLPack has no packed i4"):
        Buffer.of(sample(next(d for d in ALL_DTYPES if d.name == "i4"))).__dlpack__()
    with pytest.raises(BufferUseError, match="is not dense; make it contiguous first"):
        Buffer.from_dlpack(np.zeros((4, 4))[:, :2])
    with pytest.raises(BufferUseError, match="no streams"):
        Buffer.of(np.zeros(1)).__dlpack__(stream=1)
    copied = Buffer.of(np.zeros(1))
    capsule = copied.__dlpack__(copy=True)
    assert capsule is not None


# --- the buffer protocol --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BYTE_DTYPES, ids=str)
def test_memoryviews_show_the_bytes(kind: DType) -> None:
    buffer = Buffer.of(sample(kind))
    view = buffer.memoryview()
    assert view.shape == (2, 3) and view.nbytes == buffer.nbytes
    assert view.tobytes() == pack(buffer.read(), kind).tobytes()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python classes export buffers from 3.12 on")
def test_memoryview_of_a_buffer() -> None:
    assert memoryview(Buffer.of(np.int16([1, 2]))).tolist() == [1, 2]  # type: ignore[arg-type]


def test_buffers_are_made_from_bytes_like_objects() -> None:
    room = bytearray(8)
    buffer = Buffer.of(room)
    assert buffer.dtype.name == "u8" and buffer.shape == (8,)
    buffer.numpy()[3] = 7
    assert room[3] == 7
    bits = np.array([1.5], ml_dtypes.bfloat16).view(np.uint16)
    assert Buffer.of(bits, "bf16").read().astype(np.float32).tolist() == [1.5]
    with pytest.raises(DTypeError, match="uint8 elements cannot be the bits of bf16; give 16-bit ones"):
        Buffer.of(room, "bf16")


# --- state ----------------------------------------------------------------------------------------


def test_state_is_bound_once_and_survives(on: Device) -> None:
    handle = BufferHandle("cache", (2, 3), "f16")
    with pytest.raises(BufferUseError, match=r"state 'cache' has no memory yet; call bind\(device\)"):
        _ = handle.buffer
    buffer = handle.bind(on)
    assert handle.bind(on) is buffer and not handle.read().any()
    handle.write(np.ones((2, 3), np.float16))
    assert (handle.buffer.read() == 1).all()
    handle.reset()
    assert not handle.read().any()


def test_state_starts_from_its_initial_value(on: Device) -> None:
    start = np.int64([3, 4])
    handle = BufferHandle("step", (2,), "i64", initial=start)
    handle.bind(on)
    handle.write(np.int64([8, 9]))
    other = handle.fresh()
    other.bind(on)
    assert other.read().tolist() == [3, 4] and handle.read().tolist() == [8, 9]
    handle.reset()
    assert handle.read().tolist() == [3, 4]


def test_state_does_not_move_between_devices(require: Any) -> None:
    require("opencl")
    handle = BufferHandle("cache", (2,), "f32")
    handle.bind("cpu")
    with pytest.raises(
        BufferUseError, match=r"state 'cache' lives on cpu; use fresh\(\) to bind it to opencl"
    ):
        handle.bind("opencl")


def test_initial_values_are_checked() -> None:
    with pytest.raises(BufferUseError, match="state 's' is f32"):
        BufferHandle("s", (2,), "f32", initial=np.zeros(2))
