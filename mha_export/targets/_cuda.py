"""The few calls of the CUDA driver that a native TensorRT session needs, through ctypes.

Binding the driver itself spares the user a CUDA toolkit or another Python package: whoever can run
an engine has ``libcuda``.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import numpy as np

LIBRARIES = {"Linux": "libcuda.so.1", "Windows": "nvcuda.dll"}


class CudaError(RuntimeError):
    """A driver call failed; the message names the call and the driver's word for it."""


@cache
def driver() -> Any | None:
    """The driver library after ``cuInit``, or None where there is no driver or no device."""
    name = LIBRARIES.get(platform.system())
    if name is None:
        return None
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def device_count() -> int:
    """How many CUDA devices the driver sees; 0 without a driver."""
    library = driver()
    count = ctypes.c_int(0)
    if library is None or library.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def device_name(index: int = 0) -> str | None:
    """Name and compute capability, e.g. ``NVIDIA H200 (SM90)``."""
    library = driver()
    if library is None or index >= device_count():
        return None
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, 256, index)
    version = []
    for attribute in (75, 76):  # compute capability, major and minor
        number = ctypes.c_int(0)
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, index)
        version.append(str(number.value))
    return f"{name.value.decode()} (SM{''.join(version)})"


class Device:
    """One device's primary context, a stream, and buffers by name."""

    def __init__(self, library: Any | None = None) -> None:
        self._library = library if library is not None else driver()
        if self._library is None:
            raise CudaError("no CUDA driver")
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), 0)
        self.stream = int(stream.value or 0)
        self._buffers: dict[str, tuple[ctypes.c_uint64, int]] = {}

    def buffer(self, name: str, size: int) -> int:
        """Address of a buffer of at least ``size`` bytes, kept under ``name``."""
        held = self._buffers.get(name)
        if held is not None and held[1] >= size:
            return held[0].value
        if held is not None:
            self._call("cuMemFree_v2", held[0])
        address = ctypes.c_uint64(0)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        self._buffers[name] = (address, max(size, 1))
        return address.value

    def upload(self, name: str, array: np.ndarray) -> int:
        array = np.asarray(array, order="C")
        address = self.buffer(name, array.nbytes)
        if array.nbytes:
            pointer = array.ctypes.data_as(ctypes.c_void_p)
            size = ctypes.c_size_t(array.nbytes)
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), pointer, size)
        return address

    def download(self, name: str, array: np.ndarray) -> np.ndarray:
        """Fill ``array`` from the buffer called ``name``."""
        if array.nbytes:
            pointer = array.ctypes.data_as(ctypes.c_void_p)
            size = ctypes.c_size_t(array.nbytes)
            self._call("cuMemcpyDtoH_v2", pointer, self._buffers[name][0], size)
        return array

    def synchronise(self) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def record(self, event: ctypes.c_void_p) -> None:
        self._call("cuEventRecord", event, ctypes.c_void_p(self.stream))

    def elapsed_ms(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Device time between two recorded events."""
        self._call("cuEventSynchronize", end)
        ms = ctypes.c_float(0)
        self._call("cuEventElapsedTime", ctypes.byref(ms), start, end)
        return float(ms.value)

    def _call(self, function: str, *args: Any) -> None:
        assert self._library is not None
        code = getattr(self._library, function)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            word = text.value.decode() if text.value else f"error {code}"
            raise CudaError(f"{function}: {word}")
