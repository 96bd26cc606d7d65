"""The CUDA driver binding, against a driver in memory; and what a machine without one says."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from mha_export.errors import TargetUnavailableError
from mha_export.targets import CompileOptions, Program, Unavailable, _cuda, target_named
from mha_export.targets.directml import availability_on


class FakeDriver:
    """Memory by address; every call succeeds but those named in ``failing``."""

    def __init__(self, failing: str = "") -> None:
        self.memory: dict[int, bytearray] = {}
        self.failing = failing
        self.freed: list[int] = []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: 2 if name == self.failing else 0

    def cuMemAlloc_v2(self, address, size):  # noqa: N802
        if self.failing == "cuMemAlloc_v2":
            return 2
        address._obj.value = 0x1000 + 0x100 * len(self.memory)
        self.memory[address._obj.value] = bytearray(size.value)
        return 0

    def cuMemFree_v2(self, address):  # noqa: N802
        self.freed.append(address.value)
        return 0

    def cuMemcpyHtoD_v2(self, address, pointer, size):  # noqa: N802
        self.memory[address.value][: size.value] = ctypes.string_at(pointer, size.value)
        return 0

    def cuMemcpyDtoH_v2(self, pointer, address, size):  # noqa: N802
        ctypes.memmove(pointer, bytes(self.memory[address.value]), size.value)
        return 0

    def cuEventElapsedTime(self, ms, start, end):  # noqa: N802
        ms._obj.value = 1.5
        return 0

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = b"out of memory"
        return 0


def test_arrays_go_to_the_device_and_back() -> None:
    device = _cuda.Device(FakeDriver())
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    device.upload("x", x.T)  # not contiguous
    np.testing.assert_array_equal(device.download("x", np.empty((3, 2), np.float32)), x.T)
    device.upload("empty", np.empty((0, 4), np.float32))
    assert device.elapsed_ms(device.event(), device.event()) == 1.5


def test_a_buffer_is_kept_until_it_is_too_small() -> None:
    driver = FakeDriver()
    device = _cuda.Device(driver)
    first = device.buffer("x", 64)
    assert device.buffer("x", 32) == first
    second = device.buffer("x", 128)
    assert second != first
    assert driver.freed == [first]


def test_a_failed_call_is_named_with_the_drivers_word() -> None:
    device = _cuda.Device(FakeDriver(failing="cuMemAlloc_v2"))
    with pytest.raises(_cuda.CudaError, match="cuMemAlloc_v2: out of memory"):
        device.buffer("x", 8)


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(_cuda, "driver", lambda: None)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_without_a_gpu_the_target_is_absent_with_a_reason(name, tmp_path) -> None:
    target = target_named(name)
    state = target.availability().run
    assert isinstance(state, Unavailable)
    assert "pip install" in state.fix
    with pytest.raises(TargetUnavailableError):
        target.compile(Program(graphs={"main": tmp_path / "x.onnx"}), CompileOptions())
    assert _cuda.device_count() == 0
    assert _cuda.device_name() is None


@pytest.mark.parametrize(
    ("system", "says"),
    [("Linux", "part of Windows"), ("Darwin", "part of Windows"), ("Windows", "not installed")],
)
def test_directml_is_absent_with_a_reason(system, says) -> None:
    state = availability_on(system).run
    assert isinstance(state, Unavailable)
    assert says in state.reason
    assert "directml" in state.fix
