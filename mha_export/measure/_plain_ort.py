"""ONNX Runtime's CPU in this process, as a plain implementation with every optimisation off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import onnx_ir as ir


class PlainOrt:
    """One model in a session of this process."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @classmethod
    def of(cls, model: ir.Model, *, optimise: bool = False) -> Self | None:
        """A session of ``model``; None where the runtime is missing or refuses it."""
        from mha_export.targets._files import model_bytes
        from mha_export.targets._ort import SessionSetup, open_session

        try:
            return cls(open_session(model_bytes(model), SessionSetup(threads=1, optimise=optimise)))
        except Exception:  # not installed, or no kernel for one of the ops: one member fewer
            return None

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name.

        Errors:
            Exception: the runtime's own.
        """
        from mha_export.targets._ort import from_ort_value, quiet_run, to_ort_value

        names = [output.name for output in self._session.get_outputs()]
        feeds = {
            v.name: to_ort_value(np.asarray(inputs[v.name])) for v in self._session.get_inputs()
        }
        results = self._session.run_with_ort_values(names, feeds, quiet_run())
        return {name: from_ort_value(value) for name, value in zip(names, results, strict=True)}
