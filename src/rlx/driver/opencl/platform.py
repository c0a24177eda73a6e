"""pyopencl, imported on first use; which device to take; OpenCL's errors in RLX's words."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from rlx.driver.base import DeviceLost
from rlx.errors import DeviceError, how_to_install

if TYPE_CHECKING:
    from pyopencl import Device

    from rlx.driver.opencl.device import OpenCLDevice


@functools.cache
def cl() -> ModuleType:
    """The pyopencl module."""
    import pyopencl

    return pyopencl


def missing() -> str | None:
    """What keeps OpenCL from working here, or None."""
    try:
        cl()
    except ImportError as error:
        return f"the package pyopencl is missing ({error}); {how_to_install('opencl')}"
    try:
        find()
    except DeviceError as error:
        return error.message
    return None


def find() -> Device:
    """The OpenCL device to use: the first GPU if there is one, else the first of any kind."""
    try:
        devices = [device for platform in cl().get_platforms() for device in platform.get_devices()]
    except cl().Error as error:
        raise DeviceError(
            f"no OpenCL driver answers ({error}); install one, for example the package pocl-opencl-icd"
        ) from error
    if not devices:
        raise DeviceError(
            "the OpenCL drivers have no device; install one, for example the package pocl-opencl-icd"
        )
    gpu = cl().device_type.GPU
    return next((device for device in devices if device.type & gpu), devices[0])


@contextmanager
def translated(device: OpenCLDevice, doing: str) -> Iterator[None]:
    """Errors of OpenCL inside the block become DeviceError; a vanished device is remembered as lost."""
    if device.lost:
        raise DeviceLost(
            f"cannot {doing}: the OpenCL device was lost; open it again with open_device('opencl')"
        )
    status = cl().status_code
    try:
        yield
    except (cl().Error, MemoryError) as error:
        code = getattr(error, "code", None)
        if code in (status.DEVICE_NOT_AVAILABLE, status.INVALID_CONTEXT):
            device.mark_lost()
            raise DeviceLost(
                f"cannot {doing}: the OpenCL device was lost ({error}); "
                "open it again with open_device('opencl')"
            ) from error
        if code == status.MEM_OBJECT_ALLOCATION_FAILURE or isinstance(error, MemoryError):
            raise DeviceError(
                f"cannot {doing}: the OpenCL device is out of memory ({error}); "
                "free buffers or use smaller sizes"
            ) from error
        raise DeviceError(f"cannot {doing}: OpenCL reported {error}") from error
