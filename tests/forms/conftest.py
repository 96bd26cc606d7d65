"""A second real runtime for forms of plain ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
import pytest


@pytest.fixture(scope="session")
def openvino_run() -> Iterator[Callable[[ir.Model, dict[str, np.ndarray]], dict[str, np.ndarray]]]:
    """One run in f32 in a worker process; skips where OpenVINO is absent and not required."""
    from mha_export.targets import Unavailable, evaluator_of, target_named

    state = target_named("openvino").availability().run
    if isinstance(state, Unavailable):
        required = os.environ.get("MHA_EXPORT_REQUIRED_TARGETS", "openvino")
        if "openvino" in required.split(","):
            pytest.fail(f"target openvino is required: {state.reason}; {state.fix}")
        pytest.skip(f"target openvino is not here: {state.reason}")
    evaluator = evaluator_of("openvino", "f32")
    yield evaluator.run
    evaluator.close()  # type: ignore[attr-defined]
