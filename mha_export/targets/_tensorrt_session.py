"""Running a TensorRT engine: names to device buffers, one stream, device time from events."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from mha_export.targets._cuda import Device
from mha_export.targets._target import Placement

if TYPE_CHECKING:
    from mha_export.targets._tensorrt import TensorRtArtifact

DTYPES = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
"""TensorRT element types by the name of their enumerator."""


class TensorRtSession:
    """An engine on the first device."""

    def __init__(self, artifact: TensorRtArtifact, graph: str) -> None:
        trt = importlib.import_module(artifact.module.replace("-", "_"))
        self._artifact = artifact
        self._graph = graph
        self._device = Device()
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._engine = self._runtime.deserialize_cuda_engine(artifact.models[graph].read_bytes())
        if self._engine is None:
            raise RuntimeError(f"{artifact.module} could not load {artifact.models[graph].name}")
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        mode = trt.TensorIOMode.INPUT
        self._inputs = [name for name in names if self._engine.get_tensor_mode(name) == mode]
        self._outputs = artifact.outputs[graph]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = self._bind(inputs)
        self._execute()
        self._device.synchronise()
        return {
            name: self._device.download(self._updated_in_place(name) or name, array)
            for name, array in arrays.items()
        }

    def time(
        self, inputs: Mapping[str, np.ndarray], *, repeats: int, warmup: int
    ) -> Sequence[float]:
        """Device milliseconds between events around each execution; inputs stay on the device."""
        self._bind(inputs)
        start, end = self._device.event(), self._device.event()
        times = []
        for turn in range(warmup + repeats):
            self._device.record(start)
            self._execute()
            self._device.record(end)
            elapsed = self._device.elapsed_ms(start, end)
            if turn >= warmup:
                times.append(elapsed)
        return times

    def placement(self) -> Placement:
        return self._artifact.placement(self._graph)

    def _bind(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        missing = set(self._inputs) - inputs.keys()
        if missing:
            raise ValueError(f"no array for input {sorted(missing)}; got {sorted(inputs)}")
        for name in self._inputs:
            array = np.asarray(inputs[name])
            wanted = np.dtype(self._dtype(name))
            if array.dtype != wanted:
                raise ValueError(f"input '{name}' is {array.dtype}; the engine expects {wanted}")
            if not self._context.set_input_shape(name, tuple(array.shape)):
                raise RuntimeError(
                    f"input '{name}' of shape {list(array.shape)} is outside the engine's profile"
                )
            self._context.set_tensor_address(name, self._device.upload(name, array))
        unknown = self._context.infer_shapes()
        if unknown:
            raise RuntimeError(f"the engine could not infer the shapes of {list(unknown)}")
        outputs = {}
        for name in self._outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            outputs[name] = np.empty(shape, self._dtype(name))
            updated = self._updated_in_place(name)
            address = self._device.buffer(updated or name, outputs[name].nbytes)
            self._context.set_tensor_address(name, address)
        return outputs

    def _execute(self) -> None:
        if not self._context.execute_async_v3(self._device.stream):
            raise RuntimeError(f"{self._artifact.module} failed to execute")

    def _updated_in_place(self, output: str) -> str | None:
        """The input whose buffer an output shares (a cache), where the engine says so."""
        aliased = getattr(self._engine, "get_aliased_input_tensor", None)
        return aliased(output) or None if aliased is not None else None

    def _dtype(self, name: str) -> Any:
        kind = self._engine.get_tensor_dtype(name).name
        try:
            return DTYPES[kind]
        except KeyError:
            raise RuntimeError(f"tensor '{name}' is {kind}, which numpy cannot hold") from None
