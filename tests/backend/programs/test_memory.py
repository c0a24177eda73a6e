"""Regions: alignment, huge pages, guard pages, poison, and that memory goes back."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import ConfigError, RlxError
from rlx.runtime.memory import HUGE_PAGE, PAGE, GuardPageError, OutOfMemoryError, allocate, table

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@given(nbytes=st.integers(0, 3 * PAGE), exponent=st.integers(0, 16))
def test_a_region_is_zero_aligned_and_exact(nbytes: int, exponent: int) -> None:
    region = allocate(nbytes, align=1 << exponent)
    assert region.nbytes == nbytes == region.array.size
    assert region.address % (1 << exponent) == 0
    assert not region.array.any()
    region.array[:] = 7
    assert (region.array == 7).all()


@pytest.mark.parametrize("nbytes", [HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 100])
def test_large_regions_lie_on_huge_pages(nbytes: int) -> None:
    region = allocate(nbytes)
    assert region.address % (HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE) == 0
    region.array[-1] = 1
    assert region.nbytes == nbytes


@linux
def test_large_regions_are_advised_to_the_last_byte() -> None:
    region = allocate(3 * HUGE_PAGE + 5)
    for address in (region.address, region.address + region.nbytes - 1):
        assert "hg" in _mapping_flags(address)
    plain = allocate(3 * HUGE_PAGE + 5, huge=False)
    assert "hg" not in _mapping_flags(plain.address)


@linux
def test_memory_lives_as_long_as_its_array_and_no_longer() -> None:
    region = allocate(3 * HUGE_PAGE)
    address, array = region.address, region.array[10:20]
    del region
    array[:] = 3
    assert _mapping_flags(address)
    del array
    assert not _mapping_flags(address)


def _mapping_flags(address: int) -> list[str]:
    """Flags of the mapping around an address, from the kernel; empty when nothing is mapped there."""
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(part, 16) for part in head.split("-"))
                inside = low <= address < high
            elif inside and head == "VmFlags:":
                return line.split()[1:]
    return []


@pytest.mark.parametrize("nbytes", [0, 1, 100, PAGE, PAGE + 12, 3 * PAGE])
def test_a_guarded_region_is_usable_to_both_ends(nbytes: int) -> None:
    region = allocate(nbytes, guard=True)
    assert (region.address + nbytes) % PAGE == 0
    region.array[:] = 255
    assert int(region.array.sum(dtype=np.int64)) == 255 * nbytes
    region.check()


@pytest.mark.parametrize(
    "offset", ["region.nbytes", "-first - 1"], ids=["after the end", "before the first page"]
)
@pytest.mark.parametrize("access", ["cell.value", "cell.value = 1"], ids=["read", "write"])
def test_an_access_outside_a_guarded_region_faults(offset: str, access: str) -> None:
    script = f"""
import ctypes
from rlx.runtime.memory import allocate, PAGE
region = allocate(100, guard=True)
first = region.address % PAGE
cell = ctypes.c_uint8.from_address(region.address + {offset})
print("ready", flush=True)
{access}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "ready\n"
    assert done.returncode == -signal.SIGSEGV


def test_a_write_just_in_front_is_found() -> None:
    import ctypes

    region = allocate(100, guard=True)
    ctypes.c_uint8.from_address(region.address - 3).value = 0
    with pytest.raises(GuardPageError, match="3 bytes in front"):
        region.check()


def test_poison_reads_as_nan() -> None:
    region = allocate(64, poison=True)
    for dtype in (np.float16, np.float32, np.float64):
        assert np.isnan(region.array.view(dtype)).all()


def test_a_refused_allocation_says_how_much() -> None:
    with pytest.raises(OutOfMemoryError, match="1,152,921,504,606,846,976 bytes") as caught:
        allocate(1 << 60)
    assert isinstance(caught.value, (RlxError, MemoryError))


@pytest.mark.parametrize(("nbytes", "align"), [(-1, 64), (8, 0), (8, 48)])
def test_nonsense_is_refused(nbytes: int, align: int) -> None:
    with pytest.raises(ConfigError):
        allocate(nbytes, align=align)


def test_tables_start_on_a_cache_line() -> None:
    for count in range(20):
        made = table(count)
        assert made.size == count
        assert count == 0 or made.ctypes.data % 64 == 0
        assert not made.any()
