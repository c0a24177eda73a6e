"""Command streams of every device: order, events, errors at wait; kernels and faults of the OpenCL device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx.driver import Buffer, Device, DeviceLost, SyncStream, open_device
from rlx.errors import CompileError, CopyError, DeviceError, RlxError


def filled(on: Device, value: int, n: int = 8) -> Buffer:
    return Buffer.of(np.full(n, value, np.int32)).to_device(on)


def test_nothing_runs_before_submit(on: Device) -> None:
    stream, a, b = on.stream(), filled(on, 1), filled(on, 2)
    stream.copy(a, b)
    assert (b.read() == 2).all()
    stream.submit()
    stream.wait()
    assert (b.read() == 1).all()


def test_commands_run_in_order(on: Device) -> None:
    stream, a, b, out = on.stream(), filled(on, 1), filled(on, 2), np.zeros(8, np.int32)
    target = Buffer.of(out)
    order: list[str] = []
    stream.copy(a, b)
    stream.call(lambda: order.append("first"))
    stream.fill(a, 255)
    stream.call(lambda: order.append("second"))
    stream.copy(b, target)
    stream.copy(a, b)
    stream.submit_and_wait()
    assert order == ["first", "second"]
    assert (out == 1).all() and (a.read() == -1).all() and (b.read() == -1).all()


def test_copies_may_be_tiles(on: Device) -> None:
    matrix = np.arange(48, dtype=np.float32).reshape(6, 8)
    tile = Buffer.empty((4, 3), "f32", on)
    out = np.zeros((6, 8), np.float32)
    stream = on.stream()
    stream.copy(matrix[1:5, 2:5], tile)
    stream.copy(tile, out[1:5, 2:5])
    stream.submit_and_wait()
    expected = np.zeros_like(matrix)
    expected[1:5, 2:5] = matrix[1:5, 2:5]
    np.testing.assert_array_equal(out, expected)


def test_events_order_streams(on: Device) -> None:
    first, second = on.stream(), on.stream()
    a, b, c = filled(on, 1, 1 << 20), filled(on, 2, 1 << 20), filled(on, 3, 1 << 20)
    first.copy(a, b)
    event = first.submit()
    second.wait_for(event)
    second.copy(b, c)
    later = second.submit()
    later.wait()
    assert event.done() and later.done()
    first.wait()
    second.wait()
    assert (c.read() == 1).all()


def test_events_order_streams_of_different_devices(require: Callable[[str], None]) -> None:
    require("opencl")
    host, device = SyncStream(), open_device("opencl").stream()
    there, out = filled(open_device("opencl"), 7), np.zeros(8, np.int32)
    device.copy(there, out)
    host.wait_for(device.submit())
    seen: list[int] = []
    host.call(lambda: seen.append(int(out[0])))
    device.wait_for(host.submit())
    device.fill(there)
    device.submit_and_wait()
    host.wait()
    assert seen == [7] and not there.read().any()


def test_errors_surface_at_wait_and_the_stream_goes_on(on: Device) -> None:
    stream, a, b = on.stream(), filled(on, 1), filled(on, 2)

    def broken() -> None:
        raise ValueError("no luck")

    stream.call(broken)
    stream.copy(a, b)
    event = stream.submit()
    with pytest.raises(DeviceError, match="host function in a stream raised ValueError: no luck") as caught:
        stream.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert (b.read() == 2).all(), "commands behind the failed one must not run"
    assert event.done()
    with pytest.raises(RlxError, match="no luck"):
        event.wait()
    stream.wait()  # the error was reported once
    stream.copy(a, b)
    stream.submit_and_wait()
    assert (b.read() == 1).all()


def test_work_behind_a_failed_event_does_not_run(on: Device) -> None:
    first, second, a, b = on.stream(), on.stream(), filled(on, 1), filled(on, 2)

    def broken() -> None:
        raise ValueError("no luck")

    first.call(broken)
    second.wait_for(first.submit())
    second.copy(a, b)
    second.submit()
    with pytest.raises(RlxError, match="no luck"):
        second.wait()
    assert (b.read() == 2).all()
    with pytest.raises(RlxError, match="no luck"):
        first.wait()


def test_bad_commands_are_refused_when_recorded(on: Device) -> None:
    stream, a, b = on.stream(), filled(on, 1, 8), filled(on, 2, 4)
    with pytest.raises(CopyError, match="cannot copy 32 bytes into a destination of 16 bytes"):
        stream.copy(a, b)
    with pytest.raises(CopyError, match="overlap"):
        stream.copy(a.view("i32", (4,)), a.view("i32", (4,), offset=8))
    with pytest.raises(DeviceError, match=r"a byte of 0\.\.255"):
        stream.fill(a, 256)
    stream.submit_and_wait()
    assert (a.read() == 1).all() and (b.read() == 2).all()


def test_a_host_stream_refuses_device_memory(require: Callable[[str], None]) -> None:
    require("opencl")
    stream, there = SyncStream(), filled(open_device("opencl"), 1)
    with pytest.raises(DeviceError, match="host stream cannot copy opencl memory"):
        stream.copy(there, np.zeros(8, np.int32))
    with pytest.raises(DeviceError, match="host stream cannot fill opencl memory"):
        stream.fill(there)
    with pytest.raises(DeviceError, match="OpenCL stream cannot fill cpu memory"):
        open_device("opencl").stream().fill(np.zeros(8))


# --- the OpenCL device ----------------------------------------------------------------------------

DOUBLE = """
__kernel void twice(__global float *data, long offset, long n) {
    long i = get_global_id(0);
    if (i < n) data[offset + i] *= 2;
}
"""


@pytest.fixture
def opencl(require: Callable[[str], None]) -> Any:
    require("opencl")
    return open_device("opencl")


def test_kernels_run_in_stream_order(opencl: Any) -> None:
    buffer = Buffer.of(np.arange(100, dtype=np.float32)).to_device(opencl)
    kernel = opencl.build(DOUBLE, "twice")
    stream, out = opencl.stream(), np.zeros(100, np.float32)
    stream.launch(kernel, [buffer.memory, np.int64(10), np.int64(50)], [64])
    stream.launch(kernel, [buffer.memory, np.int64(0), np.int64(20)], [64], [16])
    stream.copy(buffer, out)
    stream.submit_and_wait()
    expected = np.arange(100, dtype=np.float32)
    expected[10:60] *= 2
    expected[:20] *= 2
    np.testing.assert_array_equal(out, expected)


SLOW = """
__kernel void slow(__global float *data, long rounds) {
    float x = data[0];
    for (long k = 0; k < rounds; ++k) x = x * 0.999f + 1.0f;
    data[0] = x;
}
"""


def test_copies_run_while_a_kernel_runs(opencl: Any) -> None:
    """One work-item keeps one worker busy; the copy queue finishes on another before the kernel ends."""
    if opencl.capabilities.compute_units < 2:
        pytest.skip("overlap of kernel and copy needs 2 compute units")
    stream, kernel = opencl.stream(), opencl.build(SLOW, "slow")
    data, target = Buffer.empty((1,), "f32", opencl), Buffer.empty((1 << 20,), "u8", opencl)
    stream.launch(kernel, [data.memory, np.int64(1)], [1])
    stream.submit_and_wait()  # compiled and warm
    stream.launch(kernel, [data.memory, np.int64(1_000_000_000)], [1], [1])
    with opencl.copy_engine() as engine:
        running = stream.submit()
        source = np.full(1 << 20, 7, np.uint8)
        for _ in range(4):
            engine.wait(engine.issue(source, target))
        assert not running.done()
        assert engine.stats.bytes == 4 << 20
    stream.wait()
    assert running.done() and (target.read() == 7).all()


def test_kernel_text_that_does_not_compile_is_a_compile_error(opencl: Any) -> None:
    with pytest.raises(CompileError, match="OpenCL C of kernel broken does not compile"):
        opencl.build("__kernel void broken(__global float *x) { x[0] = nonsense; }", "broken")


def test_host_functions_are_counted_as_sync_points(opencl: Any) -> None:
    stream = opencl.stream()
    stream.call(lambda: None)
    stream.call(lambda: None)
    stream.submit_and_wait()
    assert stream.sync_points == 2


def test_an_allocation_beyond_the_device_is_a_clear_error(opencl: Any) -> None:
    with pytest.raises(DeviceError, match=r"cannot allocate .* at most"):
        opencl.allocate(opencl.capabilities.max_allocation * 1000)


def test_a_lost_device_says_so_and_can_be_opened_again(opencl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyopencl

    buffer = filled(opencl, 1)
    engine, stream = opencl.copy_engine(), opencl.stream()

    def gone(*args: object, **options: object) -> None:
        code = pyopencl.status_code.DEVICE_NOT_AVAILABLE
        raise pyopencl.RuntimeError(
            pyopencl._cl._ErrorRecord(msg="gone", code=code, routine="clEnqueueWriteBuffer")
        )

    with monkeypatch.context() as patch:
        patch.setattr(pyopencl, "enqueue_copy", gone)
        stream.copy(np.zeros(8, np.int32), buffer)
        stream.submit()
        with pytest.raises(DeviceLost, match="the OpenCL device was lost"):
            stream.wait()
    for use in (buffer.read, lambda: engine.issue(buffer, np.zeros(8, np.int32)), opencl.stream):
        with pytest.raises(DeviceLost, match=r"open it again with open_device\('opencl'\)"):
            use()
    again = open_device("opencl")
    assert again is not opencl
    fresh = filled(again, 3)
    assert (fresh.read() == 3).all()
    with pytest.raises(CopyError, match="belongs to a device that was lost"):
        again.copy_engine().issue(buffer, np.zeros(8, np.int32))
